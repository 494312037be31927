"""THE attention rule of training: which slot may attend to which (docs/algorithms/index.md).

A slot is (anchor a, depth k): a guess that stands at RoPE position a + k and whose last real position is
a. With s the document (segment) of a slot, query (a_q, k_q) sees key (a_k, k_k) iff s_q == s_k >= 0 and

    k_k == 0 and a_k <= a_q        real context, up to and including the anchor, or
    a_k == a_q and k_k <= k_q      its own rollout, up to itself.

Depth-0 slots are ordinary causal attention. EAGLE-3's training-time test (causal block plus diagonals)
and P-EAGLE's mask are both exactly this.

Example, anchors 0, 1, 2 at depth 0 and one rollout from anchor 1 (columns: keys in the same order):
    (0,0) (1,0) (2,0) (1,1) (1,2)
    (0,0)   1
    (1,0)   1     1
    (2,0)   1     1     1
    (1,1)   1     1           1
    (1,2)   1     1           1     1
"""

import torch
from torch import Tensor
from torch.nn import functional


def slot_mask(
    anchor_q: Tensor,
    depth_q: Tensor,
    segment_q: Tensor,
    anchor_k: Tensor,
    depth_k: Tensor,
    segment_k: Tensor,
) -> Tensor:
    """Bool [..., Mq, Mk] from int vectors [..., Mq] and [..., Mk].

    Segment -1 is padding: it sees only padding, so that its softmax stays finite.
    """
    a_q, k_q, s_q = anchor_q.unsqueeze(-1), depth_q.unsqueeze(-1), segment_q.unsqueeze(-1)
    a_k, k_k, s_k = anchor_k.unsqueeze(-2), depth_k.unsqueeze(-2), segment_k.unsqueeze(-2)
    context = (k_k == 0) & (a_k <= a_q)
    own = (a_k == a_q) & (k_k <= k_q)
    return (s_q == s_k) & (context | own)


def slot_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attention of slots: queries [..., Mq, H, dh], keys and values [..., Mk, KV, dh], mask [..., Mq, Mk].

    Returns [..., Mq, H, dh]. Differentiable in all three.
    """
    group = queries.shape[-2] // keys.shape[-2]
    if group > 1:
        # Repeated by hand: with a mask, CUDA's memory-efficient kernel knows no grouped heads, and the
        # fallback would hold every score.
        keys, values = keys.repeat_interleave(group, dim=-2), values.repeat_interleave(group, dim=-2)
    out = functional.scaled_dot_product_attention(
        queries.transpose(-2, -3),
        keys.transpose(-2, -3),
        values.transpose(-2, -3),
        attn_mask=mask.unsqueeze(-3),
        scale=scale,
    )
    return out.transpose(-2, -3)


def causal_segment_mask(segments: Tensor) -> Tensor:
    """Bool [..., n, n]: causal within each packed document; `segments` int [..., n], -1 is padding."""
    position = torch.arange(segments.shape[-1], device=segments.device)
    zero = torch.zeros_like(segments)
    anchors = position.expand_as(segments)
    return slot_mask(anchors, zero, segments, anchors, zero, segments)
