"""Buckets, and the halves of a step on padded batches: what the CUDA graphs do, run eagerly on the CPU."""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.drafters.by_number import ByNumberDrafter
from eyas.engine.graphs import bucket_of, top_bucket, visible_bound
from eyas.engine.llm import LLM
from eyas.engine.sampler import Needs
from eyas.engine.step import Variant, whole
from fakes import naive_greedy, random_head, small_model
from replayed import with_graphs
from tiny import tiny_target
from tree_fakes import tree_head


@pytest.mark.parametrize(("size", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (64, 64)])
def test_buckets(size, bucket):
    assert bucket_of(size) == bucket


@pytest.mark.parametrize(("visible", "bound"), [(1, 1024), (1024, 1024), (1025, 2048), (5000, 8192)])
def test_bounds_on_visible(visible, bound):
    assert visible_bound(visible) == bound


@pytest.mark.parametrize(("asked", "given"), [(-1, -1), (0, 0), (1, 1), (3, 5), (20, 20), (33, 50)])
def test_numbers_of_logprobs(asked, given):
    assert top_bucket(asked, vocab_size=50) == given


@pytest.mark.parametrize("shape", [None, "3x2x6"], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("needs", [Needs.GREEDY, Needs.SAMPLE])
def test_padding_with_the_trash_row_changes_nothing(kind, needs, shape):
    """Two requests in a bucket of four; warm-up on trash rows alone happens in the middle of it all."""
    target = tiny_target()
    drafter = random_head(target, kind, 3) if shape is None else tree_head(target, kind, shape)
    llm = LLM(target, drafter, max_model_len=64, page_size=4, max_num_seqs=4)
    runner = llm._runner
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[3, 4, 5], [7, 8, 9, 10, 11]]
    groups = llm._intake.groups(prompts, params)
    llm._submit(groups)
    requests = [group.requests[0] for group in groups]
    trash = runner.state.num_slots
    with torch.no_grad():
        runner.step()
        for _ in range(4):
            plan = runner.scheduler.schedule()
            runner._update_rows(plan)
            warm = torch.full((4,), trash)
            variant = Variant(needs, 1024, runner.state.num_draft_tokens)
            whole(runner.models, runner.state, warm, variant)
            slots = torch.tensor([request.slot for request in requests] + [trash, trash])
            report = whole(runner.models, runner.state, slots, variant)
            runner._launcher._post.apply(requests, report.rows[:2].tolist())
            assert runner.state.length[trash] == 0
            assert not runner.state.page_table[trash].any()
            assert not runner.state.live[trash]

    for prompt, request in zip(prompts, requests, strict=True):
        tokens = request.output_ids
        assert len(tokens) >= 5
        assert tokens == naive_greedy(target, prompt, len(tokens))


DRAFTERS = {
    "plain": lambda target: None,
    "eagle3": lambda target: random_head(target, "eagle3", 3),
    "peagle": lambda target: random_head(target, "peagle", 3),
    "peagle tree": lambda target: tree_head(target, "peagle", "3x2x6"),
    "by number": lambda target: ByNumberDrafter(
        [tree_head(target, "peagle", "4x3x12"), tree_head(target, "peagle", "3x2x6")],
        random_head(target, "peagle", 3),
    ),
    "sampled": lambda target: small_model(target, 3, same=True, sample=True),
}
PROMPTS = [[3, 4, 5], [7], list(range(1, 20)), [9, 9, 9], [60, 50, 40]]


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=9, ignore_eos=True),
    "rich": SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=2, max_tokens=9, ignore_eos=True),
}


@pytest.mark.parametrize(
    ("kind", "params", "by_phase"),
    [
        ("plain", "greedy", False),
        ("plain", "rich", True),
        ("eagle3", "greedy", True),
        ("peagle", "rich", False),
        ("peagle tree", "greedy", False),
        ("peagle tree", "filtered", True),
        ("by number", "greedy", False),
        ("sampled", "filtered", False),
    ],
)
def test_captured_buffers_give_what_eager_steps_give(kind, params, by_phase):
    """Padded buckets, static tensors, a step in flight, joins and leaves; against eager steps in order."""
    target, outputs = tiny_target(), []
    for overlap in (True, False):
        options = {"max_model_len": 64, "page_size": 4, "max_num_seqs": 4, "overlap": overlap}
        llm = LLM(target, DRAFTERS[kind](target), **options)
        if kind == "by number":
            llm._runner._launcher._num_drafts = lambda batch_size: [12, 6, 0, 3][batch_size - 1]
        if overlap:
            with_graphs(llm, by_phase=by_phase)
            captured = llm._runner._graphs._captured
        for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
            outputs += [output.outputs[0] for output in llm.generate(prompts, PARAMS[params])]

    assert sorted(bucket for bucket, _ in captured) == [1, 2, 4]
    for entry in captured.values():
        phases = [phase for _, phase in entry.graphs]
        halves = ["verify_seconds"] if kind == "plain" else ["verify_seconds", "draft_seconds"]
        assert phases == (halves if by_phase else ["step_seconds"])
        assert all(graph.num_replays > 0 for graph, _ in entry.graphs)
    for one, other in zip(outputs[:8], outputs[8:], strict=True):
        assert one.token_ids == other.token_ids
        if params == "rich":
            assert [entry[0].rank for entry in one.logprobs] == [entry[0].rank for entry in other.logprobs]
