"""Whatever JSON comes, a body becomes parameters or an error that names a field; never anything else."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.core.errors import RequestError
from eyas.core.sampling import SamplingParams
from eyas.server.errors import ApiError, of_request_error
from eyas.server.prepare import FIELDS
from eyas.server.schema import (
    IGNORED,
    NOT_SERVED,
    ChatRequest,
    CompletionRequest,
    parse,
    plain_messages,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=4)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KINDS = (ChatRequest, CompletionRequest)


def body_of(kind):
    names = sorted({*kind.model_fields, *NOT_SERVED, *IGNORED, "nonsense"})
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


def outcome(kind, body):
    """The parameters, or the error that the client would get."""
    try:
        parsed = parse(kind, body)
        params = parsed.to_params(default_max_tokens=5)
        if kind is ChatRequest:
            plain_messages(parsed.messages)
        else:
            parsed.prompts()
    except RequestError as error:
        return of_request_error(error, FIELDS, "")
    except ApiError as error:
        return error
    return params


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_body_is_served_or_refused_by_name(kind, data):
    body = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    body |= data.draw(body_of(kind))
    result = outcome(kind, body)
    if isinstance(result, ApiError):
        assert result.status == 400
        assert result.param is not None
        assert result.param.partition("[")[0].partition(".")[0] in body
        return
    assert isinstance(result, SamplingParams)
    numbers = (result.temperature, result.top_p, result.min_p, *result.logit_bias.values())
    assert all(math.isfinite(number) for number in numbers)
    assert result.seed is None or abs(result.seed) <= 2**62
    for name, harmless in NOT_SERVED.items():
        assert body.get(name) is None or body[name] in harmless


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(body=values)
@example(body=[])
@example(body={"prompt": "x", "messages": None})
def test_any_value_as_a_body(kind, body):
    assert isinstance(outcome(kind, body), ApiError | SamplingParams)


def test_parameters_are_what_was_asked_for():
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -5},
        "n": 2,
        "seed": 9,
        "stop": "end",
        "stop_token_ids": [4],
        "max_tokens": 11,
        "max_completion_tokens": 12,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 3,
    }
    assert parse(ChatRequest, body).to_params(default_max_tokens=5) == SamplingParams(
        temperature=1,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={7: -5},
        n=2,
        seed=9,
        stop=("end",),
        stop_token_ids=(4,),
        max_tokens=12,
        min_tokens=2,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
    )
    assert parse(CompletionRequest, {"prompt": "x"}).to_params(default_max_tokens=5) == SamplingParams(
        max_tokens=5
    )
