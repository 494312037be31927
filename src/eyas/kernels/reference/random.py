"""Random numbers keyed by (seed, position, stream), and drawing a token with one of them.

A request's numbers depend on nothing but its own seed and the absolute position of the token they help to
choose: not on the batch, the step, the drafter, or how often a step was repeated. The generator is
SplitMix64 (Steele, Lea, Flood 2014) read at random places: output number n of the sequence that starts at
state s is mix(s + (n + 1) * GOLDEN); here s = mix(seed + GOLDEN) and n = 8 * position + stream.

Everything is int64 arithmetic modulo 2**64, so CPU and CUDA give the same bits.
"""

from typing import Final

import torch
from torch import Tensor

TARGET: Final = 0
"""Stream of the target's own choice of a token."""
ACCEPT: Final = 1
"""Stream of the acceptance test of a sampled draft."""
RESIDUAL: Final = 2
"""Stream of the draw from the residual after a rejection."""
DRAFT: Final = 3
"""Stream of the drafter's own draws."""

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLY_1: Final = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLY_2: Final = 0x94D049BB133111EB - 2**64

# Weights become integers in steps of 2**-50. Sums stay below 2**53 (exact in float64, no overflow) for rows
# whose weights sum to less than 8, and what rounding loses over 2**18 tokens is below 2**-32.
_SCALE: Final = float(2**50)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Uniform float64 numbers in the open interval (0, 1), in steps of 2**-52.

    Args:
        seeds: int64, any value.
        positions: int64, broadcast against seeds; absolute position of the token that is being chosen.
        stream: which use of the number at that place, 0 .. 7 (TARGET, ACCEPT, RESIDUAL, DRAFT).
    """
    assert 0 <= stream < 8, "streams are numbered 0 .. 7"
    state = _mix(seeds + _GOLDEN)
    bits = _mix(state + (positions * 8 + (stream + 1)) * _GOLDEN)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution: one token a row.

    The sums are taken over integers, so they are exact in any order of summation: a token of probability 0
    is never returned, and a row gives the same token on every device that gives the same probabilities.

    Example: probs [0.0, 0.5, 0.25, 0.25], uniforms 0.1 -> 1, 0.6 -> 2, 0.99 -> 3.

    Args:
        probs: float32 or float64 [..., V], not negative, each row summing to about 1 (its sum is divided
            out). NaN and infinite entries count as 0; a row of zeros gives token 0.
        uniforms: float64 [...] in (0, 1).

    Returns:
        int64 [...].
    """
    weights = torch.nan_to_num(probs * _SCALE, nan=0.0, posinf=0.0, neginf=0.0).to(torch.int64)
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1]
    # u <= 1 - 2**-53 and total < 2**53 - 2**51 keep the product below total; the clamp is for odd rows.
    threshold = torch.minimum((uniforms * total.double()).to(torch.int64), total - 1)
    token = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    return token.clamp_(max=probs.shape[-1] - 1)
