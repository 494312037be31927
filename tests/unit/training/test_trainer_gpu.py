"""Training on CUDA: compiled and eager agree, and a run learns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_markov_alone import alone
from test_trainer import greedy_store, losses, recipe
from torch.nn.attention import SDPBackend, sdpa_kernel

from eyas.data.store import StoreWriter, TokenStore
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


def _gradients(config, target, store):
    trainer = Trainer(config, target, store)
    per_row = trainer._supervised_rows(0)
    rows = config.run.batch_rows
    prepared = trainer.step.prepare(
        trainer.loader.next(), per_row[:rows], seed=5, max_supervised=-(-max(per_row) // 32) * 32
    )
    trainer.step.run(prepared, trainer.step.normaliser(prepared))
    return {name: p.grad.float().flatten() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("kind", "attention", "parts"),
    [
        ("eagle3", "masks", {}),
        ("eagle3", "staircase", {}),
        ("peagle", "masks", {}),
        ("peagle", "staircase", {}),
        ("peagle", "staircase", {"partitions": 3, "partition_mode": "shared"}),
        ("peagle", "staircase", {"partitions": 3, "partition_mode": "replayed"}),
        ("depths", "staircase", {"partitions": 3, "partition_mode": "shared"}),
    ],
)
def test_bfloat16_gradients_at_a_real_shape(kind, attention, parts, compiled, tmp_path):
    """Shapes at which CUDA takes other attention kernels than tiny ones do: head size 64, rows of 512."""
    target = tiny_target(
        std=0.04, vocab_size=4096, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
        head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    target.decoder.to("cuda", torch.bfloat16)
    rng = np.random.default_rng(0)
    writer = StoreWriter(tmp_path / "store", vocab_size=4096, meta={})
    for number in range(400):
        prompt, answer = int(rng.integers(20, 100)), int(rng.integers(20, 255))
        ids = (rng.zipf(1.2, prompt + answer) % 4000).tolist()
        writer.add(f"d{number}", ids, [(prompt, prompt + answer)])
    writer.close()
    store = TokenStore.load(tmp_path / "store")
    encoding, kind = ("learned", "peagle") if kind == "depths" else ("none", kind)
    config = recipe(tmp_path, kind, max_steps=1)
    config = replace(config, data=replace(config.data, seq_len=512), run=replace(config.run, batch_rows=16))
    # The whole vocabulary, else a random teacher's argmax is outside it and nothing is supervised.
    head = replace(config.head, draft_vocab_size=None, num_layers=None, depth_encoding=encoding)
    config = replace(config, head=head)
    with sdpa_kernel(SDPBackend.MATH):
        exact = replace(config.run, precision="float32", attention="masks")
        reference = _gradients(replace(config, run=exact), target, store)
    torch._dynamo.reset()
    run = replace(config.run, precision="bfloat16", compile=compiled, attention=attention)
    config = replace(config, run=run, objective=replace(config.objective, **parts))
    wrong = {}
    for name, gradient in _gradients(config, target, store).items():
        expected = reference[name]
        # By hand: the library's cosine calls vectors shorter than 1e-4 orthogonal.
        cosine = float(gradient @ expected / (gradient.norm() * expected.norm()))
        ratio = float(gradient.norm() / expected.norm())
        if not (cosine > 0.98 and 0.9 < ratio < 1.1):
            wrong[name] = (cosine, ratio)
    assert not wrong


@pytest.mark.parametrize("form", ["tables", "hidden"])
def test_a_correction_trained_alone_follows_the_cpu_and_leaves_its_base(form, tmp_path):
    """Compiled, in bfloat16, by ranges; packed on CUDA, whose division is not the CPU's."""
    store = greedy_store(tmp_path / "store", tiny_target())
    Trainer(recipe(tmp_path / "base", "peagle", max_steps=12, packed=True), tiny_target(), store).train()
    curves = []
    for device, run in (("cpu", {}), ("cuda", {"compile": True, "precision": "bfloat16"})):
        target = tiny_target()
        target.decoder.to(device)
        config = alone(tmp_path / device, tmp_path / "base", form, max_steps=20, log_every=1, **run)
        Trainer(replace(config, loss=replace(config.loss, reach=0.0)), target, store).train()
        curves.append(torch.tensor([loss for _, loss in losses(tmp_path / device)]))
    torch._dynamo.reset()
    torch.testing.assert_close(*curves, rtol=0.05, atol=0.05)
    read, written = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "cuda"))
    assert all(torch.equal(written[name], tensor) for name, tensor in read.items())
