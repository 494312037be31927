"""A head's rows in one launch: gather or mask, both norms, side by side; one program a row.

Of packed rows those that do not count are left as they are in memory: anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.step_expand import MaskRow
from eyas.kernels.triton.rows import packed_before


@triton.jit
def _packed(counts_ptr, request, num_requests, REQUESTS: tl.constexpr):  # noqa: ANN001, ANN202
    """Where a request's rows begin, packed by counts; request is a number."""
    before, _ = packed_before(counts_ptr, request + tl.arange(0, 1), num_requests, REQUESTS)
    return tl.sum(before).to(tl.int64)


@triton.jit
def _expand_kernel(  # noqa: ANN202
    tokens_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    hidden_ptr,  # noqa: ANN001
    table_ptr,  # noqa: ANN001
    embed_norm_ptr,  # noqa: ANN001
    hidden_norm_ptr,  # noqa: ANN001
    mask_embedding_ptr,  # noqa: ANN001
    mask_hidden_ptr,  # noqa: ANN001
    inputs_out,  # noqa: ANN001
    hidden_out,  # noqa: ANN001
    rows,  # noqa: ANN001
    all_rows,  # noqa: ANN001
    size,  # noqa: ANN001
    eps,  # noqa: ANN001
    mask_id,  # noqa: ANN001
    HAS_MASK: tl.constexpr,
    DEPTHS: tl.constexpr,
    NORMED: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64)
    request, row = out_row // all_rows, out_row % all_rows
    column = tl.arange(0, BLOCK)
    inside = column < size
    element = inputs_out.dtype.element_ty
    at = request * rows + row
    source = at
    if REQUESTS > 0:
        if row >= tl.load(counts_ptr + request) + all_rows - rows:
            return
        source = _packed(counts_ptr, request, tl.num_programs(0) // all_rows, REQUESTS) + row
        out_row = source + request * (all_rows - rows)
    if HAS_MASK:
        count = tl.load(counts_ptr + request)
        real = row < count
        # Loads are predicated, never taken from a pointer that depends on a branch.
        token = tl.load(tokens_ptr + at, mask=real, other=mask_id)
        known = token != mask_id
        embedding = tl.load(table_ptr + token * size + column, mask=inside & known, other=0.0)
        masked = tl.load(mask_embedding_ptr + column, mask=inside & (known == 0), other=0.0)
        embedding = tl.where(known, embedding.to(tl.float32), masked.to(tl.float32))
        hidden = tl.load(hidden_ptr + source * size + column, mask=inside & real, other=0.0)
        if DEPTHS > 0:
            # One state a depth; rows past the last depth are padding.
            mask_hidden_ptr += tl.minimum(tl.maximum(row - count, 0), DEPTHS - 1) * size
        masked = tl.load(mask_hidden_ptr + column, mask=inside & (real == 0), other=0.0)
        hidden = tl.where(real, hidden.to(tl.float32), masked.to(tl.float32))
        if not NORMED:
            tl.store(hidden_out + out_row * size + column, hidden.to(element), mask=inside)
    else:
        token = tl.load(tokens_ptr + at)
        embedding = tl.load(table_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32)
        hidden = tl.load(hidden_ptr + source * size + column, mask=inside, other=0.0).to(tl.float32)
        if REQUESTS > 0 and not NORMED:
            tl.store(hidden_out + out_row * size + column, hidden.to(element), mask=inside)
    # Rounded to their type before the weight, as rms_norm does.
    scale = tl.rsqrt(tl.sum(embedding * embedding) / size + eps)
    weight = tl.load(embed_norm_ptr + column, mask=inside, other=0.0)
    tl.store(inputs_out + out_row * 2 * size + column, (embedding * scale).to(element) * weight, mask=inside)
    scale = tl.rsqrt(tl.sum(hidden * hidden) / size + eps)
    weight = tl.load(hidden_norm_ptr + column, mask=inside, other=0.0)
    normed = (hidden * scale).to(element) * weight
    tl.store(inputs_out + out_row * 2 * size + size + column, normed, mask=inside)
    if NORMED:
        tl.store(hidden_out + out_row * size + column, normed, mask=inside)


def expand(
    tokens: Tensor,
    counts: Tensor,
    hidden: Tensor,
    table: Tensor,
    embed_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    *,
    mask: MaskRow | None = None,
    extra: int = 0,
    normed_residual: bool = False,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_expand.expand."""
    num_requests, rows = tokens.shape
    size, all_rows = hidden.shape[-1], rows + extra
    hidden = hidden.contiguous()
    inputs = hidden.new_empty(num_requests * all_rows, 2 * size)
    # Packed without extra rows, too: the same memory would do, but the store above is simpler.
    same = mask is None and not normed_residual and not packed
    out = hidden if same else hidden.new_empty(num_requests * all_rows, size)
    block = triton.next_power_of_2(size)
    _expand_kernel[(num_requests * all_rows,)](
        tokens.contiguous(),
        counts,
        hidden,
        table,
        embed_norm,
        hidden_norm,
        table if mask is None else mask.embedding,
        table if mask is None else mask.hidden,
        inputs,
        out,
        rows,
        all_rows,
        size,
        eps,
        -1 if mask is None else mask.token_id,
        HAS_MASK=mask is not None,
        DEPTHS=0 if mask is None or mask.hidden.ndim == 1 else mask.hidden.shape[0],
        NORMED=normed_residual,
        REQUESTS=triton.next_power_of_2(num_requests) if packed else 0,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return inputs, out


@triton.jit
def _newest_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    q_start_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    each,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    size,  # noqa: ANN001
    BLOCK: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64)
    request, row = out_row // num_rows, out_row % num_rows
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    begin = request * each
    if q_start_ptr is not None:
        begin = tl.load(q_start_ptr + request).to(tl.int64)
    source = begin + tl.load(counts_ptr + request) - 1 + row
    tl.store(
        out_ptr + out_row * size + column, tl.load(x_ptr + source * size + column, mask=inside), mask=inside
    )


def newest(x: Tensor, counts: Tensor, num_rows: int, q_start: Tensor | None = None) -> Tensor:
    """See eyas.kernels.reference.step_expand.newest."""
    num_requests, size = counts.shape[0], x.shape[-1]
    out = x.new_empty(num_requests, num_rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _newest_kernel[(num_requests * num_rows, triton.cdiv(size, block))](
        x.contiguous(), counts, q_start, out, x.shape[0] // num_requests, num_rows, size, BLOCK=block
    )
    return out


@triton.jit
def _pack_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    q_start_ptr,  # noqa: ANN001
    num_requests,  # noqa: ANN001
    rows,  # noqa: ANN001
    width,  # noqa: ANN001
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    request, row = at // rows, at % rows
    if at <= num_requests:
        goal = at + tl.arange(0, 1)
        starts, _ = packed_before(counts_ptr, goal, num_requests, REQUESTS)
        tl.store(q_start_ptr + goal, starts, mask=tl.program_id(1) == 0)
    if request < num_requests:  # noqa: SIM102 - what is loaded has to be there
        if row < tl.load(counts_ptr + request):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            goal = _packed(counts_ptr, request, num_requests, REQUESTS) + row
            x = tl.load(x_ptr + at * width + column, mask=column < width)
            tl.store(out_ptr + goal * width + column, x, mask=column < width)


def pack(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_expand.pack."""
    num_requests, (num_rows, width) = counts.shape[0], x.shape
    out, q_start = torch.empty_like(x), counts.new_empty(num_requests + 1, dtype=torch.int32)
    block = min(4096, triton.next_power_of_2(width))
    _pack_kernel[(max(num_rows, num_requests + 1), triton.cdiv(width, block))](
        x.contiguous(),
        counts,
        out,
        q_start,
        num_requests,
        num_rows // num_requests,
        width,
        REQUESTS=triton.next_power_of_2(num_requests),
        BLOCK=block,
    )
    return out, q_start
