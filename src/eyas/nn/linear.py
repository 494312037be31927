"""Linear layer whose frozen float32 weights can be packed for the CPU.

Decoding multiplies a few rows by every weight. PyTorch's CPU product re-blocks the weights on each call;
oneDNN can keep them blocked. Packed once, 4 to 16 rows cost about half, and a row gets the same bits
whatever other rows are with it, because the sum over the input runs in one order. Fewer than 4 rows are
padded: a lone row would take another path, slower and with other bits.

Only speed and the last bits change: parameters, names and state dict are those of nn.Linear.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_ROWS = 4
"""Products of fewer rows are padded to this many."""
_ROWS_HINT = 64
"""What oneDNN is told to expect; a hint of 1 gives a layout that is slow for 4 and more rows."""


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` can be packed: frozen float32 on a CPU whose PyTorch has oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not weight.requires_grad
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedWeight:
    """The packed copy of one weight, or nothing yet. Opaque, so deep copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def __reduce__(self) -> tuple[type["PackedWeight"], tuple[()]]:
        return PackedWeight, ()

    def pack(self, weight: Tensor) -> None:
        """Hold a blocked copy of weight [out, in], as large as the weight, if it can be packed."""
        self.tensor = None
        if can_pack(weight):
            self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)  # noqa: SLF001

    def clear(self) -> None:
        """Forget the copy."""
        self.tensor = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """X [..., in] -> [..., out], by the packed copy; by `weight` if there is none or x has a gradient."""
        if self.tensor is None or (torch.is_grad_enabled() and x.requires_grad):
            return functional.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        if num_rows == 1:
            rows = rows.expand(MIN_ROWS, -1).contiguous()  # cheaper than padding with zeros
        elif num_rows < MIN_ROWS:
            rows = functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.tensor, bias, "none", [], "")  # noqa: SLF001
        return out[:num_rows].view(*x.shape[:-1], out.shape[-1])


class Linear(nn.Linear):
    """nn.Linear that uses a packed weight, if it has one and no gradient is wanted."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.packed = PackedWeight()

    def forward(self, x: Tensor) -> Tensor:
        """X [..., in] -> [..., out]."""
        return self.packed.linear(x, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "Linear":
        """Moved or cast weights are not the packed ones."""
        self.packed.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nor are loaded ones."""
        self.packed.clear()
        super()._load_from_state_dict(*args, **kwargs)


def pack_linears(module: nn.Module) -> None:
    """Pack every Linear below `module` whose weight is frozen float32 on the CPU; leave others.

    Weights that are changed in place later must be packed again.
    """
    for child in module.modules():
        if isinstance(child, Linear):
            child.packed.pack(child.weight)
