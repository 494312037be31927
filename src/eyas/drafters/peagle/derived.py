"""Tensors that are made from weights once, and again when a weight changes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Derived:
    """Keeps what `make` returns until one of the weights `sources` changes in place.

    A change is written into the same tensors, which a CUDA graph may have read. A graph does not run this
    check: call `get` eagerly after changing weights.
    """

    def __init__(self, sources: Iterable[Tensor], make: Callable[[], tuple[Tensor, ...]]) -> None:
        self._sources, self._make = list(sources), make
        self._kept: tuple[Tensor, ...] | None = None
        self._versions: list[int] = []

    @torch.no_grad()
    def get(self) -> tuple[Tensor, ...]:
        """The tensors."""
        versions = [_version(weight) for weight in self._sources]
        if self._kept is None:
            self._kept = tuple(tensor.clone() for tensor in self._make())
        elif versions != self._versions:
            for kept, made in zip(self._kept, self._make(), strict=True):
                kept.copy_(made)
        self._versions = versions
        return self._kept


def _version(weight: Tensor) -> int:
    """Torch's count of in-place changes; tensors made in inference mode have none and do not change."""
    return 0 if weight.is_inference() else weight._version  # noqa: SLF001 - no public name for it
