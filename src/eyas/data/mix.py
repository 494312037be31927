"""Temperatures and the share of the work that each gets; which gets which goes by the hash of a name."""

from eyas.data.files import key_of

Mix = dict[float, float]
"""Temperature -> share; shares need not add up to 1."""


def point_of(name: str) -> float:
    """A number in [0, 1) that is a name's own, the same on every machine."""
    return (key_of(name) >> 11) / 2**53


def pick(mix: Mix, point: float) -> float:
    """The temperature at a point in [0, 1): of {0: 3, 1: 1}, 0.7 gives 0 and 0.8 gives 1."""
    rest, temperature = point * sum(mix.values()), next(iter(mix))
    for temperature, share in mix.items():  # noqa: B007 - the last stays
        rest -= share
        if rest < 0:
            break
    return temperature


def spread(mix: Mix, point: float, count: int) -> list[float]:
    """Temperatures of `count` samples of one prompt, at points evenly spaced: shares hold in each prompt.

    Greedy answers are all the same, so one is kept; a prompt may get fewer than `count`. In 4 samples
    {0: 1, 0.7: 1, 1: 2} gives [0, 0.7, 1, 1] whatever the point, and {0: 1, 1: 1} gives [0, 1, 1].
    """
    chosen: list[float] = []
    for number in range(count):
        temperature = pick(mix, (point + number) / count)
        if temperature or 0.0 not in chosen:
            chosen.append(temperature)
    return chosen
