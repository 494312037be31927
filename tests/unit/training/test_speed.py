"""The timing command on tiny shapes: every case is a line of JSON, and ways train the same slots."""

import json

import pytest

from eyas.training.speed import main

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
