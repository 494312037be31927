"""A request may ask for fewer drafts than its neighbours; its tokens are the same."""

import pytest
import torch

from eyas import LLM
from eyas.core.errors import RequestError
from eyas.core.sampling import SamplingParams
from eyas.engine.state import EngineState
from eyas.kernels.reference.step_take import take
from fakes import make_drafter
from tiny import tiny_target
from tree_fakes import tree_head

PROMPTS = [[1, 5, 9], [7, 8, 9, 10, 11]]


def params(limit, temperature=0.0):
    return SamplingParams(
        temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, num_draft_tokens=limit
    )


def test_drafts_from_the_limit_on_are_no_drafts():
    state = EngineState(
        2, num_draft_tokens=3, max_len=16, page_size=4, vocab_size=8, eos_token_ids=(), device="cpu"
    )
    state.draft_limit[:2] = torch.tensor([1, 3])
    drafts = torch.tensor([[5, 6, 7], [1, 2, 3], [4, 4, 4]])
    state.drafts[:] = drafts
    taken = take(torch.tensor([0, 1, 2]), state.source, 3)
    assert taken.drafts.tolist() == [[5, -1, -1], [1, 2, 3], [4, 4, 4]]
    assert taken.token_ids[:, 1:].tolist() == [[5, 0, 0], [1, 2, 3], [4, 4, 4]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_a_limit_bounds_the_drafts_of_its_request_alone(limit, temperature):
    target = tiny_target()
    llm = LLM(target, make_drafter("self", target, 4, []), max_num_seqs=2)
    plain = LLM(target, max_num_seqs=2).generate(PROMPTS, params(None, temperature))
    limited, free = llm.generate(PROMPTS, [params(limit, temperature), params(None, temperature)])
    for got, want in zip((limited, free), plain, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert max(limited.outputs[0].origins) <= min(limit, 4)
    assert limited.stats.drafted <= min(limit, 4) * limited.stats.steps
    if temperature == 0:
        assert max(limited.outputs[0].origins) == min(limit, 4)
        assert max(free.outputs[0].origins) == 4


def test_a_limit_bounds_the_nodes_of_a_tree():
    target = tiny_target()
    llm = LLM(target, tree_head(target, "eagle3", "3x2x6"), max_num_seqs=2)
    want = LLM(target, max_num_seqs=2).generate(PROMPTS, params(None))
    for limit in (0, 2, 6):
        got = llm.generate(PROMPTS, params(limit))
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
        assert all(o.stats.drafted <= limit * o.stats.steps for o in got)
        assert all((o.stats.drafted > 0) == (limit > 0) for o in got)


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_a_limit_is_a_count(bad):
    with pytest.raises(RequestError, match="num_draft_tokens"):
        params(bad)
