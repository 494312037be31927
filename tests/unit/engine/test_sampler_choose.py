"""Choosing tokens: seeds, drafts that change nothing, bad rows, and what a greedy batch costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.core.sampling import SamplingParams
from eyas.engine.sampler import (
    Needs,
    SamplingState,
    choose,
    needs_of,
    raw_logprobs,
    row_positions,
    target_probs,
)
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import reject_sampled

V = 16
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.8, top_p=0.8, top_k=9, min_p=0.02),
    "rich": SamplingParams(
        temperature=1.2,
        top_p=0.9,
        presence_penalty=0.8,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 1.5, 5: float("-inf")},
        min_tokens=6,
        stop_token_ids=(2,),
    ),
}


class Toy:
    """A target whose logits depend on the last two tokens, and its history, for some requests."""

    def __init__(self, params: list[SamplingParams], seeds: list[int], needs: Needs | None = None) -> None:
        self.table = torch.randn(V, V, V, generator=torch.Generator().manual_seed(5)) * 2
        self.state = SamplingState(len(params), V, eos_token_ids=(0,))
        self.history = torch.full((len(params) + 1, 80), 9)
        self.needs = Needs.GREEDY
        for slot, (one, seed) in enumerate(zip(params, seeds, strict=True)):
            self.state.set_row(slot, one, num_prompt_tokens=2, seed=seed)
            self.history[slot, :2] = torch.tensor([slot % 2, 4])
            self.needs |= needs_of(one)
        if needs is not None:
            self.needs = needs
        self.slots = torch.arange(len(params))
        self.position0 = torch.full((len(params),), 2)

    def step(self, drafts):
        tokens = torch.cat(
            [self.history[self.slots, self.position0 - 1].unsqueeze(1), drafts.clamp(min=0)], 1
        )
        before = torch.cat([self.history[self.slots, self.position0 - 2].unsqueeze(1), tokens[:, :-1]], 1)
        logits = self.table[before, tokens]
        choices, bad = choose(
            logits, self.state, self.slots, drafts, self.position0, self.history, self.needs
        )
        tokens, counts = accept_by_match(choices, drafts)
        assert not bad.any()
        for b in range(len(self.slots)):
            start = int(self.position0[b])
            self.history[b, start : start + int(counts[b])] = tokens[b, : counts[b]]
        self.position0 = self.position0 + counts

    def run(self, num_tokens, num_drafts, generator):
        while int(self.position0.min()) < 2 + num_tokens:
            self.step(torch.randint(-1, V, (len(self.slots), num_drafts), generator=generator))
        return self.history[:-1, 2 : 2 + num_tokens]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_point_mass_drafts_change_no_token(seed, num_drafts):
    """Plain decoding and decoding with arbitrary drafts, every kind of request in one batch."""
    generator = torch.Generator().manual_seed(seed)
    params, seeds = list(KINDS.values()), [seed + i for i in range(len(KINDS))]
    plain = Toy(params, seeds).run(12, 0, generator)

    assert torch.equal(Toy(params, seeds).run(12, num_drafts, generator), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_good_drafts_are_accepted_and_change_no_token(kind):
    """Drafts from the plain run itself: everything is accepted, in the fewest steps."""
    plain = Toy([KINDS[kind]], [7]).run(12, 0, torch.Generator())
    toy = Toy([KINDS[kind]], [7])
    for start in range(0, 12, 4):
        toy.step(plain[:, start : start + 3])

    assert toy.position0.tolist() == [14]
    assert torch.equal(toy.history[:1, 2:14], plain)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_do_not_matter(kind):
    """Alone with its own needs, and among seven others under the union of all needs."""
    generator = torch.Generator().manual_seed(0)
    alone = Toy([KINDS[kind]], [3]).run(10, 0, generator)
    others = [*KINDS.values(), *KINDS.values()][:7]
    together = Toy([KINDS[kind], *others], [3, *range(50, 57)]).run(10, 3, generator)

    assert torch.equal(together[0], alone[0])


def test_seed_decides():
    params = [KINDS["sampled"]] * 3
    one = Toy(params, [1, 1, 2])
    one.history[1] = one.history[0]
    tokens = one.run(12, 2, torch.Generator().manual_seed(0))

    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])


def batch(needs_params, num_drafts=2):
    toy = Toy(needs_params, list(range(len(needs_params))))
    size = len(needs_params)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(size, num_drafts + 1, V, generator=generator)
    drafts = torch.randint(0, V, (size, num_drafts), generator=generator)
    return toy, logits, (toy.state, toy.slots, drafts, toy.position0, toy.history, toy.needs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_is_flagged_and_harms_no_other(kind, value):
    _, logits, rest = batch([KINDS[kind]] * 3)
    good = choose(logits, *rest)
    good_p = target_probs(logits, *rest)
    logits[1, 1, 8] = value
    broken = choose(logits, *rest)
    broken_p = target_probs(logits, *rest)

    expected = torch.zeros(3, 3, dtype=torch.bool)
    expected[1, 1] = True
    assert torch.equal(broken.bad_rows, expected)
    assert torch.equal(broken_p.bad_rows, expected)
    assert torch.equal(broken.tokens[~expected], good.tokens[~expected])
    assert torch.equal(broken_p.probs[~expected], good_p.probs[~expected])
    assert 0 <= int(broken.tokens[1, 1]) < V


def test_nothing_allowed_is_bad():
    ban = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(V), float("-inf")))
    _, logits, rest = batch([ban, KINDS["sampled"]])

    assert choose(logits, *rest).bad_rows.tolist() == [[True] * 3, [False] * 3]


def test_equal_logits_choose_the_lowest_id():
    _, logits, rest = batch([KINDS["greedy"]])

    assert choose(torch.zeros_like(logits), *rest).tokens.tolist() == [[0, 0, 0]]


def test_greedy_rows_of_a_mixed_batch():
    _, logits, rest = batch([KINDS["greedy"], KINDS["rich"]])
    probs, _ = target_probs(logits, *rest)

    assert torch.equal(choose(logits, *rest).tokens[0], logits[0].argmax(-1))
    assert torch.equal(probs[0], torch.nn.functional.one_hot(logits[0].argmax(-1), V).float())


def test_choices_are_draws_from_target_probs():
    """The two entry points speak of one distribution: never a token of probability zero."""
    _, logits, rest = batch([KINDS["filtered"], KINDS["rich"]] * 20)
    probs, _ = target_probs(logits, *rest)
    chosen = probs.gather(-1, choose(logits, *rest).tokens.unsqueeze(-1))

    assert (chosen > 0).all()


class Recorder(TorchDispatchMode):
    """Operators that ran, with the number of elements each gave."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        size = out.numel() if isinstance(out, torch.Tensor) else 0
        self.ran.append((func.overloadpacket.__name__, size))
        return out


