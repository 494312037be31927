import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.training.losses import Reach, compact, slot_loss
from eyas.training.losses_chunk import chunk_loss
from eyas.training.losses_eager import eager_losses, eager_reach, eager_slot_loss

KINDS = ["soft_ce", "kl", "hard_ce", "tv", "lk_log", "lk_hybrid"]


def inputs(dtype, *, slots=23, teachers=9, width=6, vocab=15, seed=0):
    g = torch.Generator().manual_seed(seed)
    normed = torch.randn(slots, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    hidden = torch.randn(teachers, width, generator=g, dtype=torch.float64).to(dtype)
    teacher = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype)
    weights = torch.rand(slots, generator=g, dtype=torch.float64) * (torch.arange(slots) % 3 != 0)
    index = torch.randint(0, teachers, (slots,), generator=g)
    return normed, head, hidden, teacher, weights, index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_chunked_loss_equals_the_eager_twin(kind, chunk):
    """float64: a wrong chunk border, a missing weight or a wrong gradient formula shows at once."""
    normed, head, hidden, teacher, weights, index = inputs(torch.float64)
    expected = eager_slot_loss(normed @ head.T, hidden[index] @ teacher.T, weights, kind)
    wanted = torch.autograd.grad(expected * 1.7, (normed, head))
    chosen = compact(weights, 20)
    loss, hits = slot_loss(
        normed,
        head,
        hidden,
        teacher,
        slot_index=chosen,
        teacher_index=index[chosen],
        weights=weights[chosen],
        answers=(normed @ head.T).argmax(-1)[chosen],
        kind=kind,
        chunk=chunk,
    )
    got = torch.autograd.grad(loss * 1.7, (normed, head))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert hits.all()


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_loss_in_bfloat16_stays_close_to_float32(kind):
    """bf16 products, fp32 softmax: about three digits; a softmax in bf16 would be off by more."""
    normed, head, hidden, teacher, weights, index = inputs(torch.bfloat16, slots=64, vocab=500)
    wide = [t.detach().float() for t in (normed, head, hidden, teacher)]
    expected = eager_slot_loss(wide[0] @ wide[1].T, wide[2][index] @ wide[3].T, weights.float(), kind)
    loss, _ = slot_loss(
        normed,
        head,
        hidden,
        teacher,
        slot_index=torch.arange(64),
        teacher_index=index,
        weights=weights,
        answers=torch.zeros(64, dtype=torch.int64),
        kind=kind,
        chunk=16,
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)


def test_kl_of_a_perfect_drafter_is_zero():
    normed, head, _, _, weights, _ = inputs(torch.float64)
    loss, _ = slot_loss(
        normed,
        head,
        normed.detach(),
        head.detach(),
        slot_index=torch.arange(23),
        teacher_index=torch.arange(23),
        weights=weights,
        answers=torch.zeros(23, dtype=torch.int64),
        kind="kl",
        chunk=8,
    )
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert float(normed.grad.abs().max()) < 1e-12


