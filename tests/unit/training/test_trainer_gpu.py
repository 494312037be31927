"""Training on CUDA: compiled and eager agree, and a run learns."""

import json
from dataclasses import replace

import pytest
import torch
from test_trainer import greedy_store, losses, recipe

from eyas.training.trainer import Trainer
from tiny import tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_compiled_bfloat16_training_follows_eager_float32(kind, tmp_path):
    store = greedy_store(tmp_path / "store", tiny_target())
    target = tiny_target()
    target.decoder.to("cuda")
    curves = []
    for number, (compiled, precision) in enumerate(((False, "float32"), (True, "bfloat16"))):
        config = recipe(tmp_path / str(number), kind, max_steps=20, log_every=1, validate_every=10)
        run = replace(config.run, compile=compiled, precision=precision)
        Trainer(replace(config, run=run), target, store).train()
        torch._dynamo.reset()
        curves.append(torch.tensor([loss for _, loss in losses(tmp_path / str(number))]))
        meta = json.loads((tmp_path / str(number) / "eyas.json").read_text())
        assert meta["validation"]["simulated_al"] > 1.0
    assert curves[1][-1] < curves[1][0]
    torch.testing.assert_close(*curves, rtol=0.05, atol=0.05)