def test_a_greedy_batch_costs_one_argmax():
    """No operator but a view makes anything as large as the logits."""
    _, logits, rest = batch([KINDS["greedy"]] * 4)
    with Recorder() as recorder:
        choose(logits, *rest)

    names = [name for name, _ in recorder.ran]
    assert names.count("argmax") == 1
    assert max(size for _, size in recorder.ran) == 12


HOST = {
    "_local_scalar_dense",
    "nonzero",
    "item",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "_to_copy_cpu",
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_back_to_the_host(kind):
    """What a CUDA graph cannot hold: values that the host waits for, shapes that depend on data."""
    _, logits, rest = batch([KINDS[kind]] * 2)
    state, slots, drafts, position0 = rest[:4]
    q = torch.full((2, 2, V), 1 / V)
    with Recorder() as recorder:
        tokens, _ = choose(logits, *rest)
        accept_by_match(tokens, drafts)
        probs, _ = target_probs(logits, *rest)
        accepted = reject_sampled(probs, q, drafts, state.seeds[slots], row_positions(position0, 3))
        raw_logprobs(logits, accepted.tokens, 2)

    assert not HOST & {name for name, _ in recorder.ran}


def test_raw_logprobs():
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    out = raw_logprobs(logits, torch.tensor([[2]]), 2)

    expected = logits.log_softmax(-1)[0, 0]
    assert out.ranks.tolist() == [[3]]
    assert out.top_ids.tolist() == [[[1, 3]]]
    torch.testing.assert_close(out.chosen[0, 0], expected[2])
    torch.testing.assert_close(out.top[0, 0], expected[[1, 3]])
    assert raw_logprobs(logits, torch.tensor([[1]]), 0).top.shape == (1, 1, 0)
