"""Linear layer with what stands around it, whose frozen float32 weights can be packed for the CPU.

On CUDA norm, product and residual are one kernel, and a row gets the same bits whatever other rows are with
it (kernels/triton/linear.py). The rest of this page is about the CPU.

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

from eyas.kernels import dispatch
from eyas.kernels.reference.linear import largest
from eyas.nn.norm import RMSNorm, Stream

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

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        live: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Tensor:
        """X [..., in] -> [..., out], by the packed copy; by `weight` if there is none or x has a gradient.

        `norm` is applied to x before, `residual` [..., out] added after. Rows from `live` on may be left out.
        `also` [..., out] gets a copy of the result (kernels/reference/linear).
        """
        if self.tensor is None or (torch.is_grad_enabled() and x.requires_grad):
            return dispatch.linear(
                x, weight, bias, residual=residual, live=live, also=also, **_norm_arguments(norm)
            )
        if norm is not None:
            x = norm(x)
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        if num_rows == 1:
            rows = rows.expand(MIN_ROWS, -1).contiguous()  # cheaper than padding with zeros
        elif num_rows < MIN_ROWS:
            rows = functional.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.tensor, bias, "none", [], "")  # noqa: SLF001
        out = out[:num_rows].view(*x.shape[:-1], out.shape[-1])
        out = out if residual is None else residual + out
        if also is not None:
            also.copy_(out)
        return out

    def add(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        after: RMSNorm,
        live: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Stream:
        """Residual + linear(x), and `after` of it where that costs no launch of its own."""
        if self.tensor is None:
            arguments = {"residual": residual, "live": live, "also": also, **_norm_arguments(after)}
            return Stream(*dispatch.linear_norm(x, weight, **arguments))
        return Stream(self.linear(x, weight, residual=residual, also=also))

    def max_linear(
        self, x: Tensor, weight: Tensor, index_map: Tensor | None = None, *, norm: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """(largest of linear(norm(x)), its first place or that place's entry in the map) of every row."""
        if self.tensor is None:
            return dispatch.max_linear(x, weight, index_map=index_map, **_norm_arguments(norm))
        return largest(self.linear(x, weight, norm=norm), index_map)


class Linear(nn.Linear):
    """nn.Linear that uses a packed weight, if it has one and no gradient is wanted."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.packed = PackedWeight()

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        live: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Tensor:
        """Compute residual + linear(norm(x)): x [..., in], residual [..., out] -> [..., out].

        Rows from `live` (int32 [1]) on may be left out; so in `gated`. `also` [..., out] gets a copy.
        """
        return self.packed.linear(
            x, self.weight, self.bias, norm=norm, residual=residual, live=live, also=also
        )

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        after: RMSNorm | None,
        live: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Stream:
        """Compute residual + linear(x), to be read by the norm `after`, which may come with it."""
        if residual is None or after is None or self.bias is not None:
            return Stream(self(x, residual=residual, live=live, also=also))
        return self.packed.add(x, self.weight, residual, after, live, also)

    def gated(self, x: Tensor, *, norm: RMSNorm | None = None, live: Tensor | None = None) -> Tensor:
        """Compute silu(gate) * up, the halves of linear(norm(x)): x [..., in] -> [..., out / 2]."""
        if self.packed.tensor is None and self.bias is None:
            return dispatch.gated_linear(x, self.weight, live=live, **_norm_arguments(norm))
        gate, up = self(x, norm=norm).chunk(2, dim=-1)
        out: Tensor = functional.silu(gate) * up
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> "Linear":
        """Moved or cast weights are not the packed ones."""
        self.packed.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nor are loaded ones."""
        self.packed.clear()
        super()._load_from_state_dict(*args, **kwargs)


def _norm_arguments(norm: RMSNorm | None) -> dict[str, Any]:
    """The norm as kernels take it."""
    return {} if norm is None else {"norm_weight": norm.weight, "eps": norm.eps}


def pack_linears(module: nn.Module) -> None:
    """Pack every Linear below `module` whose weight is frozen float32 on the CPU; leave others.

    Weights that are changed in place later must be packed again.
    """
    for child in module.modules():
        if isinstance(child, Linear):
            child.packed.pack(child.weight)
