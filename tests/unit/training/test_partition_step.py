"""The trainer's step part by part: loss, hits and gradients of one piece, whatever the loss is."""

from dataclasses import replace

import pytest
import torch
from test_trainer import greedy_store, recipe

from eyas.training.config import LossSection
from eyas.training.peagle.partition import Partition
from eyas.training.step import chunk_sizes
from eyas.training.trainer import Trainer
from eyas.training.validate import measure
from tiny import tiny_target


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    target = tiny_target()
    return target, greedy_store(tmp_path_factory.mktemp("store"), target)


def one_step(trainer, *, staircase, partition):
    step = trainer.step
    step.objective.staircase, step.partition = staircase, partition
    trainer.loader.state = type(trainer.loader.state)()
    per_row = trainer._supervised_rows(0)
    prepared = step.prepare(
        trainer.loader.next(), per_row[: trainer.config.run.batch_rows], seed=3, max_supervised=max(per_row)
    )
    result = step.run(prepared, step.normaliser(prepared))
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad(set_to_none=True)
    return result, gradients


@pytest.mark.parametrize("case", ["plain", "oov kept", "reach", "markov"])
def test_parts_equal_one_piece(case, world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "peagle")
    loss = LossSection(chunk=64)
    if case == "oov kept":
        loss = replace(loss, oov="keep", kind="kl")
    if case == "reach":
        loss = replace(loss, reach=0.7)
    head = replace(config.head, num_layers=2, markov_rank=4 if case == "markov" else 0)
    trainer = Trainer(replace(config, loss=loss, head=head), target, store)
    if case == "markov":
        torch.nn.init.normal_(trainer.model.markov.out, std=0.1)
    expected, gradients = one_step(trainer, staircase=False, partition=Partition())
    assert float(expected.counts.sum()) > 50
    partitions = [Partition(), Partition(3, "shared")]
    if case != "reach":
        partitions += [Partition(3, "replayed"), Partition(3, "prefix")]
    for partition in partitions:
        result, mine = one_step(trainer, staircase=True, partition=partition)
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert torch.equal(result.counts, expected.counts)
        assert torch.equal(result.hits, expected.hits)
        for name, gradient in mine.items():
            torch.testing.assert_close(
                gradient, gradients[name], rtol=2e-3, atol=2e-6, msg=f"{partition} {name}"
            )


@pytest.mark.parametrize(
    ("bound", "largest"), [(5000, 4096), (29_826, 4096), (10, 4096), (64, 64), (0, 8), (9, 4)]
)
def test_chunks_are_even_and_hold_all(bound, largest):
    chunk, size = chunk_sizes(bound, largest)
    assert 1 <= chunk <= max(largest, 1)
    assert size % chunk == 0
    assert bound <= size
    assert size - bound <= 64 * (size // chunk) or size == chunk


def test_validation_in_parts_counts_the_same(world, tmp_path):
    target, store = world
    trainer = Trainer(recipe(tmp_path, "peagle"), target, store)
    step, found = trainer.step, []
    for partition in (Partition(), Partition(4)):
        step.objective.staircase, step.partition = True, partition
        count = measure(step, trainer.vocab_map, trainer.validation, batch_rows=2)
        found.append((count.reached, count.right))
    assert found[0] == found[1]
    assert sum(found[0][0]) > 50
