import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from eyas.verify.chi_square import chi_square


def test_example():
    result = chi_square([48, 52], [0.5, 0.5])

    assert result.statistic == pytest.approx(0.16)
    assert result.degrees == 1
    assert result.p_value == pytest.approx(0.689, abs=1e-3)


@given(st.lists(st.integers(20, 200), min_size=2, max_size=12), st.integers(0, 2**32 - 1))
def test_equals_scipy_where_nothing_is_pooled(observed, seed):
    probs = np.random.default_rng(seed).dirichlet([50.0] * len(observed))
    expected = probs * sum(observed)
    if expected.min() < 5:
        return
    wanted = stats.chisquare(observed, expected)

    ours = chi_square(observed, list(probs))

    assert ours.statistic == pytest.approx(wanted.statistic, rel=1e-9)
    assert ours.p_value == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-300)


def test_rare_cells_are_pooled():
    """Ten cells of 1 expected each become two of 5, beside one of 90."""
    result = chi_square([1] * 10 + [90], [0.01] * 10 + [0.9])

    assert result.degrees == 2
    assert result.statistic == pytest.approx(0.0, abs=1e-9)


def test_an_impossible_observation_is_decisive():
    assert chi_square([1, 99], [0.0, 1.0]).p_value == 0.0


def test_one_cell_shows_nothing():
    assert chi_square([3], [1.0]) == (0.0, 0, 1.0)


def test_is_calibrated():
    """p-values of true samples are uniform, up to the pooling's coarseness (fixed seed)."""
    rng = np.random.default_rng(0)
    probs = [0.4, 0.3, 0.15, 0.1, 0.03, 0.02]
    values = [chi_square(list(rng.multinomial(400, probs)), probs).p_value for _ in range(400)]

    assert stats.kstest(values, "uniform").pvalue > 1e-3
