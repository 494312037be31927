import pytest
import torch

from eyas.training.losses import compact, eager_slot_loss, slot_loss

KINDS = ["soft_ce", "kl", "hard_ce"]


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
