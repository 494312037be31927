"""One signature for every kernel; Triton on CUDA, the reference elsewhere.

with use_backend("reference"):
    ...            # the same code through the reference kernels, for tests and for bisecting a fault
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.kernels.reference import kv_write as _kv_write
from eyas.kernels.reference import linear as _linear
from eyas.kernels.reference import norm as _norm
from eyas.kernels.reference import paged_attention as _attention
from eyas.kernels.reference import rotary as _rotary
from eyas.kernels.reference import rows as _rows
from eyas.kernels.settings import settings

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
    """Whether the Triton twin serves: it has no backward, and torch.compile fuses the reference better."""
    if _forced != "auto":
        return _forced == "triton"
    return tensor.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _twin(reference: ModuleType, tensor: Tensor) -> ModuleType:
    """Return the Triton file of the same name where it is wanted, else the reference."""
    if not _triton_wanted(tensor):
        return reference
    return importlib.import_module(reference.__name__.replace(".reference.", ".triton."))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See eyas.kernels.reference.norm.rms_norm."""
    out: Tensor = _twin(_norm, x).rms_norm(x, weight, eps)
    return out


def angles(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.rotary.angles."""
    out: tuple[Tensor, Tensor] = _twin(_rotary, cos).angles(positions, cos, sin)
    return out


def chain_rows(
    start: Tensor,
    counts: Tensor,
    page_table: Tensor,
    rows: int,
    page_size: int,
    max_position: int,
    *,
    packed: bool = False,
) -> _rows.Rows:
    """See eyas.kernels.reference.rows.chain_rows."""
    out: _rows.Rows = _twin(_rows, start).chain_rows(
        start, counts, page_table, rows, page_size, max_position, packed=packed
    )
    return out


def tree_rows(
    start: Tensor,
    depths: Tensor,
    bits: Tensor,
    page_table: Tensor,
    first: int,
    page_size: int,
    max_position: int,
) -> _rows.Rows:
    """See eyas.kernels.reference.rows.tree_rows."""
    out: _rows.Rows = _twin(_rows, start).tree_rows(
        start, depths, bits, page_table, first, page_size, max_position
    )
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See eyas.kernels.reference.rotary.apply_rope."""
    out: Tensor = _twin(_rotary, x).apply_rope(x, cos, sin)
    return out


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See eyas.kernels.reference.kv_write.write_kv."""
    _twin(_kv_write, keys).write_kv(keys, values, key_cache, value_cache, slots)


def paged_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    **options: Any,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.paged_attention."""
    out: Tensor = _twin(_attention, queries).paged_attention(
        queries, key_cache, value_cache, page_table, q_start, visible, **options
    )
    return out


def rotated_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    **options: Any,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.rotated_attention."""
    out: Tensor = _twin(_attention, qkv).rotated_attention(
        qkv, cos, sin, key_cache, value_cache, slots, page_table, q_start, visible, **options
    )
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    live: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.linear.linear."""
    twin, x, norm_weight = _product(x, weight, norm_weight, eps)
    options = {"norm_weight": norm_weight, "eps": eps, "residual": residual, "live": live, "also": also}
    out: Tensor = twin.linear(x, weight, bias, **options)
    return out


def linear_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    live: Tensor | None = None,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See eyas.kernels.reference.linear.linear_norm."""
    twin, x, _ = _product(x, weight, None, eps)
    if twin is _linear:
        # The library may multiply for Triton's norm.
        hidden = twin.linear(x, weight, residual=residual, live=live, also=also)
        return hidden, rms_norm(hidden, norm_weight, eps)
    out: tuple[Tensor, Tensor | None] = twin.linear_norm(
        x, weight, residual=residual, norm_weight=norm_weight, eps=eps, live=live, also=also
    )
    return out


def gated_linear(
    x: Tensor,
    gate_up_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    live: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.linear.gated_linear."""
    twin, x, norm_weight = _product(x, gate_up_weight, norm_weight, eps)
    out: Tensor = twin.gated_linear(x, gate_up_weight, norm_weight=norm_weight, eps=eps, live=live)
    return out


def max_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    index_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.linear.max_linear."""
    twin, x, norm_weight = _product(x, weight, norm_weight, eps)
    out: tuple[Tensor, Tensor] = twin.max_linear(
        x, weight, norm_weight=norm_weight, eps=eps, index_map=index_map
    )
    return out


def _product(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float
) -> tuple[ModuleType, Tensor, Tensor | None]:
    """Who multiplies, and what is left to do for it: (twin, x, norm_weight, None if x is normed already).

    torch's library multiplies float32 and mixed types on CUDA too, and everything with invariance off.
    """
    twin = _twin(_linear, x)
    fits = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    library = not (settings.invariant and fits) or torch.is_autocast_enabled("cuda")
    if twin is not _linear and _forced == "auto" and library:
        twin = _linear
    # Fused in Triton alone; not in float16, whose range x * norm_weight may leave before it is scaled.
    before = twin is _linear or (_forced == "auto" and x.dtype == torch.float16)
    if norm_weight is not None and before:
        return twin, rms_norm(x, norm_weight, eps), None
    return twin, x, norm_weight
