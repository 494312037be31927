"""Matrix products of the decode path, with what stands before and after them in a layer.

    linear         rms_norm(x) @ W^T + bias + residual
    linear_norm    the same without a norm before, and the norm that comes after
    gated_linear   silu(gate) * up, gate and up = rms_norm(x) @ W^T
    max_linear     largest logit of every row and where it stands

Norm, bias and residual are optional. Legend: [...] rows of any leading shape, K in, N out.

`live`, an int32 on the device, says that rows from there on may be left out: their results are anything.
`also` [..., N] gets a second copy of the result: a view of rows that stand wider apart, as in a buffer of
several results side by side.
"""

from torch import Tensor
from torch.nn import functional

from eyas.kernels.reference.norm import rms_norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    live: Tensor | None = None,  # noqa: ARG001 - all are computed here
    also: Tensor | None = None,
) -> Tensor:
    """X [..., K], weight [N, K] -> [..., N]; norm_weight [K], bias [N], residual [..., N], live int32 [1]."""
    out = functional.linear(_normed(x, norm_weight, eps), weight, bias)
    out = out if residual is None else residual + out
    if also is not None:
        also.copy_(out)
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
    """(hidden, rms_norm(hidden)) [..., N], hidden = residual + linear(x); x [..., K], weight [N, K].

    The second is None where the norm would be a launch of its own: whoever reads hidden norms it then.
    """
    hidden = linear(x, weight, residual=residual, live=live, also=also)
    return hidden, rms_norm(hidden, norm_weight, eps)


def gated_linear(
    x: Tensor,
    gate_up_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    live: Tensor | None = None,  # noqa: ARG001 - all are computed here
) -> Tensor:
    """X [..., K], gate_up_weight [2 * N, K] (rows of gate, then rows of up) -> [..., N]."""
    gate, up = functional.linear(_normed(x, norm_weight, eps), gate_up_weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def max_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    index_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Largest of linear(x, weight) in every row, [...] of x's type, and the first place of it, int64 [...].

    `index_map` int64 [N] gives the id that a column stands for. A NaN counts as the largest, as in torch.

    Example: logits [0, 3, 3], index_map [5, 7, 8] -> (3, 7).
    """
    return largest(linear(x, weight, norm_weight=norm_weight, eps=eps), index_map)


def largest(logits: Tensor, index_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The ending of max_linear: (largest of logits [..., N], first place of it or that place's id)."""
    # max's own indices are any of the tied ones on CUDA; argmax is the first.
    index = logits.argmax(-1)
    value = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return value, index if index_map is None else index_map[index]


def _normed(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    return x if norm_weight is None else rms_norm(x, norm_weight, eps)
