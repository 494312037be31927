import json

import pytest
from sweep_records import cell, step, write

from eyas.bench.analyze_sweep import acceptance_by_k, best_rows, lead, leaders, read_cells, tables, versus
from eyas.bench.sources import published_ratio, source_name
from eyas.bench.sweep import SCHEMA
from eyas.core.errors import DataError

# At c=1: 500 = 1 row * 1 token / 2 ms; 1000 = 2.5 / 2.5 ms; 1500 = 3.0 / 2.0 ms.
PLAIN = cell("plain", 0, 500.0, steps=step(1.0, 2.0))
EAGLE = cell("eagle3", 3, 1000.0, steps=step(2.5, 2.5, verify_ms=1.5, draft_ms=1.0), drafts=[80, 50, 20])
PEAGLE = cell(
    "peagle", 7, 1500.0, steps=step(3.0, 2.0, verify_ms=1.6, draft_ms=0.4), drafts=[80, 60, 40, 20, 0, 0, 0]
)
EAGLE_AT_5 = cell("eagle3", 5, 900.0, steps=step(2.7, 3.0), drafts=[80, 50, 20, 15, 5])


def rows(tmp_path, *lines):
    return read_cells([write(tmp_path / "r.jsonl", *lines)])


def test_each_method_stands_at_its_best_k(tmp_path):
    found = rows(tmp_path, PLAIN, EAGLE, EAGLE_AT_5, PEAGLE)
    assert [row.label for row in best_rows(found)] == ["plain", "eagle3 K=3", "peagle K=7"]


def test_a_lead_is_the_product_of_its_factors(tmp_path):
    found = rows(tmp_path, EAGLE, PEAGLE)
    one = lead(found[1], found[0])
    assert one.ratio.value == pytest.approx(1.5)
    assert one.acceptance == pytest.approx(1.2)
    assert one.step_time == pytest.approx(1.25)
    assert one.batch == pytest.approx(1.0)
    assert one.acceptance * one.step_time * one.batch == pytest.approx(one.ratio.value)
    assert (one.phase, one.phase_ms) == ("draft", (0.4, 1.0))
    assert one.reason == (
        "peagle K=7 leads eagle3 K=3 1.50x: 1.25x from step time, 1.20x from acceptance "
        "(draft takes 0.40 ms a step against 1.00)"
    )
    assert "trails" in lead(found[0], found[1]).reason


def test_how_full_the_batch_was_is_a_factor_of_its_own(tmp_path):
    half = cell("peagle", 7, 750.0, steps=step(3.0, 2.0, rows=0.5))
    one = lead(*reversed(rows(tmp_path, EAGLE, half)))
    assert one.batch == pytest.approx(0.5)
    assert "0.50x from how full the batch was" in one.reason


def test_an_endpoint_without_steps_gives_step_time_as_what_remains(tmp_path):
    url = {"engine": "http://x"}
    found = rows(
        tmp_path,
        cell("eagle3", 3, 1000.0, drafts=[80, 50, 20], **url),
        cell("peagle", 3, 1500.0, drafts=[90, 60, 50], **url),
    )
    one = lead(found[1], found[0])
    assert one.acceptance == pytest.approx(3.0 / 2.5)
    assert one.step_time == pytest.approx(1.25)
    assert one.phase is None
    silent = rows(tmp_path, cell("eagle3", 3, 1000.0, **url), cell("peagle", 3, 1500.0, **url))
    assert "do not tell" in lead(silent[1], silent[0]).reason


def test_repeats_are_paired(tmp_path):
    # The second repeat ran at half speed for both: the ratio does not move, the speeds do.
    lines = [
        cell(m, k, speed / (1 + repeat), repeat=repeat)
        for m, k, speed in (("eagle3", 3, 1000.0), ("peagle", 7, 1300.0))
        for repeat in (0, 1)
    ]
    found = rows(tmp_path, *lines)
    one = lead(found[1], found[0])
    assert (one.ratio.low, one.ratio.value, one.ratio.high) == pytest.approx((1.3, 1.3, 1.3))
    assert found[0].throughput.value == pytest.approx((1000 * 500) ** 0.5)
    assert found[0].throughput.low < 500
    assert found[0].throughput.high > 1000


