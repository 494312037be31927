"""Which hidden states of the target a drafter reads, and the one place of the shift by one.

Layer ids follow the convention of EAGLE, vLLM and speculators: id k is the residual stream
ENTERING layer k, that is the raw output of layer k - 1 (docs/algorithms/index.md).

The shift by one (EAGLE): draft row j carries the token at position j + 1 together with the target's
features at position j, stands at RoPE position j, and predicts the token at position j + 2.

    position      0    1    2    3
    token         x0   x1   x2   x3
    feature       f0   f1   f2   f3
    draft row 0   (x1, f0) at RoPE 0 -> x2
    draft row 1   (x2, f1) at RoPE 1 -> x3
    draft row 2   (x3, f2) at RoPE 2 -> x4 (the first real guess)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer of EAGLE-3: (2, L // 2, L - 3), entering-layer ids.

    >>> default_aux_layers(30)
    (2, 15, 27)
    """
    if num_layers < 6:
        # Tiny targets: keep the ids inside the stack and in order.
        return (min(1, num_layers - 1), num_layers // 2, num_layers - 1)
    return (2, num_layers // 2, num_layers - 3)


def shift_by_one(token_ids: "Tensor", features: "Tensor") -> "tuple[Tensor, Tensor]":
    """Pair features [..., n, F] with the token after them: tokens [..., 1:], features [..., :-1, :].

    Returns (next_tokens [..., n-1], features [..., n-1, F]); row j stands at RoPE position j.
    """
    return token_ids[..., 1:], features[..., :-1, :]
