"""The figure of timed training steps, from records as training/speed.py prints them."""

import json

import matplotlib.pyplot as plt
import pytest

from eyas.bench import plots_training
from eyas.bench.plots_training import draw_training, main
from eyas.core.errors import ConfigError


def record(length, parts=1, mode="shared", way="staircase", objective="peagle", **more):
    base = {"objective": objective, "way": way, "length": length, "weights": "bfloat16"}
    base |= {"num_parts": parts, "partition_mode": mode}
    if "error" in more:
        return base | more
    timed = {"tokens_per_second": 1e4 / parts, "peak_gib": 20.0 + length / 1024 / parts}
    if way == "staircase" and objective == "peagle":
        timed["predicted_gib"] = {"total": 19.0}
    return base | timed | more


RECORDS = [
    record(8192),
    record(65536, error="out of memory"),
    record(8192, way="dense"),
    record(8192, 2),
    record(8192, 4, "replayed"),
    record(65536, 4, "replayed"),
    record(4096, objective="eagle3"),
    {"kernel": "staircase", "ms": 3.0},
]


def lines_of(records, monkeypatch):
    """Panel -> label -> (x, y) of what is drawn, and the number of crosses."""
    seen = {}

    def panels(names, panel):
        for name in names:
            figure, axes = plt.subplots()
            panel(axes, name)
            labels = {
                line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
                for line in axes.get_lines()
                if not line.get_label().startswith("_")
            }
            crosses = sum(line.get_marker() == "x" for line in axes.get_lines())
            seen[name] = labels, crosses
            plt.close(figure)
        return b""

    monkeypatch.setattr(plots_training, "panels", panels)
    draw_training(records)
    return seen


def test_lines_are_by_way_and_parts_and_by_length(monkeypatch):
    seen = lines_of(RECORDS, monkeypatch)
    assert list(seen) == [
        "peagle: tokens/s against n",
        "peagle: peak GiB against n",
        "peagle: tokens/s against S",
        "peagle: peak GiB against S",
        "eagle3: tokens/s against n",
        "eagle3: peak GiB against n",
    ]
    labels, crosses = seen["peagle: peak GiB against n"]
    assert crosses == 1
    assert labels == {
        "staircase, bfloat16": ([8192], [28.0]),
        "dense, bfloat16": ([8192], [28.0]),
        "staircase, S = 2, shared, bfloat16": ([8192], [24.0]),
        "staircase, S = 4, replayed, bfloat16": ([8192, 65536], [22.0, 36.0]),
    }
    labels, _ = seen["peagle: tokens/s against S"]
    assert labels == {
        "n = 8,192, shared, bfloat16": ([1, 2], [10000.0, 5000.0]),
        "n = 8,192, replayed, bfloat16": ([1, 4], [10000.0, 2500.0]),
        "n = 65,536, replayed, bfloat16": ([4], [2500.0]),
    }


def test_the_command_writes_a_picture_and_names_what_is_wrong(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    main([str(path), "--out", str(tmp_path / "out.png")])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    path.write_text("{}\nTraceback\n")
    with pytest.raises(ConfigError, match=r"records\.jsonl:2: not JSON: 'Traceback'"):
        main([str(path), "--out", str(tmp_path / "out.png")])
    path.write_text(json.dumps(record(8192, error="out of memory")))
    with pytest.raises(ConfigError, match="no timed training step"):
        main([str(path), "--out", str(tmp_path / "out.png")])
