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
