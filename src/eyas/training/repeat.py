"""One learned row in many slots, as an operation that compilers leave whole.

P-EAGLE's mask row stands in every slot past depth 0. Its gradient is a sum over all of them, and Inductor on
CUDA, which fuses that sum with the norms behind it, was seen to give a wrong one (torch 2.11;
tests/unit/training/test_trainer_gpu.py compares). So neither the copy nor the sum is open to fusion.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("eyas::repeat_row", mutates_args=())
def repeat_row(row: Tensor, batch: int, count: int) -> Tensor:
    """Row [D] -> [batch, count, D]."""
    return row.expand(batch, count, -1).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("eyas::sum_rows", mutates_args=())
def sum_rows(rows: Tensor) -> Tensor:
    """The sum of rows [batch, count, D] -> [D]."""
    return rows.sum((0, 1))


@repeat_row.register_fake
def _(row: Tensor, batch: int, count: int) -> Tensor:
    return row.new_empty((batch, count, row.shape[-1]))


@sum_rows.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[-1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    del ctx
    return sum_rows(gradient), None, None


repeat_row.register_autograd(_backward)
