"""Overlap: each step launched before the last one's report is read gives what the plain order gives.

Everything that can end, move or remove a request happens at random: stops, end of text, lengths, aborts,
preemption, late arrivals, long prompts in chunks.
"""

import random

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from fakes import PieceTokenizer, make_drafter, naive_greedy, random_head, small_model
from tiny import tiny_target
from tree_fakes import tree_head

MAX_LEN = 72


@pytest.fixture(scope="module")
def target():
    target = tiny_target(seed=3)
    target.tokenizer = PieceTokenizer()
    return target


KINDS = {
    "plain": lambda target: None,
    "prompt_lookup": lambda target: make_drafter("prompt_lookup", target, 3, []),
    "eagle3": lambda target: random_head(target, "eagle3", 3),
    "peagle": lambda target: random_head(target, "peagle", 3),
    "self": lambda target: small_model(target, 5, same=True),
    "eagle3 tree": lambda target: tree_head(target, "eagle3", "3x2x6"),
    "peagle tree": lambda target: tree_head(target, "peagle", "3x2x6"),
}


def random_params(rng: random.Random, target) -> SamplingParams:
    """Greedy or sampled, plain or rich, ending in any way."""
    options = {"temperature": rng.choice([0.0, 0.0, 0.8]), "seed": rng.randrange(99)}
    options["max_tokens"] = rng.choice([1, 2, 3, 9, 20, 38, 60])
    options["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.3:
        options["stop_token_ids"] = tuple(rng.sample(range(64), 5))
    if rng.random() < 0.3:
        options["stop"] = (target.tokenizer.pieces[rng.randrange(8, 64)].decode(),)
    if rng.random() < 0.3:
        options["logit_bias"] = {0: 2.0}  # the end of text, now and then
    if rng.random() < 0.2:
        options |= {"frequency_penalty": 0.5, "min_tokens": min(3, options["max_tokens"])}
    if rng.random() < 0.2:
        options["logprobs"] = rng.choice([0, 2])
    return SamplingParams(**options)


def completion(group) -> tuple:
    (request,) = group.requests
    # The last bits depend on who else was in the batch.
    logprobs = request.logprobs and [
        [(entry.token_id, entry.rank, round(entry.logprob, 3)) for entry in entries]
        for entries in request.logprobs
    ]
    return request.output_ids, request.finish_reason, request.stop_reason, logprobs, request.error


def play(llm: LLM, seed: int, target) -> list:
    """Submit ten requests over time, abort some when they have so many tokens; what became of them."""
    rng = random.Random(seed)
    made = []
    for number in range(10):
        prompt = [rng.randrange(2, 64) for _ in range(rng.choice([1, 2, 5, 9, 30]))]
        group = llm._intake.group(prompt, random_params(rng, target))
        # Aborted requests are compared up to the tokens that both runs have.
        made.append((group, rng.randrange(0, 12), rng.randrange(1, 9) if number % 5 == 4 else None))
    for step in range(400):
        for group, arrival, _ in made:
            if arrival == step:
                llm.submit(group)
        for group, _, limit in made:
            if limit is not None and len(group.requests[0].output_ids) >= limit:
                llm.abort(group.request_id)
        if not llm.step() and step > 12:
            break
    assert all(group.finished for group, _, _ in made)
    llm._runner.scheduler.check_integrity()
    assert llm._runner.scheduler.blocks.num_free == llm._runner.scheduler.blocks.num_pages - 1
    assert llm._runner._flight is None
    return made


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_overlap_changes_nothing(target, kind, seed):
    runs = []
    for overlap in (False, True):
        drafter = KINDS[kind](target)
        options = {"max_model_len": MAX_LEN, "page_size": 4, "max_num_seqs": 5, "prefill_chunk": 7}
        llm = LLM(target, drafter, num_pages=18, overlap=overlap, **options)
        runs.append(play(llm, seed, target))
    for (one, _, limit), (two, _, _) in zip(*runs, strict=True):
        if limit is None or "abort" not in (one.requests[0].finish_reason, two.requests[0].finish_reason):
            assert completion(one) == completion(two)
        else:
            ours, theirs = one.requests[0].output_ids, two.requests[0].output_ids
            common = min(len(ours), len(theirs))
            assert ours[:common] == theirs[:common]
            assert common > 0


@pytest.mark.parametrize("kind", ["plain", "eagle3", "peagle tree"])
def test_preemption_with_a_step_in_flight(target, kind):
    """Pages for a single request of full length; the tokens of the flight are kept, so nothing is lost."""
    prompts = [[2, 3, 4], [9, 10], [40, 41, 42, 43], [50]]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    options = {"max_model_len": MAX_LEN, "page_size": 4, "num_pages": 18, "overlap": True}
    llm = LLM(target, KINDS[kind](target), **options)
    outputs = llm.generate_ids(prompts, params)

    assert llm.stats.preemptions > 0
    assert outputs == [naive_greedy(target, prompt, 60) for prompt in prompts]
    assert llm.stats.committed == 4 * 60


def test_tokens_come_one_step_late_and_lengths_cost_no_superfluous_step(target):
    llm = LLM(target, overlap=True, max_model_len=MAX_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    group = llm._intake.group([5, 6, 7], params)
    llm.submit(group)
    seen = []
    while llm.step():
        seen.append(len(group.requests[0].output_ids))

    assert seen == [0, 1, 2, 3]
    assert group.requests[0].output_ids == naive_greedy(target, [5, 6, 7], 4)
    assert llm.stats.steps == llm.stats.row_steps == 4


@pytest.mark.parametrize("place", range(5))
def test_a_row_goes_off_at_its_end_of_text(target, place):
    """The step that runs when the end is found out moves nothing on; its tokens count nowhere."""
    answer = naive_greedy(target, [5, 6, 7], 12)
    model = tiny_target(seed=3)
    model.config = target.config.__class__(**{**vars_of(target.config), "eos_token_ids": (answer[place],)})
    llm = LLM(model, small_model(model, 3, same=True), overlap=True, max_model_len=MAX_LEN)
    group = llm._intake.group([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40))
    llm.submit(group)
    llm.step()
    slot = group.requests[0].slot
    while llm.step():
        pass
    request, state = group.requests[0], llm._runner.state

    assert request.output_ids == answer[: answer.index(answer[place]) + 1]
    assert not state.live[slot]
    # One whole run after the other, and none after the one that held the end.
    end = 3 + answer.index(answer[place])
    assert end <= int(state.length[slot]) <= end + 3
    assert llm.stats.row_steps < llm.stats.steps


def vars_of(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_a_row_never_passes_its_limit(target):
    llm = LLM(target, small_model(target, 7, same=True), overlap=True, max_model_len=40, page_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop_token_ids=(63,))
    outputs = llm.generate([[5, 6, 7], [9], list(range(2, 36))], params)
    state = llm._runner.state

    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) <= 40 for o in outputs)
    assert int(state.length.max()) <= 39
    assert torch.equal(state.history[-1], torch.zeros_like(state.history[-1]))
