"""RMSNorm, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    x = tl.load(x_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    # Rounded to the input's type before the weight, as the reference does.
    normed = (x * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, normed * weight, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See eyas.kernels.reference.norm.rms_norm."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        warps = 4 if block <= 2048 else 8
        _rms_norm_kernel[(rows,)](x, weight, out, size, eps, BLOCK=block, num_warps=warps)
    return out
