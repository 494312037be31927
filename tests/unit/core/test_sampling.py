import pytest

from eyas.core.errors import EyasError, RequestError
from eyas.core.sampling import SamplingParams


def test_defaults_and_normalisation():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert not params.greedy
    assert SamplingParams(temperature=0.0).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 101.0),
        ("frequency_penalty", float("-inf")),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("repetition_penalty", 1e-320),
        ("max_tokens", 0),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("logprobs", 101),
    ],
)
def test_out_of_range_names_the_field_and_the_value(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert isinstance(caught.value, EyasError)


def test_min_above_max_is_refused():
    with pytest.raises(RequestError, match="min_tokens=9 is above max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("n", 1.5, "an integer"),
        ("top_k", "5", "an integer"),
        ("max_tokens", 3.5, "an integer"),
        ("max_tokens", None, "an integer"),
        ("min_tokens", True, "an integer"),
        ("seed", 1.5, "an integer or None"),
        ("logprobs", "all", "an integer or None"),
        ("temperature", "1", "a number"),
        ("top_p", None, "a number"),
        ("stop", 5, "a list of texts"),
        ("stop", [1], "a list of texts"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", ["x"], "a list of token ids"),
        ("logit_bias", [1], "a mapping"),
        ("logit_bias", {"5": 1.0}, "a mapping"),
        ("logit_bias", {5: "x"}, "a mapping"),
        ("ignore_eos", "x", "True or False"),
        ("skip_special_tokens", None, "True or False"),
    ],
)
def test_wrong_types_are_refused_before_they_reach_a_step(field, value, wanted):
    with pytest.raises(RequestError, match=wanted) as caught:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)


def test_an_integer_that_no_float_holds_is_refused():
    for field, value in (("temperature", 10**400), ("logit_bias", {5: 10**400})):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})
