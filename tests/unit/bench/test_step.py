"""`eyas bench step` on tiny shapes: every phase runs, rounds start alike, and the document is complete."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eyas.bench import step_ceilings
from eyas.bench.step import bench_step
from eyas.bench.step_ceilings import CeilingSizes
from eyas.bench.step_clock import Stopwatch
from eyas.bench.step_document import SCHEMA, step_document
from eyas.bench.step_loop import StepLoop, waits
from eyas.bench.step_method import StepOptions
from eyas.bench.step_models import open_drafter, open_target
from eyas.bench.step_profile import busy, summarize
from eyas.bench.step_rig import PHASES, make_rig
from eyas.bench.step_warm import Job, jobs_of, run, warm
from eyas.cli.main import main
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.engine.stats import EngineStats, Lap, PhaseClock
from eyas.targets import shapes

TINY = CeilingSizes(read_out=64, read_in=64, square=32)


@pytest.fixture(scope="module")
def target():
    return open_target("shape:tiny", device="cpu", dtype=None)


def rig_of(target, spec, tree=None, **options):
    drafter = None if spec is None else open_drafter(spec, target).make(None if tree else 5, tree)
    return make_rig(target, drafter, batch=3, context=20, **options)


SHAPES = [
    ("shape:eagle3", None),
    ("shape:peagle-2", None),
    ("shape:eagle3", TreeBudget(3, 2, 6)),
    ("shape:peagle-2", TreeBudget(3, 2, 6)),
    (None, None),
]


@pytest.mark.parametrize(("spec", "tree"), SHAPES)
def test_phases_and_whole_step_leave_the_same_state(target, spec, tree):
    rig = rig_of(target, spec, tree, acceptance=None if spec is None else 2.5)
    rig.step()
    whole = {name: getattr(rig.state, name)[:3].clone() for name in rig.saved}
    rig.restore()
    for name, value in rig.saved.items():
        assert torch.equal(getattr(rig.state, name), value)
    for call in rig.phases():
        call()
    for name, value in whole.items():
        assert torch.equal(getattr(rig.state, name)[:3], value), name
    grown = rig.state.length[:3] - rig.saved["length"][:3]
    allowed = {1} if spec is None else {2, 3}
    assert set(grown.tolist()) <= allowed


def test_every_round_starts_from_the_same_state(target):
    rig = rig_of(target, "shape:peagle-2", acceptance=2.5)
    watch = Stopwatch(rig.phases(), target.device, restore=rig.restore)
    ends = []
    for _ in range(3):
        times = watch.round()
        assert len(times) == len(PHASES)
        assert all(ms >= 0 for ms in times)
        ends.append(rig.state.length.tolist())
    assert ends[0] == ends[1] == ends[2]


def test_the_loop_commits_what_was_forced(target):
    source = open_drafter("shape:eagle3", target)
    loop = StepLoop(target, source.make(3, None), batch=2, context=30, num_steps=12, acceptance=3.0)
    sample = loop.run()
    assert sample.tokens_per_step == 3.0
    assert sample.step_ms > 0
    assert loop.run().tokens_per_step == 3.0
    assert loop.llm.load().running == 0


def test_the_loop_says_what_the_device_did(target):
    loop = StepLoop(target, None, batch=2, context=30, num_steps=6, acceptance=None)
    sample = loop.run()
    # Six steps and five gaps, and the host's own work, lie between the waits.
    assert sample.replay_ms > 0
    assert sample.gap_ms > 0
    assert 0 < sample.idle_share < 1
    assert sample.num_late == 0


def test_waits():
    def step(begin, end, *, late=False):
        return Lap("step_seconds", begin, end, late)

    assert waits([step(0, 10, late=True), step(11, 21), step(23, 33)]) == (10, 1.5, 0)
    # The first begins late always; what another late one takes longer than the usual is a wait too.
    assert waits([step(0, 30, late=True), step(31, 41), step(42, 56, late=True)]) == (10, 3.0, 1)
    assert waits([step(0, 10), step(12, 18, late=True)]) == (8, 2.0, 1)
    assert waits([step(0, 10)]) == (10, 0.0, 0)


def test_laps_are_remembered_only_while_they_are_asked_for(monkeypatch):
    now = iter([1.0, 1.25, 2.0, 2.5, 3.0, 4.0])
    monkeypatch.setattr("eyas.engine.stats.time.perf_counter", lambda: next(now))
    stats = EngineStats()
    clock = PhaseClock(stats, torch.device("cpu"))
    clock.start()
    clock.lap("verify_seconds")
    assert clock.laps() == []
    clock.keep()
    clock.start()
    clock.lap("verify_seconds")
    assert clock.laps() == [Lap("verify_seconds", 0.0, 500.0, late=False)]
    clock.start()
    clock.lap("draft_seconds")
    assert clock.laps() == []
    assert (stats.verify_seconds, stats.draft_seconds) == (0.75, 1.0)


def test_with_and_without_invariance_in_turn():
    document = run_tiny("shape:peagle-2", batch_sizes=(2,), both=True)
    rows = document["results"]
    assert [(row["drafter"], row["invariant"]) for row in rows] == [
        (None, True),
        (None, False),
        ("shape:peagle-2", True),
        ("shape:peagle-2", False),
    ]
    assert [row["invariance_cost"] is None for row in rows] == [False, True, False, True]
    for one, other in (rows[:2], rows[2:]):
        cost = one["step"]["device_ms"] / other["step"]["device_ms"] - 1
        assert one["invariance_cost"]["device"] == pytest.approx(cost)


def test_a_context_that_the_target_does_not_have(target):
    with pytest.raises(ConfigError, match="context=4096"):
        make_rig(target, None, batch=1, context=4096)
    with pytest.raises(ConfigError, match="context=4090"):
        StepLoop(target, None, batch=1, context=4090, num_steps=32, acceptance=None)


def run_tiny(drafter, **changes):
    options = StepOptions(
        **{
            "num_draft_tokens": 3,
            "batch_sizes": (1, 2),
            "context": 24,
            "num_steps": 3,
            "repeats": 2,
            "ceiling_sizes": TINY,
        }
        | changes
    )
    seen = []
    result = bench_step(
        "shape:tiny", [drafter], options, device="cpu", dtype=None, advance=lambda *step: seen.append(step)
    )
    assert seen[-1][0] == seen[-1][1]
    return step_document(result, {"commit": None})


def test_document():
    document = json.loads(json.dumps(run_tiny("shape:peagle-2", acceptance=2.0)))
    assert document["schema"] == SCHEMA
    assert document["setup"]["num_draft_tokens"] == 3
    assert [(row["batch"], row["method"]) for row in document["results"]] == [
        (1, "plain"),
        (1, "draft"),
        (2, "plain"),
        (2, "draft"),
    ]
    for row in document["results"]:
        step = row["step"]
        floors = [phase["floor_ms"] for phase in row["phases"]]
        assert [phase["phase"] for phase in row["phases"]] == list(PHASES)
        assert math.isclose(step["floor_ms"], sum(floors))
        assert math.isclose(step["loop_ratio"], step["loop_ms"] / step["floor_ms"])
        assert math.isclose(step["loop_ratio_sustained"], step["loop_ms"] / step["floor_sustained_ms"])
        assert 0 < step["gap_share"] < 1
        assert step["sustained_ms"] > 0
        assert step["tokens_per_step"] == (1.0 if row["method"] == "plain" else 2.0)
        assert 0 < step["other_share"] < 1
        assert len(row["samples"]["loop_ms"]) == 2
    assert document["ceilings"]["read_bytes_per_second"] > 0
    assert document["ceilings"]["sustained"]["flops_per_second"] > 0


def test_several_drafters_over_one_target_are_recorded_batch_by_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_ceilings, "CPU_SIZES", TINY)
    lines = tmp_path / "new" / "steps.jsonl"
    words = ["--target", "shape:tiny", "--drafter", "shape:peagle-2", "--drafter", "shape:eagle3", "-k", "2"]
    words += [
        "--batch",
        "2,1",
        "--context",
        "16",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--json",
    ]
    words += ["--pdl", "late", "--record", str(lines)]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "step", *words])
    document = json.loads(capsys.readouterr().out)
    parts = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [part["setup"] for part in parts] == [document["setup"]] * 2
    assert document["setup"]["drafters"] == ["shape:peagle-2", "shape:eagle3"]
    assert document["setup"]["pdl"] == "late"
    assert [row for part in parts for row in part["results"]] == document["results"]
    drafters = [None, "shape:peagle-2", "shape:eagle3"]
    assert [[row["drafter"] for row in part["results"]] for part in parts] == [drafters] * 2
    assert [{row["batch"] for row in part["results"]} for part in parts] == [{2}, {1}]
    # A round of drafting by a head costs a floor of its own.
    floors = [row["step"]["floor_ms"] for row in document["results"]]
    assert len(set(floors)) == 6


@pytest.mark.slow
def test_jobs_that_compile_first_run_and_say_what_failed():
    options = StepOptions(num_draft_tokens=2, batch_sizes=(1, 2), context=24, num_steps=2, repeats=1)
    jobs = jobs_of("shape:tiny", ["shape:eagle3"], options, "cpu", None)
    assert [(job.drafter, job.batch) for job in jobs] == [
        ("shape:eagle3", 2),
        ("", 2),
        ("shape:eagle3", 1),
        ("", 1),
    ]
    warmed = warm([*jobs[:2], replace(jobs[1], drafter="shape:nope")], 1)
    assert warmed["processes"] == 1
    assert warmed["seconds"] > 0
    (failed,) = warmed["failed"]
    assert "shape:nope batch 2" in failed


def test_a_job_has_few_layers_and_all_else_of_the_shape(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "eyas.bench.step_warm.Method",
        lambda target, *_: seen.append(target.config) or SimpleNamespace(round=lambda **_: None),
    )
    monkeypatch.setitem(shapes.SHAPES, "deep", replace(shapes.SHAPES["tiny"], num_layers=9))
    options = StepOptions(context=24)
    run(Job("shape:deep", "shape:eagle3", 1, options, "cpu", None))
    assert seen == [shapes.SHAPES["tiny"]]


def test_without_a_drafter_only_plain_decoding_is_timed():
    document = run_tiny("none", batch_sizes=(1,))
    assert [row["method"] for row in document["results"]] == ["plain"]
    assert document["setup"]["drafter"] is None


def test_drafters_without_a_head():
    document = run_tiny("prompt_lookup", batch_sizes=(1,))
    draft = document["results"][1]["phases"][PHASES.index("draft")]
    assert (draft["floor_ms"], draft["ratio"]) == (0.0, None)


def test_busy_is_the_union():
    assert busy([]) == 0
    assert busy([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4


def test_profiles_are_summed_by_kernel():
    found = summarize([("a", 0, 1000), ("b", 500, 4000), ("a", 5000, 6000)])
    assert (found.launches, found.busy_ms, found.span_ms) == (3, 5.0, 6.0)
    assert [(k.name, k.count, k.ms) for k in found.kernels] == [("b", 1, 3.5), ("a", 2, 2.0)]
    assert summarize([]).span_ms == 0


def test_command(capsys, monkeypatch):
    monkeypatch.setattr(step_ceilings, "CPU_SIZES", TINY)
    words = [
        "--target",
        "shape:tiny",
        "--drafter",
        "shape:eagle3",
        "-k",
        "2",
        "--batch",
        "1",
        "--context",
        "16",
    ]
    words += ["--steps", "2", "--repeats", "1", "--device", "cpu", "--acceptance", "1.5", "--both"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "step", *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["provenance"]["versions"]["torch"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "step", *words])
    out = capsys.readouterr().out
    assert "verify" in out
    assert "invariance, batch 1, shape:eagle3" in out
    assert "1.5 tokens a step forced" in out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--target", "shape:gpt-9"], "shape:tiny"),
        (["--target", "shape:tiny", "--drafter", "shape:medusa"], "shape:eagle3"),
        (["--target", "shape:tiny", "--batch", "1,0"], "--batch"),
        (
            ["--target", "shape:tiny", "--drafter", "shape:eagle3", "-k", "2", "--acceptance", "9"],
            "acceptance",
        ),
        (["--target", "shape:tiny", "--drafter", "shape:eagle3", "--tree", "9"], "DEPTH"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, words, match):
    monkeypatch.setattr(step_ceilings, "CPU_SIZES", TINY)
    with pytest.raises(SystemExit) as leave:
        main(["bench", "step", "--device", "cpu", *words])
    assert leave.value.code == 2
    assert match in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [None, TreeBudget(3, 2, 6)])
@pytest.mark.parametrize("spec", ["shape:eagle3", "shape:peagle-4"])
def test_captured_phases_leave_the_state_of_an_eager_step(spec, tree):
    target = open_target("shape:smollm2-135m", device="cuda", dtype=None)
    rig = rig_of(target, spec, tree, acceptance=2.5)
    rig.restore()
    rig.step()
    eager = {name: getattr(rig.state, name)[:3].clone() for name in rig.saved}
    for calls in (rig.phases(), [rig.step]):
        watch = Stopwatch(calls, target.device, restore=rig.restore)
        for _ in range(2):
            assert all(ms > 0 for ms in watch.round())
            for name, value in eager.items():
                assert torch.equal(getattr(rig.state, name)[:3], value), name


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["shape:eagle3", "shape:peagle-4"])
def test_on_a_gpu(drafter):
    options = StepOptions(batch_sizes=(1, 8), context=256, acceptance=3.7, num_steps=8, repeats=2)
    result = bench_step("shape:smollm2-135m", [drafter], options, device="cuda", dtype=None)
    for row in step_document(result, {})["results"]:
        step = row["step"]
        assert step["launches"] > 0
        assert step["device_ratio"] > 0.5
        # How large they are is up to whatever else runs on the machine.
        assert 0 < step["gap_share"] < 1.0
        assert step["sustained_ms"] > 0.0
        # Forced acceptance is drawn: 8 steps of 1 or 8 requests around 3.7.
        assert row["method"] == "plain" or 3.0 <= step["tokens_per_step"] <= 4.0
        assert 0 < step["busy_share_profiled"] <= 1.0


def test_what_is_wrong_is_said_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("eyas.bench.step.measure_ceilings", lambda *_: pytest.fail("measured"))
    for drafter, acceptance in (("shape:nope", None), ("none", math.nan)):
        with pytest.raises(ConfigError, match=r"shape:nope|acceptance=nan"):
            bench_step("shape:tiny", [drafter], StepOptions(acceptance=acceptance), device="cpu", dtype=None)


def test_a_batch_that_no_memory_holds_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("eyas.bench.step.measure_ceilings", lambda *_: (None, None, []))
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "step", "--target", "shape:tiny", "--device", "cpu", "--batch", "999999999999"])
    assert "not enough memory" in capsys.readouterr().err
