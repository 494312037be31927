"""Curves: what a tracker is told, which are opened, and what the log file keeps; real decoding beside
validation."""

import json
import sys
import types
from dataclasses import replace

import pytest
from test_trainer import greedy_store, recipe

from eyas.core.errors import ConfigError
from eyas.training.display import Log
from eyas.training.trackers import flat
from eyas.training.trainer import Trainer
from tiny import tiny_target


def fake(name, calls):
    module = types.ModuleType(name)
    names = ["init", "log", "finish", "set_experiment", "start_run", "log_params", "log_metrics", "end_run"]
    for call in names:
        setattr(module, call, lambda *a, call=call, **k: calls.append((name, call, a, k)))
    return module


def test_a_record_is_made_flat():
    record = {
        "kind": "train",
        "step": 4,
        "loss": 1.5,
        "acc": [0.5, 1],
        "ms": {"data": 2},
        "note": "x",
        "ok": True,
    }
    assert flat(record) == {"train/loss": 1.5, "train/acc/0": 0.5, "train/acc/1": 1.0, "train/ms/data": 2.0}


def test_trackers_get_every_record_and_the_recipe(tmp_path, monkeypatch):
    calls = []
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, fake(name, calls))
    config = recipe(tmp_path / "head", "eagle3")
    config = replace(config, run=replace(config.run, trackers=("wandb", "trackio", "mlflow")))
    log = Log(tmp_path / "head", config, after_step=0)
    log.write({"kind": "train", "step": 7, "loss": 2.0})
    log.close()
    made = {(name, call): (args, kwargs) for name, call, args, kwargs in calls}
    assert made["wandb", "init"][1]["id"] == "head"
    assert "id" not in made["trackio", "init"][1]
    assert made["trackio", "init"][1]["config"]["optim"]["lr"] == 0.01
    for name in ("wandb", "trackio"):
        assert made[name, "log"] == (({"train/loss": 2.0},), {"step": 7})
    assert made["mlflow", "log_metrics"] == (({"train/loss": 2.0},), {"step": 7})
    assert made["mlflow", "log_params"][0][0]["recipe/optim/lr"] == 0.01
    assert {call for name, call in made if name == "mlflow"} >= {"set_experiment", "start_run", "end_run"}


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = recipe(tmp_path, "eagle3")
    config = replace(config, run=replace(config.run, trackers=("trackio",)))
    with pytest.raises(ConfigError, match=r"run.trackers: trackio is not installed"):
        Log(tmp_path, config, after_step=0)


def test_a_run_decodes_at_every_second_validation_and_tells_its_times(tmp_path):
    target = tiny_target()
    store = greedy_store(tmp_path / "store", target)
    config = recipe(tmp_path / "head", "peagle", max_steps=4, validate_every=1, log_every=2)
    config = replace(config, decoding=replace(config.decoding, every=2))
    folders = []

    def evaluate(folder):
        assert (folder / "model.safetensors").exists()
        folders.append(folder.name)
        return {"chat": {"acceptance_length": 1.0 + len(folders)}}

    Trainer(config, target, store, evaluate=evaluate).train()
    records = [json.loads(line) for line in (tmp_path / "head/training_log.jsonl").read_text().splitlines()]
    decoded = [record.get("decoded") for record in records if record["kind"] == "validation"]
    assert decoded == [None, {"chat": {"acceptance_length": 2.0}}, None, {"chat": {"acceptance_length": 3.0}}]
    assert folders == [".decoding", ".decoding", "head"]
    assert not (tmp_path / "head/.decoding").exists()
    for record in records:
        if record["kind"] == "train":
            assert set(record["ms"]) == {"data", "forward", "backward", "optimizer"}
            assert all(passed > 0 for passed in record["ms"].values())
            assert 0 < record["utilisation"] < 2
            assert record["grad_norm"] > 0
