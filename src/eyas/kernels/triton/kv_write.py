"""Rows of keys and values into the pages of a cache, one program a row."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(  # noqa: ANN202
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    key_cache_ptr,  # noqa: ANN001
    value_cache_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    size,  # noqa: ANN001
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        mask = column < size
        key = tl.load(key_ptr + row * key_stride + column, mask=mask)
        value = tl.load(value_ptr + row * value_stride + column, mask=mask)
        tl.store(key_cache_ptr + slot * size + column, key, mask=mask)
        tl.store(value_cache_ptr + slot * size + column, value, mask=mask)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See eyas.kernels.reference.kv_write.write_kv; rows with slot -1 are not written at all."""
    rows, heads, head_dim = keys.shape
    size = heads * head_dim
    keys, values = packed_heads(keys), packed_heads(values)
    if rows:
        _write_kv_kernel[(rows,)](
            keys,
            values,
            key_cache,
            value_cache,
            slots,
            keys.stride(0),
            values.stride(0),
            size,
            BLOCK=triton.next_power_of_2(size),
        )


def packed_heads(x: Tensor) -> Tensor:
    """The same rows with contiguous heads inside each row (rows themselves may be strided)."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
