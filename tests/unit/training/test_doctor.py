"""The checks before a run, each shown the fault that it is there for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from slot_helpers import make_batch
from test_trainer import greedy_store, recipe

from eyas.data.store import StoreWriter, TokenStore
from eyas.training import doctor
from eyas.training.capture import capture
from eyas.training.predict import memory_parts, predict, saved_bytes
from eyas.training.trainer import Trainer
from tiny import tiny_target


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    target = tiny_target()
    store = greedy_store(tmp_path_factory.mktemp("store"), target)
    return Trainer(recipe(tmp_path_factory.mktemp("out"), "peagle", batch_rows=2), target, store)


def test_a_sound_run_passes(trainer):
    findings = {finding.name: finding for finding in doctor.examine(trainer)}
    assert {finding.status for finding in findings.values()} == {"ok"}, findings
    assert findings["loss mask"].text.startswith("80.0 % of 960 tokens")
    assert "100.0 % of" in findings["teacher"].text
    assert "100.0 % of the supervised" in findings["answers"].text  # the target wrote them greedily


@pytest.mark.parametrize(
    ("spans", "status", "words"),
    [
        ([[(4, 8)]] * 4, "ok", "50.0 % of 32 tokens are supervised"),
        ([[(0, 8)]] * 4, "fail", "every token in 4 of 4 documents (the first is 0)"),
        ([[(4, 8)], [], [], [(2, 8)]], "fail", "no token in 2 of 4 documents (the first is 1)"),
        (
            [[(1, 8)], [(1, 8)], [(0, 3), (3, 8)], [(1, 8)]],
            "fail",
            "every token in 1 of 4 documents (the first is 2)",
        ),
    ],
)
def test_masks_of_zeros_and_ones_are_seen(spans, status, words, tmp_path):
    """The writer refuses such documents, so they are put into a store that it wrote."""
    writer = StoreWriter(tmp_path, vocab_size=64, meta={})
    for number in range(4):
        writer.add(f"doc-{number}", list(range(5, 13)), [(4, 8)])
    writer.close()
    flat = np.array([span for document in spans for span in document], dtype=np.int32).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(document) for document in spans)])
    store = replace(TokenStore.load(tmp_path), spans=flat, span_offsets=offsets)
    finding = doctor.masks(store)
    assert finding.status == status
    assert words in finding.text


def broken(captured, what):
    """A capture with one fault."""
    if what == "shifted":
        return captured._replace(features=captured.features.roll(1, dims=1))
    if what == "layers":
        return captured._replace(features=captured.features.roll(32, dims=-1))
    if what == "norm":
        return captured._replace(hidden=-captured.hidden)
    return captured._replace(choices=captured.choices.roll(1, dims=1))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("shifted", "captured states"),
        ("layers", "captured states"),
        ("norm", "teacher"),
        ("choices", "teacher"),
    ],
)
def test_a_capture_that_differs_from_the_plain_forward_fails(what, name, trainer, monkeypatch):
    monkeypatch.setattr(doctor, "capture", lambda *args: broken(capture(*args), what))
    failed = [finding.name for finding in doctor.examine(trainer) if finding.status == "fail"]
    assert failed == [name]


def test_foreign_answers_and_a_small_vocabulary_are_warned_of(trainer, tmp_path):
    batch = make_batch([[20], [20]], 20)
    assert doctor.own_words(trainer, batch).status == "warn"
    config = replace(trainer.config, head=replace(trainer.config.head, draft_vocab_size=8))
    small = Trainer(config, trainer.target, trainer.store)
    finding = doctor.vocabulary(small)
    assert finding.status == "warn"
    assert "raise head.draft_vocab_size" in finding.text


def test_documents_are_found_by_their_segments():
    batch = make_batch([[3, 4], [5]], 8)
    assert doctor.documents(batch) == [(0, 0, 3), (0, 3, 7), (1, 0, 5)]


def test_memory_and_time_grow_as_the_recipe_says(trainer):
    run = replace(trainer.config.run, batch_rows=6, max_steps=100)
    prediction = predict(trainer, run, steps=1)
    assert prediction.steps == 100
    assert prediction.hours == pytest.approx(prediction.seconds_per_step * 100 / 3600)
    one, two = (memory_parts(trainer, rows=rows) for rows in (1, 2))
    assert two["activations"] == 2 * one["activations"] > 0
    assert two["features"] == 2 * one["features"] == 2 * 48 * (3 * 32 + 32) * 4
    trained = sum(p.numel() for p in trainer.parameters)
    assert one["head, gradients, moments"] == 16 * trained


def test_saved_bytes_are_what_autograd_holds(trainer):
    """Against hooks that add up every saved tensor, weights and double counts included: less, but not
    little."""
    total = 0

    def add(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    item = trainer.prepare()[0].part(0, 1, 0)
    features = torch.zeros(1, 48, trainer.model.config.feature_size)
    with torch.autograd.graph.saved_tensors_hooks(add, lambda tensor: tensor):
        trainer.objective.forward(trainer.model, item.rows, features, item.slots).sum()
    assert 0.2 * total < saved_bytes(trainer) < total
