"""One signature for every kernel; Triton on CUDA, the reference elsewhere.

with use_backend("reference"):
    ...            # the same code through the reference kernels, for tests and for bisecting a fault
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

from torch import Tensor

from eyas.kernels.reference import norm as _norm
from eyas.kernels.reference import paged_attention as _attention
from eyas.kernels.reference import rotary as _rotary

Backend = Literal["auto", "reference", "triton"]
_forced: Backend = "auto"


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Force a backend inside the block; "auto" restores the choice by device."""
    global _forced  # noqa: PLW0603 - one process-wide switch, for tests and debugging only
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def _triton_wanted(tensor: Tensor) -> bool:
    return _forced == "triton" or (_forced == "auto" and tensor.is_cuda)


def _attention_backend(tensor: Tensor) -> ModuleType:
    if _triton_wanted(tensor):
        from eyas.kernels.triton import paged_attention

        return paged_attention
    return _attention


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See eyas.kernels.reference.norm.rms_norm."""
    return _norm.rms_norm(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See eyas.kernels.reference.rotary.apply_rope."""
    return _rotary.apply_rope(x, cos, sin)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See eyas.kernels.reference.paged_attention.write_kv."""
    _attention_backend(keys).write_kv(keys, values, key_cache, value_cache, slots)


def paged_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    *,
    scale: float,
    max_rows: int,
    max_visible: int,
    window: int | None = None,
    tree_bits: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.paged_attention."""
    out: Tensor = _attention_backend(queries).paged_attention(
        queries,
        key_cache,
        value_cache,
        page_table,
        q_start,
        visible,
        scale=scale,
        max_rows=max_rows,
        max_visible=max_visible,
        window=window,
        tree_bits=tree_bits,
    )
    return out
