"""Both trainers' attention against the one slot rule, and against nested loops over it."""

import torch
from slot_helpers import make_batch

from eyas.kernels.reference.slot_attention import slot_mask
from eyas.nn.packed import SlotContext
from eyas.nn.rollout import ChainContext, TTTContext
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.rows import draft_rows


def heads(slots, seed=0, heads=4, kv=2, width=8):
    generator = torch.Generator().manual_seed(seed)
    shape = slots.anchors.shape
    return [
        torch.randn(*shape, number, width, generator=generator, dtype=torch.float64).requires_grad_()
        for number in (heads, kv, kv)
    ]


def reference(slots, q, k, v):
    context = SlotContext.of(slots.anchors, slots.depths.expand_as(slots.anchors), slots.segments)
    return context.attend(0, q, k, v, scale=0.3, window=None)


def compare(slots, tensors, out):
    expected = reference(slots, *tensors)
    real = (slots.segments >= 0)[..., None, None]
    torch.testing.assert_close(out * real, expected * real, rtol=1e-11, atol=1e-11)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * real
    mine = torch.autograd.grad((out * probe).sum(), tensors, retain_graph=True)
    theirs = torch.autograd.grad((expected * probe).sum(), tensors)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_mask_against_nested_loops():
    slots = [(a, k, s) for s in (0, 1, -1) for a in range(3) for k in range(3)]
    a, k, s = (torch.tensor(column) for column in zip(*slots, strict=True))
    mask = slot_mask(a, k, s, a, k, s)
    for i, (aq, kq, sq) in enumerate(slots):
        for j, (ak, kk, sk) in enumerate(slots):
            seen = sq == sk and ((kk == 0 and ak <= aq) or (ak == aq and kk <= kq))
            assert bool(mask[i, j]) == seen


def test_chain_context_equals_the_slot_rule():
    rows = draft_rows(make_batch([[10, 9], [14, 3]], 20))
    objective = PEagleObjective(num_depths=5)
    slots = objective.slots(rows, seed=4, max_supervised=16)
    q, k, v = tensors = heads(slots)
    context = ChainContext(slots.anchors, slots.segments, 20, slots.blocks)
    compare(slots, tensors, context.attend(0, q, k, v, scale=0.3, window=None))


def test_chain_context_without_rollouts():
    rows = draft_rows(make_batch([[10, 9]], 20))
    slots = PEagleObjective(num_depths=1).all_slots(rows)
    q, k, v = tensors = heads(slots)
    compare(
        slots,
        tensors,
        ChainContext(slots.anchors, slots.segments, 20, ()).attend(0, q, k, v, scale=0.3, window=None),
    )


def test_ttt_context_equals_the_slot_rule():
    rows = draft_rows(make_batch([[10, 9], [14, 3]], 20))
    slots = Eagle3Objective(steps=4).all_slots(rows)
    tensors = heads(slots)
    steps = [[t.split(20, dim=1)[s] for t in tensors] for s in range(4)]
    context = TTTContext(rows.segments)
    out = torch.cat([context.attend(0, *step, scale=0.3, window=None) for step in steps], dim=1)
    compare(slots, tensors, out)


def test_eagle3_and_peagle_see_the_same_keys():
    """The same (anchor, depth) slots through both contexts give the same attention."""
    rows = draft_rows(make_batch([[12, 7]], 20))
    full = PEagleObjective(num_depths=4).all_slots(rows)
    q, k, v = heads(full)
    chained = ChainContext(full.anchors, full.segments, 20, full.blocks).attend(
        0, q, k, v, scale=0.3, window=None
    )
    context, compared = TTTContext(rows.segments), 0
    for depth in range(4):
        block = slice(depth * 20, (depth + 1) * 20)
        order = full.anchors[0, block].argsort()
        step = [t[:, block][:, order] for t in (q, k, v)]
        out = context.attend(0, *step, scale=0.3, window=None)
        real = full.segments[0, block][order] >= 0
        compared += int(real.sum())
        torch.testing.assert_close(out[0, real], chained[:, block][:, order][0, real], rtol=1e-11, atol=1e-11)
    assert compared > 40
