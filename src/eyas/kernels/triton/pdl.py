"""Programmatic dependent launch: a kernel that starts before the one before it has ended.

Three rules keep it right (docs/how-to/add_a_kernel.md says why):

- A kernel launched with `launch_pdl` calls `wait` in every program, before it reads what any kernel of the
  step writes and before it writes anything at all.
- Before `wait` it may read weights, which nobody writes, and ask L2 for anything.
- When the next kernel is let in is a question of speed alone: that one waits too.
"""

import os
from functools import lru_cache

import torch
import triton
import triton.language as tl

from eyas.kernels.settings import Pdl, settings

OFF = tl.constexpr(0)
LATE = tl.constexpr(1)
EARLY = tl.constexpr(2)


@triton.jit
def let_in(PDL: tl.constexpr, WHEN: tl.constexpr) -> None:
    """Here, LATE or EARLY, the next kernel may start, once all programs are here or have ended."""
    if PDL == WHEN:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Go on when the kernel before this one, and so every one before that, has ended and is seen."""
    if PDL != OFF:
        tl.extra.cuda.gdc_wait()


def able() -> bool:
    """Whether the current device can: NVIDIA's from Hopper on. Asked at every launch."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and _can(torch.cuda.current_device())


@lru_cache(maxsize=64)
def _can(device: int) -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _choice() -> Pdl:
    return settings.pdl if able() else "off"


def options(*, small: bool, own: bool = True) -> dict[str, int | bool]:
    """PDL, and the launch attribute where it is wanted.

    small: programs that are few or short, so that those which wait beside them take nothing away.
    own=False: not for this launch.
    """
    choice = _choice()
    if choice == "off" or not own:
        return {"PDL": OFF.value}
    early = choice == "early" or (choice == "auto" and small)
    return {"PDL": (EARLY if early else LATE).value, "launch_pdl": True}


def asks() -> bool:
    """Whether a kernel that waits asks L2 for what it will read."""
    return _choice() in ("early", "auto")
