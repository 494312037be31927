"""Take, a program for each request and block of its page table; the first one reads the rest too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.step_take import Source, Taken

_PAGES = 1024


@triton.jit
def _take_kernel(  # noqa: ANN202
    slots_ptr,  # noqa: ANN001
    last_token_ptr,  # noqa: ANN001
    length_ptr,  # noqa: ANN001
    live_ptr,  # noqa: ANN001
    drafts_ptr,  # noqa: ANN001
    limit_ptr,  # noqa: ANN001
    pages_ptr,  # noqa: ANN001
    temperature_ptr,  # noqa: ANN001
    seeds_ptr,  # noqa: ANN001
    token_ids_out,  # noqa: ANN001
    drafts_out,  # noqa: ANN001
    start_out,  # noqa: ANN001
    counts_out,  # noqa: ANN001
    pages_out,  # noqa: ANN001
    temperature_out,  # noqa: ANN001
    seeds_out,  # noqa: ANN001
    drafts_stride,  # noqa: ANN001
    temperature_stride,  # noqa: ANN001
    seeds_stride,  # noqa: ANN001
    num_pages,  # noqa: ANN001
    max_len,  # noqa: ANN001
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    is_page = page < num_pages
    pages = tl.load(pages_ptr + slot * num_pages + page, mask=is_page, other=0)
    tl.store(pages_out + request * num_pages + page, pages, mask=is_page)
    if tl.program_id(1) == 0:
        start = tl.load(length_ptr + slot)
        row = tl.arange(0, BLOCK)
        is_draft = (row > 0) & (row <= NUM_DRAFTS)
        drafts = tl.load(drafts_ptr + slot * drafts_stride + row - 1, mask=is_draft, other=-1)
        good = (row <= tl.load(limit_ptr + slot)) & (start + row < max_len)
        drafts = tl.where(good, drafts, -1)
        tokens = tl.where(row == 0, tl.load(last_token_ptr + slot), tl.maximum(drafts, 0))
        tl.store(token_ids_out + request * (NUM_DRAFTS + 1) + row, tokens, mask=row <= NUM_DRAFTS)
        tl.store(drafts_out + request * NUM_DRAFTS + row - 1, drafts, mask=is_draft)
        tl.store(start_out + request, start)
        live = tl.load(live_ptr + slot).to(tl.int64)
        tl.store(counts_out + request, live * (NUM_DRAFTS + 1))
        tl.store(temperature_out + request, tl.load(temperature_ptr + slot * temperature_stride))
        tl.store(seeds_out + request, tl.load(seeds_ptr + slot * seeds_stride))


def take(slots: Tensor, source: Source, num_drafts: int, max_len: int | None = None) -> Taken:
    """See eyas.kernels.reference.step_take.take."""
    num_requests, num_pages = slots.shape[0], source.page_table.shape[1]
    taken = Taken(
        token_ids=slots.new_empty(num_requests, num_drafts + 1),
        drafts=slots.new_empty(num_requests, num_drafts),
        start=torch.empty_like(slots),
        counts=torch.empty_like(slots),
        page_table=source.page_table.new_empty(num_requests, num_pages),
        temperature=source.temperature.new_empty(num_requests),
        seeds=torch.empty_like(slots),
    )
    _take_kernel[(num_requests, triton.cdiv(num_pages, _PAGES))](
        slots,
        source.last_token,
        source.length,
        source.live.view(torch.uint8),
        source.drafts if num_drafts else slots,
        source.draft_limit,
        source.page_table,
        source.temperature,
        source.seeds,
        taken.token_ids,
        taken.drafts if num_drafts else taken.token_ids,
        taken.start,
        taken.counts,
        taken.page_table,
        taken.temperature,
        taken.seeds,
        source.drafts.stride(0),
        source.temperature.stride(0),
        source.seeds.stride(0),
        num_pages,
        2**62 if max_len is None else max_len,
        NUM_DRAFTS=num_drafts,
        BLOCK=triton.next_power_of_2(max(2, num_drafts + 1)),
        PAGES=_PAGES,
        num_warps=4,
    )
    return taken
