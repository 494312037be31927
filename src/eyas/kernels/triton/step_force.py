"""Forced acceptance, one program a request: what a timing run adds to a step is one small launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.step_force import STRIDE


@triton.jit
def _force_kernel(  # noqa: ANN202
    choices_ptr,  # noqa: ANN001
    drafts_ptr,  # noqa: ANN001
    start_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    table_ptr,  # noqa: ANN001
    out_choices_ptr,  # noqa: ANN001
    out_drafts_ptr,  # noqa: ANN001
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    is_draft = row < ROWS - 1
    place = tl.load(start_ptr + request) + tl.load(slots_ptr + request) * APART
    length = tl.load(table_ptr + place % TABLE)
    choices = tl.load(choices_ptr + request * ROWS + row, mask=row < ROWS, other=0)
    drafts = tl.load(drafts_ptr + request * (ROWS - 1) + row, mask=is_draft, other=-1)
    kept = (row < length) & (drafts >= 0)
    tl.store(out_choices_ptr + request * ROWS + row, tl.where(kept, drafts, choices), mask=row < ROWS)
    tl.store(out_drafts_ptr + request * (ROWS - 1) + row, tl.where(kept, drafts, -1), mask=is_draft)


def force(
    choices: Tensor, drafts: Tensor, start: Tensor, slots: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_force.force."""
    num_requests, num_rows = choices.shape
    out_choices = torch.empty(choices.shape, dtype=choices.dtype, device=choices.device)
    out_drafts = torch.empty(drafts.shape, dtype=drafts.dtype, device=drafts.device)
    if num_rows > 1:
        _force_kernel[(num_requests,)](
            choices.contiguous(),
            drafts.contiguous(),
            start,
            slots,
            table,
            out_choices,
            out_drafts,
            ROWS=num_rows,
            TABLE=table.shape[0],
            APART=STRIDE,
            BLOCK=triton.next_power_of_2(num_rows),
            num_warps=1,
        )
        return out_choices, out_drafts
    return choices, drafts
