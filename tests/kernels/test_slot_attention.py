"""The rule of training slots against nested loops over the rule's words."""

import itertools

import torch

from eyas.kernels.reference.slot_attention import causal_segment_mask, slot_attention, slot_mask


def may_see(query, key):
    """One sentence of the rule, on (anchor, depth, segment): context up to the anchor, or its own rollout."""
    (anchor_q, depth_q, segment_q), (anchor_k, depth_k, segment_k) = query, key
    if segment_q != segment_k:
        return False
    if depth_k == 0 and anchor_k <= anchor_q:
        return True
    return anchor_k == anchor_q and depth_k <= depth_q


def mask_of(slots):
    anchors, depths, segments = (torch.tensor(column) for column in zip(*slots, strict=True))
    return slot_mask(anchors, depths, segments, anchors, depths, segments)


def test_every_pair():
    """All slots of anchors 0-4, depths 0-3 in two documents and padding, in a shuffled order."""
    slots = list(itertools.product(range(5), range(4), (0, 1, -1)))
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0)).tolist()
    slots = [slots[i] for i in order]
    mask = mask_of(slots)
    for i, query in enumerate(slots):
        for j, key in enumerate(slots):
            assert bool(mask[i, j]) == may_see(query, key), (query, key)


def test_example_of_the_docstring():
    mask = mask_of([(0, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 2, 0)])
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert mask.int().tolist() == want


def test_every_slot_sees_itself():
    """Else a softmax over nothing would make the loss NaN; padding included."""
    slots = list(itertools.product(range(4), range(3), (0, -1)))
    assert mask_of(slots).diagonal().all()


def test_causal_segments():
    segments = torch.tensor([[0, 0, 1, 1, 1, -1], [3, 3, 3, 3, -1, -1]])
    mask = causal_segment_mask(segments)
    for row, i, j in itertools.product(range(2), range(6), range(6)):
        assert bool(mask[row, i, j]) == (j <= i and segments[row, i] == segments[row, j])


def test_attention_and_its_gradient():
    """Against a loop over rows and heads in float64, with grouped heads and two leading rows."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    queries, keys, values = normal(2, 7, 4, 6), normal(2, 5, 2, 6), normal(2, 5, 2, 6)
    mask = torch.rand(2, 7, 5, generator=generator) < 0.6
    mask[..., 0] = True
    out = slot_attention(queries, keys, values, mask, scale=0.4)
    rows = []
    for n, i, h in itertools.product(range(2), range(7), range(4)):
        seen = mask[n, i].nonzero()[:, 0]
        weights = (0.4 * keys[n, seen, h // 2] @ queries[n, i, h]).softmax(0)
        rows.append(weights @ values[n, seen, h // 2])
    want = torch.stack(rows).reshape(2, 7, 4, 6)
    assert torch.allclose(out, want, atol=1e-12)
    probe = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * probe).sum(), (queries, keys, values), retain_graph=True)
    theirs = torch.autograd.grad((want * probe).sum(), (queries, keys, values))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
