"""Attention of training slots: Triton on CUDA, with and without gradients and under torch.compile.

It stands beside dispatch.py because the rule there differs: those Triton kernels have no backward.
"""

from torch import Tensor

from eyas.kernels import dispatch
from eyas.kernels.reference import slot_attention as _reference
from eyas.kernels.reference.slot_attention import Stairs


def stairs_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    stairs: Stairs,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.slot_attention.stairs_attention."""
    forced = dispatch._forced  # noqa: SLF001 - the same switch
    inputs = (queries, context_keys, context_values, own_keys, own_values)
    if forced == "triton" or (forced == "auto" and queries.is_cuda):
        from eyas.kernels.triton import slot_attention as _triton

        out, lse = _triton.stairs_attention(*inputs, stairs, scale=scale)
        return out, lse
    return _reference.stairs_attention(*inputs, stairs, scale=scale)
