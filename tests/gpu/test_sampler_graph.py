"""Sampling and verification on CUDA: in a CUDA graph, and with the bits of the CPU."""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.sampler import (
    Needs,
    SamplingState,
    choose,
    needs_of,
    row_positions,
    target_probs,
)
from eyas.kernels.reference.random import draw, uniform
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import reject_sampled

pytestmark = pytest.mark.gpu

V, B, K = 5000, 6, 3
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=700, min_p=0.001),
    "shaped": SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={5: 2.0}, min_tokens=9),
    "everything": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=9
    ),
}


def rig(params, device):
    state = SamplingState(B, V, eos_token_ids=(2,), device=device)
    needs = Needs.GREEDY
    for slot, one in enumerate(params):
        state.set_row(slot, one, num_prompt_tokens=3, seed=slot + 1)
        needs |= needs_of(one)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, K + 1, V, generator=generator) * 3
    drafts = torch.randint(-1, V, (B, K), generator=generator)
    history = torch.randint(0, V, (B + 1, 40), generator=generator)
    q = torch.rand(B, K, V, generator=generator).softmax(-1)
    tensors = [t.to(device) for t in (logits, torch.arange(B), drafts, torch.arange(B) + 5, history, q)]
    return state, needs, tensors


def run(state, needs, tensors):
    logits, slots, drafts, position0, history, q = tensors
    arguments = (logits, state, slots, drafts, position0, history, needs)
    choices, bad = choose(*arguments)
    matched = accept_by_match(choices, drafts)
    probs, _ = target_probs(*arguments)
    sampled = reject_sampled(probs, q, drafts, state.seeds[slots], row_positions(position0, K + 1))
    return choices, bad, matched.counts, probs, *sampled


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_graph_equals_eager_and_cpu(kind):
    params = [*KINDS.values(), KINDS["sampled"]] if kind == "mixed" else [KINDS[kind]] * B
    state, needs, tensors = rig(params, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = run(state, needs, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(state, needs, tensors)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(eager, captured, strict=True):
        assert torch.equal(one, other)

    # New data through the same graph.
    tensors[0].copy_(tensors[0].flip(-1))
    graph.replay()
    torch.cuda.synchronize()
    fresh = run(state, needs, tensors)
    for one, other in zip(fresh, captured, strict=True):
        assert torch.equal(one, other)

    on_cpu = run(*rig(params, "cpu"))
    torch.testing.assert_close(eager[3].cpu(), on_cpu[3], atol=1e-6, rtol=1e-4)
    # Chosen tokens differ only where a number falls within rounding of an edge: not for these seeds.
    assert torch.equal(eager[0].cpu(), on_cpu[0])


def test_same_bits_as_the_cpu():
    seeds = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(1000)
    here = uniform(seeds, positions, 1)
    there = uniform(seeds.cuda(), positions.cuda(), 1)
    assert torch.equal(here, there.cpu())

    probs = torch.randn(1000, 3000, generator=torch.Generator().manual_seed(1)).mul(4).softmax(-1)
    assert torch.equal(draw(probs, here), draw(probs.cuda(), there).cpu())
