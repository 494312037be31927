"""Settle, one program a request: a few dozen integers, so one launch is all that it costs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.step_settle import StateRows


@triton.jit
def _settle_kernel(  # noqa: ANN202
    tokens_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    bad_ptr,  # noqa: ANN001
    drafts_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    start_ptr,  # noqa: ANN001
    last_token_ptr,  # noqa: ANN001
    length_ptr,  # noqa: ANN001
    live_ptr,  # noqa: ANN001
    history_ptr,  # noqa: ANN001
    limit_ptr,  # noqa: ANN001
    stops_ptr,  # noqa: ANN001
    eos_ptr,  # noqa: ANN001
    out_counts_ptr,  # noqa: ANN001
    report_ptr,  # noqa: ANN001
    drafts_stride,  # noqa: ANN001
    history_stride,  # noqa: ANN001
    ROWS: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    NUM_EOS: tl.constexpr,
    MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    is_row = row < ROWS
    slot = tl.load(slots_ptr + request)
    start = tl.load(start_ptr + request)
    tokens = tl.load(tokens_ptr + request * ROWS + row, mask=is_row, other=-1)
    is_draft = row < NUM_DRAFTS
    drafts = tl.load(drafts_ptr + request * drafts_stride + row, mask=is_draft, other=-1)
    drafted = tl.sum((drafts >= 0).to(tl.int64), 0)
    if MATCH:
        # The first row whose draft is wrong; there is none behind the last draft, so that one is "wrong" too.
        wrong = (tokens != drafts) | (row >= NUM_DRAFTS)
        count = tl.min(tl.where(wrong, row, BLOCK), 0).to(tl.int64) + 1
    else:
        count = tl.load(counts_ptr + request)
    taken = row < count
    bad_rows = tl.load(bad_ptr + request * ROWS + row, mask=is_row, other=0).to(tl.int32)
    bad = tl.max(tl.where(taken, bad_rows, 0), 0)
    is_end = tl.zeros([BLOCK], tl.int32)
    for index in tl.static_range(NUM_EOS):
        is_end |= (tokens == tl.load(eos_ptr + index)).to(tl.int32)
    stopped = tl.max(tl.where(taken, is_end, 0), 0) * tl.load(stops_ptr + slot).to(tl.int32)
    tl.store(out_counts_ptr + request, count)
    report = report_ptr + request * (ROWS + 2)
    tl.store(report + row, tokens, mask=is_row)
    tl.store(report + ROWS, tl.where(bad > 0, 0, count))
    tl.store(report + ROWS + 1, drafted)
    if tl.load(live_ptr + slot).to(tl.int32) > 0:
        last_cached = tl.load(limit_ptr + slot) - 1
        end = start + count
        newest = tl.sum(tl.where(row == count - 1, tokens, 0), 0)
        tl.store(history_ptr + slot * history_stride + start + 1 + row, tokens, mask=is_row)
        tl.store(last_token_ptr + slot, newest)
        tl.store(length_ptr + slot, tl.minimum(end, last_cached))
        goes_on = (end < last_cached) & (bad + stopped == 0)
        tl.store(live_ptr + slot, goes_on.to(live_ptr.dtype.element_ty))


def settle(
    tokens: Tensor,
    counts: Tensor | None,
    bad_rows: Tensor,
    drafts: Tensor,
    slots: Tensor,
    start: Tensor,
    rows: StateRows,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_settle.settle."""
    num_requests, num_rows = tokens.shape
    num_drafts = drafts.shape[1]
    out_counts = torch.empty(num_requests, dtype=torch.int64, device=tokens.device)
    report = torch.empty(num_requests, num_rows + 2, dtype=torch.int64, device=tokens.device)
    drafts = drafts if drafts.stride(1) == 1 or num_drafts == 0 else drafts.contiguous()
    _settle_kernel[(num_requests,)](
        tokens.contiguous(),
        counts.contiguous() if counts is not None else slots,
        bad_rows.contiguous().view(torch.uint8),
        drafts if num_drafts else tokens,
        slots,
        start,
        rows.last_token,
        rows.length,
        rows.live.view(torch.uint8),
        rows.history,
        rows.limit,
        rows.stops_at_eos.view(torch.uint8),
        rows.eos_ids if rows.eos_ids.numel() else slots,
        out_counts,
        report,
        drafts.stride(0) if num_drafts else 0,
        rows.history.stride(0),
        ROWS=num_rows,
        NUM_DRAFTS=num_drafts,
        NUM_EOS=rows.eos_ids.numel(),
        MATCH=counts is None,
        BLOCK=triton.next_power_of_2(max(2, num_rows, num_drafts)),
        num_warps=1,
    )
    return out_counts, report
