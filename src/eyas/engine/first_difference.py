"""Where an answer parts from plain decoding's, and whether rounding of 16-bit numbers can be the reason.

The target's own logits after the common prefix (one plain forward over prompt and common tokens, in the
target's type) say how far apart the two tokens are there: the gap. It is held against the spacing of the
type, the distance of two neighbouring numbers, at the largest logit of that place: what moves a logit is the
size of hidden state and weights, not the logit itself.

Why NUM_SPACINGS is 4. Attention that adds in another order changes last bits in the residual stream. A
logit x = c |w| |h|, c the cosine, is a sum of D terms. If each of the 2 L roundings of the stream moves its
D numbers by up to half a spacing, x moves by about sqrt(2 L / 3 D) / c half spacings: 0.47 spacings for
L = 30, D = 576, c = 0.2, and no more for larger models (L = 32, D = 4096, c = 0.1: 0.36). The gap of two
logits in two runs moves by twice that: three standard deviations are 2.8 spacings. Rounding the two logits
themselves adds up to half a spacing each: 3.8. Measured on SmolLM2-135M (c = 0.2) in bfloat16, keys of every
attention in random orders, 3,098 places: the gap of the best two moved by 0.77 spacings rms, and at the 68
places where the choice changed it was at most 1 (2 with PyTorch's attention on a CPU). Of 350 answers of
trees on an H200 that parted from plain decoding's, the gap was at most 3. A wrong token brings tens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.engine.exact import next_logits, rounding_distance
from eyas.kernels.settings import settings
from eyas.targets.base import Target

NUM_SPACINGS = 4
"""Largest gap, in spacings, that rounding explains."""
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Largest distance in probability that rounding explains in seeded outputs."""
COARSE_ROUNDING = 0.1
"""The same for 16-bit types."""
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One answer's first difference from plain decoding's."""

    prompt: int
    """Index of the prompt."""
    batch_size: int
    place: int
    """Index of the output token."""
    plain_token: int | None
    """Plain decoding's token there; None if its output had ended."""
    token: int | None
    """The drafter's token there; None if its output had ended."""
    within_rounding: bool
    """Whether this passes."""
    gap: float | None = None
    """Greedy: the target's logit of plain_token less that of token; below 0 if this forward has them in the
    other order. None where an output ended or a logit is no number."""
    spacing: float | None = None
    """Distance of neighbouring numbers of the target's type at the largest logit there, of either sign."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Two unequal outputs for one prompt."""

    prompt: int
    batch_size: int
    prompt_ids: Sequence[int]
    plain: Sequence[int]
    output: Sequence[int]

    @property
    def place(self) -> int:
        """Index of the first token that differs; the shorter length if one output begins the other."""
        pairs = enumerate(zip(self.plain, self.output, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.plain), len(self.output)))

    @property
    def pair(self) -> tuple[int, int] | None:
        """Both tokens there; None if an output had ended."""
        place = self.place
        if place == min(len(self.plain), len(self.output)):
            return None
        return self.plain[place], self.output[place]

    def difference(
        self, *, within_rounding: bool, gap: float | None = None, spacing: float | None = None
    ) -> Difference:
        """What is reported of it."""
        place = self.place
        return Difference(
            self.prompt,
            self.batch_size,
            place,
            self.plain[place] if place < len(self.plain) else None,
            self.output[place] if place < len(self.output) else None,
            within_rounding,
            gap,
            spacing,
        )


def may_part(target: Target, *, tree: bool) -> bool:
    """Whether rounding can part greedy answers from plain decoding's at all.

    A tree's nodes stand elsewhere in the cache than the same tokens of plain decoding, so attention adds
    in another order. A chain's rows are plain decoding's, and kernels that are batch-invariant give them the
    same bits; on the CPU, or by the library, bits depend on how many rows are multiplied. float32 counts as
    exact.
    """
    if target.dtype not in (torch.bfloat16, torch.float16):
        return False
    return tree or target.device.type != "cuda" or not settings.invariant


def greedy_difference(target: Target, outputs: Outputs, *, tree: bool) -> Difference:
    """The first difference of two unequal greedy outputs, and the gap there.

    Within rounding: both tokens lie within NUM_SPACINGS spacings of the best logit, where `may_part` allows.
    """
    place, pair = outputs.place, outputs.pair
    if pair is None:
        return outputs.difference(within_rounding=False)
    logits = next_logits(target, [[*outputs.prompt_ids, *outputs.plain[:place]]])[0]
    one, other = (float(logits[token]) for token in pair)
    step = spacing(float(logits.abs().max()), target.dtype)
    farthest = float(logits.max()) - min(one, other)
    near = may_part(target, tree=tree) and farthest <= NUM_SPACINGS * step
    gap = one - other
    return outputs.difference(within_rounding=near, gap=gap if math.isfinite(gap) else None, spacing=step)


def seeded_difference(target: Target, outputs: Outputs, *, temperature: float, seed: int) -> Difference:
    """The first difference of two unequal outputs of one seed.

    Within rounding: the random number lies that near to what both tokens own on [0, 1).
    """
    if outputs.pair is None:
        return outputs.difference(within_rounding=False)
    context = [*outputs.prompt_ids, *outputs.plain[: outputs.place]]
    distance = rounding_distance(target, context, outputs.pair, temperature=temperature, seed=seed)
    return outputs.difference(within_rounding=distance <= ROUNDING.get(target.dtype, COARSE_ROUNDING))


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of a type at this magnitude; bfloat16: 0.125 from 16 to below 32."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(value), info.tiny))
    return math.ldexp(info.eps, exponent - 1)


def summary(differences: Sequence[Difference], outputs: int, dtype: torch.dtype) -> str:
    """One line for people: "differs in 6 of 16, gaps 0 to 0.125 (bf16 spacing 0.125)"."""
    if not differences:
        return f"{outputs} of {outputs} outputs equal plain decoding, token by token"
    text = f"differs in {len(differences)} of {outputs}"
    gaps = [one.gap for one in differences if one.gap is not None]
    if gaps:
        steps = [one.spacing for one in differences if one.spacing is not None]
        name = SHORT_NAMES.get(dtype, str(dtype))
        text += f", {_span('gap', gaps)} ({name} spacing {_span('', steps)})"
    wrong = [one for one in differences if not one.within_rounding]
    if not wrong:
        return f"{text}, all ties within rounding"
    first = wrong[0]
    return (
        f"{text}; {len(wrong)} DIFFER beyond rounding; first: prompt {first.prompt}, batch "
        f"{first.batch_size}, output token {first.place}: {_token(first.plain_token)} became "
        f"{_token(first.token)}"
    )


def _span(name: str, values: Sequence[float]) -> str:
    """Smallest to largest: "gaps 0 to 0.125", "gap 0.5"."""
    low, high = min(values), max(values)
    if low == high:
        return f"{name} {low:.3g}".strip()
    return f"{name and name + 's'} {low:.3g} to {high:.3g}".strip()


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