def test_compact_takes_every_nonzero_weight_first():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.5])
    assert compact(weights, 4).tolist() == [1, 3, 4, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients_stay_close_to_float32(kind):
    """Value and both gradients; a weight applied twice or a gradient summed in bf16 would be off by more."""
    normed, head, hidden, teacher, weights, index = inputs(torch.bfloat16, slots=96, vocab=300, width=32)
    weights = weights.float()
    wide = [t.detach().float().requires_grad_() for t in (normed, head)]
    expected = eager_slot_loss(
        0.3 * wide[0] @ wide[1].T, 0.3 * hidden.float()[index] @ teacher.float().T, weights, kind
    )
    wanted = torch.autograd.grad(expected, wide)
    loss, _ = slot_loss(
        0.3 * normed,
        head,
        0.3 * hidden,
        teacher,
        slot_index=torch.arange(96),
        teacher_index=index,
        weights=weights,
        answers=torch.zeros(96, dtype=torch.int64),
        kind=kind,
        chunk=40,
    )
    got = torch.autograd.grad(loss, (normed, head))
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("kind", ["tv", "lk_log", "lk_hybrid"])
def test_overlap_losses_of_extreme_slots_stay_finite(kind):
    """A perfect drafter has loss 0; one that gives the teacher's tokens no chance at all is no infinity."""
    sure = torch.tensor([[90.0, 0.0, 0.0], [0.0, 90.0, 0.0]])
    loss, gradient, overlap = chunk_loss(sure, sure, kind)
    assert loss.abs().max() < 1e-6
    assert overlap.tolist() == [1.0, 1.0]
    assert gradient.abs().max() < 1e-6
    loss, gradient, overlap = chunk_loss(sure, 2 * sure.flip(0), kind)
    assert overlap.max() < 1e-6
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_the_overlap_is_the_acceptance_of_speculative_sampling():
    """By hand: p = (.5, .3, .2), q = (.2, .2, .6) -> .2 + .2 + .2; a draw x ~ q is kept with min(1, p/q)."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    loss, _, overlap = chunk_loss(q.log(), p.log(), "soft_ce", overlap=True)
    torch.testing.assert_close(overlap, torch.tensor([0.6]))
    torch.testing.assert_close((q * (p / q).clamp(max=1)).sum(-1), overlap)
    torch.testing.assert_close(loss, -(p * q.log()).sum(-1))
    assert chunk_loss(q.log(), p.log(), "soft_ce")[2].tolist() == [0.0]
    torch.testing.assert_close(eager_losses(q.log(), p.log(), "tv"), 1 - overlap)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_slots_times_vocabulary_is_ever_made(kind):
    """Four times the slots: no tensor grows past chunk x Vd, forward and backward, with and without Reach."""
    for slots in (64, 256):
        normed, head, hidden, teacher, weights, index = inputs(
            torch.float32, slots=slots, teachers=slots, vocab=200
        )
        reach = Reach(slots, 1, 1.0)
        depths = torch.zeros(slots, dtype=torch.int64)
        with _Largest() as largest:
            loss, _ = slot_loss(
                normed,
                head,
                hidden,
                teacher,
                slot_index=torch.arange(slots),
                teacher_index=index,
                weights=weights.float(),
                answers=depths,
                kind=kind,
                chunk=16,
                reach=(reach, torch.arange(slots), depths),
            )
            loss.backward()
        assert largest.numel <= max(16 * 200, 256 * 6)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [3, 5, 64])
@pytest.mark.parametrize("by", ["overlap", "hit"])
def test_reach_weights_equal_the_loop_over_rollouts(share, chunk, by):
    """Chunks that cut a rollout anywhere; missing slots accept, dead slots end their rollout."""
    places = [(a, k) for k in range(4) for a in range(6) if (a + k) % 5 or k == 0]
    dead = {(2, 1), (4, 0)}
    count = len(places)
    normed, head, hidden, teacher, _, index = inputs(torch.float64, slots=count)
    anchors, depths = (torch.tensor(column) for column in zip(*places, strict=True))
    ends = torch.tensor([place in dead for place in places])
    weights = torch.where(ends, 0.0, 0.5 + torch.arange(count) % 3).double()
    logits, taught = normed @ head.T, hidden[index] @ teacher.T
    # Half of the slots hit.
    answers = torch.where(torch.arange(count) % 2 == 0, logits.argmax(-1), logits.argmin(-1))
    hits = (logits.argmax(-1) == answers).double().tolist() if by == "hit" else None
    found = eager_reach(logits, taught, anchors.tolist(), depths.tolist(), dead, hits)
    chances = torch.tensor(found).double()
    assert 0 < (chances == 0).sum() < count / (3 if by == "overlap" else 1.2)
    expected = eager_slot_loss(logits, taught, weights * (1 - share + share * chances), "soft_ce")
    wanted = torch.autograd.grad(expected, (normed, head))
    reach = Reach(6, 4, share, by=by, dtype=torch.float64)
    reach.end_rollouts(anchors, depths, ends)
    loss, _ = slot_loss(
        normed,
        head,
        hidden,
        teacher,
        slot_index=torch.arange(count),
        teacher_index=index,
        weights=weights,
        answers=answers,
        chunk=chunk,
        reach=(reach, anchors, depths),
    )
    # eager_reach speaks Python floats of float64 tensors, made to float32 by torch.tensor: seven digits.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(loss, (normed, head)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
