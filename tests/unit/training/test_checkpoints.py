"""Checkpoints under bad luck: a full disk, a kill at any moment, numbers that are none, and which ones are
kept."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import greedy_store, losses, recipe

from eyas.core.errors import ConfigError, DataError, EyasError
from eyas.data.store import TokenStore
from eyas.training import checkpoint
from eyas.training.checkpoint import best_checkpoint, list_checkpoints
from eyas.training.trainer import Trainer
from tiny import tiny_target


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return folder, greedy_store(folder, tiny_target())


def names(out):
    return [place.name for place in list_checkpoints(Path(out) / "checkpoints")]


def test_a_full_disk_stops_the_run_and_loses_no_checkpoint(data, tmp_path):
    """Files may grow to 20 KB only, as if the disk were full; a checkpoint here has some hundred."""
    config = recipe(tmp_path, "eagle3", max_steps=6, checkpoint_every=2, log_every=100)
    trainer = Trainer(config, tiny_target(), data[1])
    run_step, limits = trainer.step.run, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(*args, **kwargs):
        if trainer.state.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        return run_step(*args, **kwargs)

    trainer.step.run = fill_the_disk
    try:
        with pytest.raises(EyasError, match=r"step-00000004: the checkpoint could not .* \(step-00000002\)"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    Trainer(config, tiny_target(), data[1]).train()
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_a_run_that_cannot_keep_its_checkpoints_does_not_begin(data, tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    config = recipe(tmp_path, "eagle3", max_steps=2, checkpoint_every=1)
    with pytest.raises(ConfigError, match=r"need 0.0 GB, 0.0 GB are free; make room, lower run.keep"):
        Trainer(config, tiny_target(), data[1]).train()


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_value_that_is_no_number_never_reaches_a_checkpoint(where, data, tmp_path):
    config = recipe(tmp_path, "eagle3", max_steps=9, checkpoint_every=2, log_every=100)
    trainer = Trainer(config, tiny_target(), data[1])
    run_step = trainer.step.run

    def break_at_four(*args, **kwargs):
        result = run_step(*args, **kwargs)
        if trainer.state.step == 3:
            if where == "loss":
                result.loss += torch.nan
            else:
                trainer.model.fc.weight.grad[0, 0] = torch.inf
        return result

    trainer.step.run = break_at_four
    with pytest.raises(EyasError, match=r"not a number at step 4; lower optim\.lr"):
        trainer.train()
    assert names(tmp_path) == ["step-00000002"]


def test_the_newest_and_the_best_are_kept(data, tmp_path, monkeypatch):
    """Validated 3, 1, 2, 2 at steps 1 to 4: step 1 stays beside the newest one."""
    config = recipe(tmp_path, "eagle3", max_steps=4, checkpoint_every=1, validate_every=1, keep_checkpoints=1)
    trainer = Trainer(replace(config, run=replace(config.run, write="best")), tiny_target(), data[1])
    kept, validate = [], trainer._validate

    def pretend(log):
        validate(log)
        validated = [3.0, 1.0, 2.0, 2.0][trainer.state.step - 1]
        trainer.state = replace(trainer.state, validated=validated)
        kept.append(trainer.model.fc.weight.detach().clone())
        return validated == 3.0

    monkeypatch.setattr(trainer, "_validate", pretend)
    trainer.train()
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    assert best_checkpoint(tmp_path / "checkpoints") == (tmp_path / "checkpoints/step-00000001", 3.0)
    meta = json.loads((tmp_path / "eyas.json").read_text())
    assert meta["training"]["weights_of"] == {"checkpoint": "step-00000001", "simulated_al": 3.0}
    assert torch.equal(trainer.model.fc.weight, kept[0])
    assert not torch.equal(kept[3], kept[0])


def test_a_better_validation_makes_a_checkpoint_of_its_own(data, tmp_path):
    config = recipe(tmp_path, "eagle3", max_steps=5, checkpoint_every=100, validate_every=2)
    Trainer(config, tiny_target(), data[1]).train()
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert best_checkpoint(tmp_path / "checkpoints")[1] > 1.0


def test_a_field_that_a_later_version_adds_does_not_end_a_run(data, tmp_path):
    config = recipe(tmp_path, "eagle3", max_steps=2, checkpoint_every=1)
    Trainer(config, tiny_target(), data[1]).train()
    path = list_checkpoints(tmp_path / "checkpoints")[-1] / "state.json"
    stored = json.loads(path.read_text())
    assert stored["identity"]["loss"].pop("reach") == 0.0
    del stored["state"]["validated"]
    path.write_text(json.dumps(stored))
    longer = replace(config, run=replace(config.run, max_steps=3))
    assert Trainer(longer, tiny_target(), data[1]).train() == tmp_path
    assert names(tmp_path)[-1] == "step-00000003"


def test_starting_anew_over_an_earlier_run_is_refused(data, tmp_path):
    config = recipe(tmp_path, "eagle3", max_steps=2, checkpoint_every=1)
    Trainer(config, tiny_target(), data[1]).train()
    anew = replace(config, run=replace(config.run, resume=False))
    with pytest.raises(ConfigError, match=r"checkpoints of an earlier run, and run.resume is off"):
        Trainer(anew, tiny_target(), data[1]).train()


def test_a_bad_shard_stops_before_training(data, tmp_path):
    shutil.copytree(data[0], tmp_path / "store")
    (shard,) = (tmp_path / "store").glob("shard-*")
    body = bytearray(shard.read_bytes())
    body[-1] ^= 1
    shard.write_bytes(bytes(body))
    with pytest.raises(DataError, match=r"shard-00000.safetensors: the shard is damaged"):
        TokenStore.load(tmp_path / "store")


CHILD = """
import sys, os, pathlib, signal, time
sys.path[:0] = {paths!r}
from test_trainer import recipe
from tiny import tiny_target
from eyas.data.store import TokenStore
from eyas.training.trainer import Trainer
store = TokenStore.load(pathlib.Path({store!r}))
config = recipe({out!r}, "peagle", max_steps=20, log_every=1, checkpoint_every=1)
folder, seen, kills = pathlib.Path({out!r}) / "checkpoints", set(), 0
for attempt in range(9):
    child = os.fork()  # so that what takes long, importing torch, is done once
    if not child:
        Trainer(config, tiny_target(), store).train()
        os._exit(0)
    ended, deadline = 0, time.monotonic() + 120
    # After 1, 2, 3 .. new names, whole or in work, so that kills fall into writing too.
    while attempt < 3 and not ended and time.monotonic() < deadline:
        there = {{path.name for path in folder.iterdir()}} if folder.exists() else set()
        if len(there - seen) > attempt % 3:
            seen |= there
            os.kill(child, signal.SIGKILL)
            kills += 1
            break
        time.sleep(0.001)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        status = os.waitpid(child, 0)[1]
    if status == 0:
        break
print(kills)
"""


@pytest.mark.slow
def test_killed_again_and_again_at_any_moment_the_run_ends_the_same(data, tmp_path):
    """A checkpoint a step; kill -9 soon after a random file appears, half written ones included."""
    here = Path(__file__).parent
    code = CHILD.format(
        paths=[str(here), str(here.parents[1])], store=str(data[0]), out=str(tmp_path / "cut")
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n", "kills"
    config = recipe(tmp_path / "whole", "peagle", max_steps=20, log_every=1)
    Trainer(config, tiny_target(), data[1]).train()
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    assert first.read_bytes() == second.read_bytes()
