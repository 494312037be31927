"""The reference settle against a loop over requests and tokens."""

import pytest
import torch

from eyas.kernels.reference.step_settle import StateRows, settle


def naive(tokens, drafts, bad, slots, state):
    """One request, one token at a time; returns what each row reports and changes state's lists."""
    reports = []
    for row, slot in enumerate(slots):
        count = 1
        while count <= len(drafts[row]) and drafts[row][count - 1] == tokens[row][count - 1]:
            count += 1
        broken = any(bad[row][:count])
        reports.append([*tokens[row], 0 if broken else count, sum(draft >= 0 for draft in drafts[row])])
        if not state["live"][slot]:
            continue
        start, limit = state["length"][slot], state["limit"][slot]
        for place, token in enumerate(tokens[row]):
            state["history"][slot][start + 1 + place] = token
        state["last_token"][slot] = tokens[row][count - 1]
        state["length"][slot] = min(start + count, limit - 1)
        ended = state["stops_at_eos"][slot] and any(t in state["eos_ids"] for t in tokens[row][:count])
        state["live"][slot] = not (broken or ended or start + count + 1 >= limit)
    return reports


@pytest.mark.parametrize("seed", range(20))
def test_settle_equals_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape, high=9, low=0):
        return torch.randint(low, high, shape, generator=generator)

    tokens = numbers(5, 4)
    right = torch.rand(5, 3, generator=generator) < 0.7
    drafts = torch.where(right, tokens[:, :3], numbers(5, 3, low=-1))
    bad = torch.rand(5, 4, generator=generator) < 0.1
    slots = torch.tensor([3, 1, 4, 0, 4])  # row 4 is the trash row
    length = numbers(5, high=20)
    rows = StateRows(
        last_token=numbers(5),
        length=length,
        live=torch.tensor([True, True, False, True, False]),
        history=numbers(5, 40),
        limit=length + 2 + numbers(5, high=6),
        stops_at_eos=numbers(5, high=2).bool(),
        eos_ids=torch.tensor([7, 3]),
    )
    state = {name: tensor.tolist() for name, tensor in rows._asdict().items()}
    reports = naive(tokens.tolist(), drafts.tolist(), bad.tolist(), slots.tolist(), state)
    counts, report = settle(tokens, None, bad, drafts, slots, rows.length[slots], rows)

    assert report.tolist() == reports
    assert {name: tensor.tolist() for name, tensor in rows._asdict().items()} == state
    # A bad row is reported with count 0 but drafted for as if nothing had happened.
    assert counts.min() >= 1


def test_settle_example():
    rows = StateRows(
        last_token=torch.tensor([4]),
        length=torch.tensor([5]),
        live=torch.tensor([True]),
        history=torch.zeros(1, 12, dtype=torch.int64),
        limit=torch.tensor([9]),
        stops_at_eos=torch.tensor([True]),
        eos_ids=torch.tensor([], dtype=torch.int64),
    )
    clone = StateRows(*[tensor.clone() for tensor in rows])
    tokens, none = torch.tensor([[1, 2, 3, 3]]), torch.zeros(1, 4, dtype=torch.bool)
    for state, count, length, live in ((rows, 2, 7, True), (clone, 3, 8, False)):
        settle(
            tokens,
            torch.tensor([count]),
            none,
            torch.tensor([[1, 9, 9]]),
            torch.tensor([0]),
            state.length,
            state,
        )
        assert (int(state.length), int(state.last_token), bool(state.live)) == (length, count, live)
        assert state.history[0, 6:8].tolist() == [1, 2]