def test_few_repeats_borrow_the_spread_of_other_rows(tmp_path):
    noise = {"a": (1.0, 1.02), "b": (1.01, 1.0), "c": (1.0, 1.01), "d": (1.02, 1.0), "e": (1.0, 1.0)}
    lines = [
        cell(m, 3, 100 * factors[repeat] * (2 if m == "b" else 1), repeat=repeat)
        for m, factors in noise.items()
        for repeat in (0, 1)
    ]
    found = rows(tmp_path, *lines)
    one = lead(found[1], found[0])
    assert 1.9 < one.ratio.low < one.ratio.value < one.ratio.high < 2.1
    alone = rows(tmp_path, *lines[:4])
    assert lead(alone[1], alone[0]).ratio.low < one.ratio.low - 0.2
    single = rows(tmp_path, *[line for line in lines if line["cell"]["repeat"] == 0])
    assert single[0].throughput.low is None


def test_a_last_repeat_that_was_cut_off(tmp_path):
    cells = [(m, repeat) for m in "abc" for repeat in (0, 1) if (m, repeat) != ("c", 1)]
    found = rows(tmp_path, *(cell(m, 3, 100.0, repeat=repeat) for m, repeat in cells))
    assert [len(row.results) for row in found] == [2, 2, 1]
    assert lead(found[2], found[0]).ratio.num == 1


def test_phases_of_one_data_set_stand_for_the_others(tmp_path):
    other = cell("peagle", 7, 1500.0, steps=step(3.0, 2.0), dataset="gsm8k")
    timed = cell("peagle", 7, 1200.0, steps=step(3.0, 2.7, verify_ms=2.1, draft_ms=0.6), phases=True)
    found = rows(tmp_path, PEAGLE, other, timed)
    assert [row.phase("verify_ms") for row in found] == [2.1, 2.1]


def test_prefill_is_a_data_sets_own(tmp_path):
    parts = {"verify_ms": 1.5, "draft_ms": 0.5, "prefill_ms": 0.1}
    timed = [cell(m, 3, 900.0, steps=step(3.0, 2.1, **parts), phases=True) for m in ("eagle3", "peagle")]
    own = [
        cell(m, 3, speed, steps={"step_ms": 2.1, "prefill_ms": ms}, dataset="gsm8k")
        for m, speed, ms in (("eagle3", 1000.0, 0.7), ("peagle", 1100.0, 0.3))
    ]
    left, right = reversed(rows(tmp_path, *own, *timed))
    assert (left.phase("verify_ms"), left.phase("prefill_ms")) == (1.5, 0.3)
    assert (lead(left, right).phase, lead(left, right).phase_ms) == ("prefill", (0.3, 0.7))


def test_no_phase_is_named_where_one_side_was_never_timed(tmp_path):
    timed = cell("peagle", 3, 1.0, steps=step(3.0, 2.1, verify_ms=1.5, draft_ms=0.5), phases=True)
    found = rows(
        tmp_path,
        cell("eagle3", 3, 1000.0, steps={"step_ms": 2.4, "prefill_ms": 0.2, "tokens_per_forward": 2.5}),
        cell("peagle", 3, 1100.0, steps={"step_ms": 2.1, "prefill_ms": 0.1, "tokens_per_forward": 2.5}),
        timed,
    )
    one = lead(found[1], found[0])
    assert one.phase is None
    assert one.step_time == pytest.approx(2.4 / 2.1)
    assert one.reason.endswith("1.00x from acceptance")


def test_a_lead_within_the_noise_says_so(tmp_path):
    lines = [cell("a", 3, speed, repeat=i) for i, speed in enumerate((100.0, 130.0))]
    lines += [cell("b", 3, speed, repeat=i) for i, speed in enumerate((110.0, 100.0))]
    assert "no difference" in leaders(rows(tmp_path, *lines))[0][1].reason


