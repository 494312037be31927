from math import log, sqrt

import pytest
from scipy import stats

from eyas.bench.intervals import Spread, geometric_interval, paired_spread, pooled_spread, ratio_interval, t95


def test_pooled_spread_is_that_of_a_one_way_layout():
    groups = [(1.0, 2.0), (2.0, 2.0), (3.0, 4.0, 5.0), (7.0,)]
    found = pooled_spread(groups)
    logs = [[log(x) for x in group] for group in groups]
    squares = sum((x - sum(g) / len(g)) ** 2 for g in logs for x in g)
    assert found.degrees == 4
    assert found.deviation == pytest.approx(sqrt(squares / 4))
    assert pooled_spread([(1.0,), (2.0,)]) is None


def test_paired_spread_is_what_pairs_differ_by():
    first, second = (1.0, 2.0, 4.5), (2.0, 5.0, 8.0)
    ratios = [log(b / a) for a, b in zip(first, second, strict=True)]
    found = paired_spread([(first, second), ((1.0,), (2.0,)), ((1.0, 2.0),)])
    assert found.degrees == 2
    assert sqrt(2) * found.deviation == pytest.approx(stats.tstd(ratios))
    assert paired_spread([((1.0, 2.0), (3.0, 6.0))]).deviation == pytest.approx(0, abs=1e-12)
    assert paired_spread([]) is None


def test_an_interval_takes_the_spread_that_is_better_known():
    own = geometric_interval([100.0, 110.0])
    lent = geometric_interval([100.0, 110.0], Spread(0.1, 12))
    assert lent.value == own.value
    half = stats.t.ppf(0.975, 12) * 0.1 / sqrt(2)
    assert log(lent.high / lent.value) == pytest.approx(half, rel=1e-3)
    many = [100.0, 110.0, 105.0, 103.0]
    assert geometric_interval(many, Spread(9.0, 3)) == geometric_interval(many)
    ratio = ratio_interval([2.0, 2.0], [1.0, 1.0], Spread(0.1, 12))
    assert log(ratio.high / 2) == pytest.approx(sqrt(2) * half, rel=1e-3)


@pytest.mark.parametrize("degrees", [1, 2, 5, 30, 31, 1000])
def test_students_t(degrees):
    assert t95(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.045 if degrees == 31 else 1e-2)
