"""Keyed random numbers: bits, uniformity, independence; and drawing with them.

Statistical thresholds are 1e-6, the numbers are fixed by their keys: a test passes always or never.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import naive_sampling
from eyas.kernels.reference import random
from eyas.kernels.reference.random import draw, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


def keyed(seeds, positions, stream):
    return uniform(torch.tensor(seeds), torch.tensor(positions), stream)


@given(INT64, st.integers(0, 2**40), st.integers(0, 7))
def test_equals_scalar_python(seed, position, stream):
    assert keyed(seed, position, stream).item() == naive_sampling.uniform(seed, position, stream)


def test_is_splitmix64():
    # First output of SplitMix64 from state 0, a published test vector.
    assert random._mix(torch.tensor(random._GOLDEN)).item() == 0xE220A8397B1DCDAF - 2**64


def test_never_zero_or_one(monkeypatch):
    for bits in (0, -1):
        monkeypatch.setattr(random, "_mix", lambda x, bits=bits: torch.full_like(x, bits))
        value = keyed(0, 0, 0).item()
        assert 0.0 < value < 1.0


@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniform(stream, along):
    index = torch.arange(20000)
    fixed = torch.tensor(7)
    values = uniform(fixed, index, stream) if along == "positions" else uniform(index, fixed, stream)

    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6
    assert values.unique().numel() == 20000


INDEX = torch.arange(50000)
PAIRS = {
    "next position": (uniform(torch.tensor(3), INDEX, 0), uniform(torch.tensor(3), INDEX + 1, 0)),
    "next seed": (uniform(INDEX, torch.tensor(11), 0), uniform(INDEX + 1, torch.tensor(11), 0)),
    "accept and residual": (uniform(INDEX, torch.tensor(5), 1), uniform(INDEX, torch.tensor(5), 2)),
    "draft and accept": (uniform(torch.tensor(1), INDEX, 3), uniform(torch.tensor(1), INDEX, 1)),
    "seed and position": (uniform(INDEX, torch.tensor(4), 0), uniform(torch.tensor(4), INDEX, 0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_independent(name):
    first, second = PAIRS[name]
    keep = INDEX != 4 if name == "seed and position" else slice(None)
    cells = ((first * 16).long() * 16 + (second * 16).long())[keep]

    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-6


def test_draw_example():
    probs = torch.tensor([0.0, 0.5, 0.25, 0.25]).expand(3, 4)

    assert draw(probs, torch.tensor([0.1, 0.6, 0.99], dtype=torch.float64)).tolist() == [1, 2, 3]


LOWEST, HIGHEST = 2.0**-53, 1 - 2.0**-53


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=1, max_size=9).filter(any),
    st.one_of(st.just(LOWEST), st.just(HIGHEST), st.floats(LOWEST, HIGHEST)),
)
def test_draw_inverts_the_cumulative_distribution(weights, u):
    probs = [w / sum(weights) for w in weights]
    token = draw(torch.tensor(probs, dtype=torch.float64), torch.tensor(u, dtype=torch.float64)).item()

    assert probs[token] > 0
    # Exact arithmetic on both sides; each weight may have lost 2**-50.
    below = sum(Fraction(p) for p in probs[:token]) / sum(map(Fraction, probs))
    above = sum(Fraction(p) for p in probs[: token + 1]) / sum(map(Fraction, probs))
    slack = Fraction(len(probs), 2**48)
    assert below - slack <= Fraction(u) <= above + slack


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_draw_never_returns_probability_zero_in_a_large_row(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(4, 5000, generator=generator) * (torch.rand(4, 5000, generator=generator) < 0.01)
    probs[:, 17] += 0.01
    probs /= probs.sum(-1, keepdim=True)
    u = torch.tensor([LOWEST, HIGHEST, 0.5, 1 - 2.0**-30], dtype=torch.float64)

    assert (probs.gather(1, draw(probs, u).unsqueeze(1)) > 0).all()


def test_draw_frequencies():
    probs = torch.tensor([0.05, 0.0, 0.3, 0.45, 0.2])
    drawn = draw(probs.expand(40000, 5), uniform(torch.arange(40000), torch.tensor(2), 0))
    counts = torch.bincount(drawn, minlength=5)

    assert counts[1] == 0
    seen = probs > 0
    expected = probs[seen].double() / probs[seen].double().sum() * 40000
    assert stats.chisquare(counts[seen].numpy(), expected.numpy()).pvalue > 1e-6


def test_draw_of_unusable_rows_is_defined():
    bad = torch.tensor([[float("nan")] * 3, [0.0] * 3, [float("inf"), 1.0, 0.0], [0.2, float("nan"), 0.8]])
    u = torch.full((4,), 0.9, dtype=torch.float64)

    assert draw(bad, u).tolist() == [0, 0, 1, 2]
