"""Process-wide switches of the CUDA kernels: what is measured against what, never what is right.

`with use_invariant(False):` multiplies by the library: equal up to rounding, bits depend on the batch.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Settings:
    """Read at every call; a CUDA graph keeps what held when it was captured."""

    invariant: bool = True
    """Give a row the same bits whatever other rows are with it."""
    pdl: bool = False
    """Programmatic dependent launch: kernels start, and fetch weights, while the one before them ends."""


settings = Settings()


@contextmanager
def _set(name: str, value: bool) -> Iterator[None]:
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


def use_invariant(on: bool) -> AbstractContextManager[None]:
    """Switch batch invariance inside the block."""
    return _set("invariant", on)


def use_pdl(on: bool) -> AbstractContextManager[None]:
    """Switch programmatic dependent launch inside the block."""
    return _set("pdl", on)
