"""One run on one process and on two (gloo, CPU): the same loss curve, the same head, the same after a
kill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_child import configure
from safetensors.torch import load_file
from test_trainer import greedy_store, losses

from eyas.core.errors import ConfigError
from eyas.kernels.settings import settings
from eyas.training.capture import capture
from eyas.training.parallel import Share, World, shares
from eyas.training.trainer import Trainer
from tiny import tiny_target

HERE = Path(__file__).parent
KINDS = {"eagle3": {"accumulation": 1}, "peagle": {"accumulation": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder of a store, and the store."""
    folder = tmp_path_factory.mktemp("store")
    return folder, greedy_store(folder, tiny_target())


def torchrun(processes, store, *jobs, device="cpu"):
    """Exit status and messages of parallel_child.train for each of `jobs` in turn, on so many processes."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    # Without an address it asks for that of the machine's name, which nobody may know.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command.append(f"--nproc-per-node={processes}")
    command += [str(HERE / "parallel_child.py"), device, str(store), json.dumps(jobs, default=str)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def on_two(data, tmp_path_factory):
    """Folder of runs on two processes: each kind, a correction on top, then "cut", killed at step 4."""
    out = tmp_path_factory.mktemp("on-two")
    jobs = [{"out": out / kind, "kind": kind} | run for kind, run in KINDS.items()]
    jobs.append({"out": out / "markov", "kind": "peagle", "base": out / "peagle", "accumulation": 2})
    status, text = torchrun(2, data[0], *jobs, {"out": out / "cut", "kind": "peagle", "stop_at": 4})
    assert status != 0
    assert "SIGKILL" in text, text[-3000:]
    return out


def test_a_step_is_shared_out_whole():
    assert shares(1, 2, accumulation=4, batch_rows=3) == [Share(1, 0, 3), Share(3, 0, 3)]
    assert shares(1, 2, accumulation=1, batch_rows=8) == [Share(0, 4, 8)]
    for size in (1, 2, 4):
        parts = [share for rank in range(size) for share in shares(rank, size, accumulation=4, batch_rows=4)]
        rows = sorted((s.micro, row) for s in parts for row in range(s.begin, s.end))
        assert rows == [(micro, row) for micro in range(4) for row in range(4)]
    with pytest.raises(ConfigError, match=r"batch_rows=3 and run.accumulation=1: one of them .* 2 processes"):
        shares(0, 2, accumulation=1, batch_rows=3)


def test_alone_everything_is_a_plain_call():
    world, calls = World(), []
    world.backward(lambda: calls.append(1), [])
    weight = torch.nn.Parameter(torch.randn(3))
    assert calls == [1]
    assert world.is_main
    assert world.agree(0.5) == 0.5
    assert torch.equal(world.whole(weight), weight.detach())
    assert world.local(weight).data_ptr() == weight.data_ptr()
    assert torch.equal(world.cut(torch.ones(3), weight), torch.ones(3))


def test_the_target_runs_without_dependent_launches(data, tmp_path):
    """Layers that are gathered one at a time have weights that the kernel before has just written."""
    target, seen = tiny_target(), []
    trainer = Trainer(configure(tmp_path, "eagle3"), target, data[1])
    target.decoder.layers[0].register_forward_hook(lambda *_: seen.append(settings.pdl))
    (prepared,) = trainer.prepare()
    capture(target.decoder, prepared.batch, (1,))
    assert seen == ["off"]
    assert settings.pdl == "late"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, data, on_two, tmp_path):
    """Rows of a batch, or batches of a step, on two ranks; a mean taken for a sum would show at step 2."""
    Trainer(configure(tmp_path, kind, **KINDS[kind]), tiny_target(), data[1]).train()
    single, double = dict(losses(tmp_path)), dict(losses(on_two / kind))
    assert list(double) == list(range(1, 9))
    assert double == pytest.approx(single, rel=2e-5)
    heads = [load_file(folder / "model.safetensors") for folder in (tmp_path, on_two / kind)]
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, rtol=1e-3, atol=1e-4)
    assert read(tmp_path)["validation"]["reached"] == read(on_two / kind)["validation"]["reached"]
    assert read(on_two / kind)["training"]["processes"] == 2


@pytest.mark.slow
def test_a_correction_alone_is_trained_by_two_processes_as_by_one(data, on_two, tmp_path):
    """A shared model of which most is frozen."""
    config = configure(tmp_path, "peagle", on_two / "peagle", accumulation=2)
    Trainer(config, tiny_target(), data[1]).train()
    single, double = dict(losses(tmp_path)), dict(losses(on_two / "markov"))
    assert double == pytest.approx(single, rel=2e-5)
    heads = [load_file(folder / "model.safetensors") for folder in (tmp_path, on_two / "markov")]
    for name, tensor in heads[0].items():
        if name.startswith("markov."):
            torch.testing.assert_close(heads[1][name], tensor, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(heads[1][name], tensor), name


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_two_gpus_equal_one_cpu(kind, data, tmp_path):
    """NCCL in place of gloo; float32, whose products differ a little between devices."""
    folder, store = data
    Trainer(configure(tmp_path / "one", kind), tiny_target(), store).train()
    status, text = torchrun(2, folder, {"out": tmp_path / "two", "kind": kind}, device="cuda")
    assert status == 0, text[-3000:]
    single, double = dict(losses(tmp_path / "one")), dict(losses(tmp_path / "two"))
    assert double == pytest.approx(single, rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_number_of_processes(data, on_two, tmp_path):
    """Two processes, killed; then one, stopped; then two again: the loss curve of an undisturbed run."""
    folder, store = data
    whole = configure(tmp_path / "whole", "peagle")
    Trainer(whole, tiny_target(), store).train()
    cut = on_two / "cut"
    assert not (cut / "eyas.json").exists()
    alone = Trainer(configure(cut, "peagle"), tiny_target(), store)
    run_step = alone.step.run

    def run_or_stop(*args, **kwargs):
        if alone.state.step == 6:
            raise KeyboardInterrupt
        return run_step(*args, **kwargs)

    alone.step.run = run_or_stop
    with pytest.raises(KeyboardInterrupt):
        alone.train()
    status, text = torchrun(2, folder, {"out": cut, "kind": "peagle"})
    assert status == 0, text[-3000:]
    assert dict(losses(cut)) == pytest.approx(dict(losses(tmp_path / "whole")), rel=2e-5)


def read(out):
    return json.loads((out / "eyas.json").read_text())
