"""What sampling costs, greedy requests do not pay: neither target nor head ever gives logits for them."""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from eyas.kernels import dispatch
from fakes import naive_greedy, random_head
from replayed import with_graphs
from tiny import tiny_target
from tree_fakes import tree_head

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RICH = {
    "sampled": SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 1.0}, max_tokens=4, ignore_eos=True),
    "penalty": SamplingParams(temperature=0.0, presence_penalty=0.5, max_tokens=4, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, logprobs=0, max_tokens=4, ignore_eos=True),
}
DRAFTERS = {
    "plain": lambda target: None,
    "eagle3": lambda target: random_head(target, "eagle3", 3),
    "peagle": lambda target: random_head(target, "peagle", 3),
    "peagle tree": lambda target: tree_head(target, "peagle", "3x2x6"),
}


def refuse(*_):
    raise AssertionError("logits were made")


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("captured", [False, True])
def test_greedy_steps_make_no_logits(kind, captured, monkeypatch):
    target = tiny_target()
    expected = [naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    drafter = DRAFTERS[kind](target)
    llm = LLM(target, drafter, max_model_len=64, page_size=4, max_num_seqs=4)
    if captured:
        with_graphs(llm)
    monkeypatch.setattr(target.decoder, "logits", refuse)
    if kind in ("eagle3", "peagle"):  # a tree needs the likeliest few and their probabilities
        monkeypatch.setattr(drafter.model, "logits", refuse)
    assert llm.generate_ids(PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("name", RICH)
def test_others_do(name, monkeypatch):
    """Or the test above would show nothing; and a rich request's neighbour is plain again once it is gone."""
    target = tiny_target()
    expected = naive_greedy(target, PROMPTS[0], 12)
    llm = LLM(target, random_head(target, "eagle3", 3), max_model_len=64, page_size=4, max_num_seqs=4)
    made, logits = [], target.decoder.logits

    def counted(hidden):
        made.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(target.decoder, "logits", counted)
    answers = llm.generate_ids(PROMPTS, [GREEDY, RICH[name]])
    assert answers[0] == expected
    assert len(made) in range(1, 5)  # of twelve steps
    assert set(made) == {2}


@pytest.mark.gpu
def test_no_logits_of_the_whole_vocabulary_stand_in_memory():
    """512 rows x 131,072 tokens would be 128 MiB in bfloat16 and 256 in float32."""
    x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (512, 131072))
    with torch.no_grad():
        dispatch.max_linear(x, weight)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        largest, ids = dispatch.max_linear(x, weight)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 16 << 20
        logits = x @ weight.T
    assert (logits.gather(1, ids[:, None])[:, 0].float() - largest.float()).abs().max() < 0.25
