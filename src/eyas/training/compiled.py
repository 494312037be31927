"""torch.compile as training uses it."""

from collections.abc import Callable
from typing import Any

import torch

_MIX = "mix_order_reduction"


def compile_fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for fixed shapes.

    Inductor's mixed-order reductions are off: in torch 2.10 and 2.11 they can give wrong gradients to a
    vector that is broadcast into a norm's input, as P-EAGLE's mask_hidden is
    (github.com/pytorch/pytorch/issues/193061).
    """
    from torch._inductor import config

    options: dict[str, Any] = {f"triton.{_MIX}": False} if hasattr(config.triton, _MIX) else {}
    result: Callable[..., Any] = torch.compile(function, dynamic=False, options=options or None)
    return result
