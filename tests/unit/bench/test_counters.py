import pytest

from eyas.bench.counters import Counters

# As vLLM prints it: labels, _total, floats in two notations, and other metrics around.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 360.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.8e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 30.0
vllm:generation_tokens_total{engine="0",model_name="m"} 300.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 50.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 5000.0
broken line
process_cpu_seconds_total 12.5 1395066363000
"""


def test_a_metrics_page_of_vllm():
    found = Counters.of_metrics(VLLM)
    assert (found.drafts, found.draft_tokens, found.accepted) == (120, 360, 180)
    assert (found.steps, found.committed) == (50, 300)
    summary = found.summary()
    assert summary["acceptance_length"] == 2.5
    assert summary["acceptance_by_position"] == [0.75, 0.5, 0.25]
    assert summary["conditional_acceptance_by_position"] == pytest.approx([0.75, 2 / 3, 0.5])


def test_the_difference_of_two_readings():
    later = VLLM.replace("} 100.0", "} 150.0").replace('"2"} 30.0', '"2"} 35.0')
    found = Counters.of_metrics(later) - Counters.of_metrics(VLLM)
    assert (found.drafts, found.accepted, found.accepted_by_position) == (50, 0, [0, 0, 5])
    # A server that had drafted nothing before has no positions to subtract.
    assert (Counters(accepted_by_position=[4, 2]) - Counters()).accepted_by_position == [4, 2]


def test_a_page_that_counts_no_tokens():
    assert Counters.of_metrics("process_cpu_seconds_total 12.5\n") is None
    assert Counters().summary() == {}
    assert Counters(steps=3).step_summary(1.0) == {}


def test_the_parts_of_a_step_give_the_throughput():
    counted = Counters(
        steps=10, row_steps=40, committed=100, verify_seconds=0.5, draft_seconds=0.2, prefill_seconds=0.1
    )
    found = counted.step_summary(1.0)
    assert found["step_ms"] == 100
    assert found["other_ms"] == pytest.approx(20)
    assert found["rows_per_step"] * found["tokens_per_forward"] / found["step_ms"] * 1e3 == pytest.approx(100)
    parts = sum(found[name] for name in ("verify_ms", "draft_ms", "prefill_ms", "other_ms"))
    assert parts == pytest.approx(found["step_ms"])


def test_the_engines_own_names():
    from eyas.engine.stats import EngineStats

    stats = EngineStats(steps=3, row_steps=3, committed=7, drafted=6, drafted_row_steps=2, accepted=4)
    stats.runs = [0, 1, 1, 0, 1]
    found = Counters.of_stats(stats.as_dict())
    assert (found.steps, found.drafts, found.accepted, found.committed) == (3, 2, 4, 7)
    assert found.accepted_by_position == [2, 1, 1]
