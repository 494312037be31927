"""The timing command on tiny shapes: every case is a line of JSON, and ways train the same slots."""

import json
import subprocess
import sys

import pytest
import torch

from eyas.training.speed import main
from eyas.training.speed_turn import Turn

TINY = ["--shape", "tiny", "--layers", "2", "--device", "cpu", "--eager", "--steps", "1", "--warmup", "1"]


def records(capsys, *arguments):
    main([*TINY, *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_peagle_in_every_way(capsys):
    found = records(
        capsys,
        "--length",
        "24",
        "--parts",
        "1",
        "2",
        "--mode",
        "shared",
        "prefix",
        "--way",
        "staircase",
        "dense",
    )
    assert [(r["way"], r["num_parts"], r["partition_mode"]) for r in found] == [
        ("staircase", 1, "shared"),
        ("staircase", 2, "shared"),
        ("staircase", 2, "prefix"),
        ("dense", 1, "shared"),
    ]
    assert not [r["error"] for r in found if "error" in r]
    assert len({r["slots"] for r in found}) == 1
    first = [r["first_loss"] for r in found]
    assert max(first) - min(first) < 1e-5
    assert all(r["tokens_per_second"] > 0 and 0 < r["utilisation"] < 1 for r in found)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_eagle3(capsys, weights):
    (found,) = records(capsys, "--objective", "eagle3", "--length", "16", "--weights", weights)
    assert "error" not in found
    assert found["slots"] == 7 * 15


def test_a_case_that_fails_is_a_line_too(capsys):
    found = records(capsys, "--length", "24", "--way", "flex", "staircase")
    assert len(found) == 2
    assert "error" not in found[1]


def test_named_cases_in_turn(capsys, tmp_path):
    lock = tmp_path / "turn"
    found = records(capsys, "--case", "24:2:shared", "40:2:replayed", "--turn", str(lock), "--seconds", "0")
    assert [(r["length"], r["num_parts"], r["partition_mode"]) for r in found] == [
        (24, 2, "shared"),
        (40, 2, "replayed"),
    ]
    assert all(len(r["laps"]) == 1 for r in found)
    assert lock.exists()


def test_a_turn_excludes_others(tmp_path):
    lock = tmp_path / "turn"
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w');\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n"
        "except BlockingIOError: print('held')"
    )

    def state():
        command = [sys.executable, "-c", code, str(lock)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with Turn(lock, torch.device("cpu")).alone():
        assert state() == "held"
    assert state() == "free"
