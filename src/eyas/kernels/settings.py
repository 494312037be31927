"""Process-wide switches of the CUDA kernels: what is measured against what, never what is right.

`with use_invariant(False):` multiplies by the library: equal up to rounding, bits depend on the batch.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

Pdl = Literal["off", "late", "early", "auto"]
PDL: tuple[Pdl, ...] = get_args(Pdl)


@dataclass(slots=True)
class Settings:
    """Read at every call; a CUDA graph keeps what held when it was captured."""

    invariant: bool = True
    """Give a row the same bits whatever other rows are with it."""
    pdl: Pdl = "late"
    """Programmatic dependent launch, on GPUs that have it (compute capability 9.0 and more): a kernel may
    start before the one before it has ended, and waits for it inside. late: once that one has only its
    results to write. early: at once, and asks for its weights meanwhile. auto: after small kernels at once,
    after large ones late, and asks for what it reads first."""


settings = Settings()


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


def use_invariant(on: bool) -> AbstractContextManager[None]:
    """Switch batch invariance inside the block."""
    return _set("invariant", on)


def use_pdl(choice: Pdl) -> AbstractContextManager[None]:
    """Choose programmatic dependent launch inside the block."""
    if choice not in PDL:
        raise ValueError(f"pdl={choice!r}: one of {', '.join(PDL)}")
    return _set("pdl", choice)