def test_acceptance_by_k_weighs_by_verifications(tmp_path):
    many = cell("eagle3", 3, 1.0, drafts=[80, 50, 20], concurrency=2)
    many["result"]["acceptance"] |= {"num_drafts": 300.0, "num_accepted": 300.0}
    found = acceptance_by_k(rows(tmp_path, PLAIN, EAGLE, EAGLE_AT_5, many))
    assert found == {"mt_bench": {"eagle3": {3: pytest.approx(1 + 450 / 400), 5: pytest.approx(2.7)}}}


def test_tables_hold_the_source_beside(tmp_path):
    found = tables(rows(tmp_path, PLAIN, EAGLE, EAGLE_AT_5, PEAGLE))
    assert [row["best_k"] for row in found["rows"]] == [True, True, False, True]
    assert [row["over_plain"]["value"] for row in found["rows"]] == pytest.approx([1.0, 2.0, 1.8, 3.0])
    assert found["peagle_over_eagle3"][0]["published"] == 1.55
    assert found["leaders"][0]["left"] == "peagle K=7"
    assert found["rows"][1]["conditional_acceptance_by_position"] == pytest.approx([0.8, 0.625, 0.4])


def test_phases_come_from_the_run_that_timed_them(tmp_path):
    whole = cell("peagle", 7, 1500.0, steps=step(3.0, 2.0))
    timed = cell("peagle", 7, 1200.0, steps=step(3.0, 2.7, verify_ms=2.1, draft_ms=0.6), phases=True)
    found = rows(tmp_path, EAGLE, whole, timed)
    assert len(found) == 2
    assert found[1].throughput.value == pytest.approx(1500)
    assert (found[1].phase("verify_ms"), found[1].phase("draft_ms")) == (2.1, 0.6)
    one = lead(found[1], found[0])
    assert one.step_time == pytest.approx(1.25)
    assert (one.phase, one.phase_ms) == ("verify", (2.1, 1.5))


def test_calibrated_k_is_called_auto(tmp_path):
    found = rows(tmp_path, EAGLE, cell("eagle3", -1, 1200.0, drafts=[80, 50]))
    assert best_rows(found)[0].label == "eagle3 K=auto"
    assert acceptance_by_k(found) == {"mt_bench": {"eagle3": {3: pytest.approx(2.5)}}}


def test_only_pairs_that_are_there_are_compared(tmp_path):
    found = rows(tmp_path, EAGLE, PEAGLE, cell("eagle3", 3, 1.0, concurrency=2))
    assert [place for place, _ in versus(found, "peagle", "eagle3")] == [("mt_bench", 1, None)]
    assert leaders(rows(tmp_path, EAGLE)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "other"),
        ("head_fingerprint", "new"),
        ("max_tokens", 7),
        ("temperature", 1.0),
        ("dtype", "x"),
    ],
)
def test_what_does_not_compare_is_not_mixed(tmp_path, field, value):
    with pytest.raises(DataError, match=field):
        rows(tmp_path, EAGLE, cell("eagle3", 3, 1.0, repeat=1, **{field: value}))


def test_a_record_without_cells(tmp_path):
    with pytest.raises(DataError, match="no cell"):
        rows(tmp_path)


def test_published_figures():
    assert source_name("eagle_humaneval") == "HumanEval"
    assert source_name("speed_bench/qualitative:coding") == "SPEED-Bench"
    assert source_name("gsm8k") is None
    assert published_ratio("mt_bench", 64) == 1.05
    assert published_ratio("speed_bench", 1) == 1.69
    assert published_ratio("humaneval", 3) is None


@pytest.mark.parametrize("wrong", [{"cell": "x"}, {"result": {"output_tokens_per_second": -1}}])
def test_a_cell_changed_by_hand_is_named(tmp_path, wrong):
    cell = {"dataset": "d", "method": "plain", "engine": "local", "num_draft_tokens": 0, "repeat": 0}
    line = {"schema": SCHEMA, "type": "cell", "cell": cell | {"concurrency": 1, "rate": None}} | wrong
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps({"result": {"output_tokens_per_second": 1.0}} | line) + "\n")
    with pytest.raises(DataError, match="remove its line from the record"):
        read_cells([path])
