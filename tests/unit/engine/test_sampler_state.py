import math

import pytest
import torch

from eyas.core.errors import RequestError
from eyas.core.sampling import SamplingParams
from eyas.engine.sampler_state import (
    MAX_LOGIT_BIAS,
    Needs,
    SamplingState,
    check_params,
    needs_of,
    stop_ids_of,
    wrap_seed,
)


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({"temperature": 0}, Needs.GREEDY),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, Needs.GREEDY),
        ({"temperature": 0.5}, Needs.SAMPLE),
        ({"top_k": -1}, Needs.SAMPLE),
        ({"top_k": 5}, Needs.SAMPLE | Needs.FILTER),
        ({"min_p": 0.1}, Needs.SAMPLE | Needs.FILTER),
        ({"temperature": 0, "repetition_penalty": 1.1}, Needs.SHAPE),
        ({"temperature": 0, "presence_penalty": -0.1}, Needs.SHAPE),
        ({"temperature": 0, "frequency_penalty": 0.1}, Needs.SHAPE),
        ({"temperature": 0, "logit_bias": {1: 0.5}}, Needs.SHAPE),
        ({"temperature": 0, "min_tokens": 1}, Needs.SHAPE),
    ],
)
def test_needs(params, needs):
    assert needs_of(SamplingParams(**params)) == needs


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": (8,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(7)) * 30}, None),
        ({"logit_bias": {8: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]"),
        ({"logit_bias": {1: -math.inf}}, None),
    ],
)
def test_bad_values_name_their_field(params, field):
    if field is None:
        check_params(SamplingParams(**params), 8)
    else:
        with pytest.raises(RequestError, match=field):
            check_params(SamplingParams(**params), 8)


def test_too_many_entries():
    many = dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)
    with pytest.raises(RequestError, match="logit_bias has 1025"):
        check_params(SamplingParams(logit_bias=many), 5000)
    with pytest.raises(RequestError, match="stop_token_ids"):
        check_params(SamplingParams(stop_token_ids=tuple(range(128))), 5000, (4000,))


def test_stop_ids():
    assert stop_ids_of(SamplingParams(stop_token_ids=(5, 1)), (3,)) == [1, 3, 5]
    assert stop_ids_of(SamplingParams(stop_token_ids=(5,), ignore_eos=True), (3,)) == [5]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 + 5, -(2**70)])
def test_any_seed_fits(seed):
    wrapped = wrap_seed(seed)

    assert -(2**63) <= wrapped < 2**63
    assert (wrapped - seed) % 2**64 == 0


def test_rows_are_written_and_cleared_in_place():
    state = SamplingState(2, 8, eos_token_ids=(7,))
    tensors = (state.floats, state.ints, state.bias_ids, state.bias_values, state.stop_ids)
    fresh = [tensor.clone() for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, logit_bias={2: 1.0, 4: -1.0}, min_tokens=2, stop_token_ids=(1,)
    )

    state.set_row(1, params, num_prompt_tokens=6, seed=2**63)

    assert state.temperature.tolist() == [0.0, 0.5, 0.0]
    assert state.top_k.tolist() == [8, 3, 8]
    assert state.seeds[1] == -(2**63)
    assert state.num_prompt_tokens[1] == 6
    assert state.stop_ids[1, :3].tolist() == [1, 7, -1]
    state.set_row(1, SamplingParams(logit_bias={0: 2.0}), num_prompt_tokens=6, seed=0)
    assert state.bias_ids[1, :3].tolist() == [0, 0, 0]
    assert state.bias_values[1, :3].tolist() == [2.0, 0.0, 0.0]
    state.clear_row(1)
    assert all(torch.equal(old, new) for old, new in zip(fresh, tensors, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
