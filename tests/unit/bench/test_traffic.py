"""Windows, latencies and intervals against numbers worked out by hand."""

import pytest

from eyas.bench.intervals import bootstrap_interval, ratio_interval, t_interval
from eyas.bench.traffic import Trace, Window, latencies, percentile, poisson_starts, steady_window, summarize


def trace(start, *deliveries, end=None, error=None):
    return Trace(start, list(deliveries), end, error)


def test_the_window_opens_when_all_places_run_and_closes_when_one_stays_empty():
    traces = [
        trace(0.0, (1.0, 1), (4.0, 3), end=4.0),
        trace(0.0, (2.0, 1), (5.0, 3), end=5.0),
        trace(4.0, (5.0, 2), (9.0, 4), end=9.0),
    ]
    window = steady_window(traces, 2, stop=9.0)
    assert window == Window(2.0, 5.0, steady=True)
    # After 2.0 up to and with 5.0: 3 + 3 + 2; the first deliveries and the lonely tail are out.
    assert window.tokens(traces) == 8
    assert summarize(traces, window, 9.0)["output_tokens_per_second"] == pytest.approx(8 / 3)
    assert summarize(traces, window, 9.0)["whole_tokens_per_second"] == pytest.approx(14 / 9)


def test_a_run_that_is_cut_off_closes_the_window_there():
    traces = [trace(0.0, (1.0, 1), (4.0, 3)), trace(0.0, (2.0, 1), (3.0, 1))]
    assert steady_window(traces, 2, stop=4.5) == Window(2.0, 4.5, steady=True)


def test_without_a_steady_window_the_whole_run_counts():
    never_full = [trace(1.0, (2.0, 1), end=2.0)]
    assert steady_window(never_full, 2, stop=6.0) == Window(1.0, 6.0, steady=False)
    one_silent = [trace(0.0, (1.0, 1)), trace(0.0)]
    assert steady_window(one_silent, 2, stop=6.0) == Window(0.0, 6.0, steady=False)


def test_a_failed_request_frees_its_place_but_counts_nowhere():
    traces = [trace(0.0, (1.0, 1), end=3.0, error="bad"), trace(0.0, (1.0, 1), (7.0, 1), end=7.0)]
    assert steady_window(traces, 2, stop=7.0) == Window(1.0, 3.0, steady=True)
    found = summarize(traces, steady_window(traces, 2, 7.0), 7.0)
    assert (found["num_completed"], found["num_errors"]) == (1, 1)
    assert found["e2e_ms"]["mean"] == pytest.approx(7000)


def test_latencies():
    found = latencies([trace(1.0, (1.5, 1), (1.7, 3), (2.0, 1), end=2.0), trace(0.0, (9.0, 1))])
    assert found["ttft_ms"]["p50"] == pytest.approx(500)
    assert found["tpot_ms"]["mean"] == pytest.approx(500 / 4)
    assert found["itl_ms"]["mean"] == pytest.approx(250)
    assert found["itl_ms"]["p99"] == pytest.approx(200 + 0.99 * 100)
    assert found["e2e_ms"]["p90"] == pytest.approx(1000)


def test_one_token_has_no_gap():
    assert set(latencies([trace(0.0, (1.0, 1), end=1.0)])) == {"ttft_ms", "e2e_ms"}


@pytest.mark.parametrize(("q", "expected"), [(0, 1), (50, 2), (75, 3), (100, 4)])
def test_percentiles_are_linear_between_neighbours(q, expected):
    assert percentile([1, 2, 4], q) == expected


def test_poisson_times_have_the_rate_and_repeat_with_the_seed():
    starts = poisson_starts(5.0, 4000, seed=3)
    assert starts == poisson_starts(5.0, 4000, seed=3) != poisson_starts(5.0, 4000, seed=4)
    assert starts == sorted(starts)
    # Mean of 4000 gaps of 0.2 s: standard error 0.2 / sqrt(4000) = 0.0032; 5 of them.
    assert starts[-1] / 4000 == pytest.approx(0.2, abs=0.016)


def test_t_interval_by_hand():
    found = t_interval([10, 12, 14])
    assert found.value == 12
    assert found.high == pytest.approx(12 + 4.303 * 2 / 3**0.5)
    assert t_interval([5]).low is None


@pytest.mark.parametrize("num", [2, 5, 30, 31])
def test_t_interval_against_scipy(num):
    from scipy import stats

    values = [((i * 37) % 11) / 3 for i in range(num)]
    low, high = stats.t.interval(0.95, num - 1, loc=sum(values) / num, scale=stats.sem(values))
    found = t_interval(values)
    # Above 30 degrees of freedom the limit 1.96 stands in.
    assert found.high - found.low == pytest.approx(high - low, rel=1e-3 if num < 31 else 0.05)


def test_paired_ratios_cancel_what_slowed_both():
    found = ratio_interval([2, 20], [1, 10])
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert ratio_interval([2, 8], [1, 2]).value == pytest.approx(8**0.5)


def test_the_bootstrap_covers_the_truth_and_repeats():
    rows = [(i % 7) + 1.0 for i in range(200)]
    found = bootstrap_interval(rows, lambda part: sum(part) / len(part), seed=1)
    error = (sum((r - found.value) ** 2 for r in rows) / 200) ** 0.5 / 200**0.5
    assert found.value - found.low == pytest.approx(1.96 * error, rel=0.25)
    assert found == bootstrap_interval(rows, lambda part: sum(part) / len(part), seed=1)
    assert bootstrap_interval([1.0], max).low is None
