"""The trainer's step part by part: loss, hits and gradients of one piece, whatever the loss is."""

from dataclasses import replace

import pytest
import torch
from test_trainer import greedy_store, recipe

from eyas.training.capture import capture
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


@pytest.mark.parametrize(
    "case", ["plain", "oov kept", "reach", "reach by hits", "tables", "hidden", "depths"]
)
def test_parts_equal_one_piece(case, world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "peagle")
    loss = LossSection(chunk=64)
    if case == "oov kept":
        loss = replace(loss, oov="keep", kind="kl")
    if case.startswith("reach"):
        loss = replace(loss, reach=0.7, reach_by="hit" if case.endswith("hits") else "overlap")
    head = replace(config.head, num_layers=2)
    if case in ("tables", "hidden"):
        head = replace(head, markov_rank=4, markov_form=case)
    if case == "depths":
        head = replace(head, depth_encoding="learned")
    trainer = Trainer(replace(config, loss=loss, head=head), target, store)
    if trainer.model.depth_encoding is not None:
        torch.nn.init.normal_(trainer.model.depth_encoding)
    if trainer.model.markov is not None:
        for parameter in trainer.model.markov.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    expected, gradients = one_step(trainer, staircase=False, partition=Partition())
    assert float(expected.counts.sum()) > 50
    partitions = [Partition(), Partition(3, "shared")]
    if not case.startswith("reach"):
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
    assert size - bound <= max(64, largest // 16) * (size // chunk) or size == chunk


def test_batches_of_a_run_need_few_sizes_of_chunks():
    """Each is compiled for itself, and torch.compile takes eight: slots of 16 and 32 rows of 512."""
    for bounds in (range(16 * 250, 16 * 450, 7), range(14_000, 26_000, 7), range(28_000, 52_000, 13)):
        assert len({chunk_sizes(bound, 4096)[0] for bound in bounds}) <= 8


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


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_by_hits_a_rollout_ends_where_the_text_was_sampled_otherwise(kind, world, tmp_path):
    """Tokens of the text replaced at random: the teacher's choice is another, and decoding never goes on."""
    target, store = world
    config = recipe(tmp_path, kind)
    loss = LossSection(chunk=64, reach=1.0, reach_by="hit", oov="keep")
    step = (trainer := Trainer(replace(config, loss=loss), target, store)).step
    batch = trainer.loader.next()
    noise = torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    batch = replace(batch, ids=torch.where(noise, (batch.ids + 1) % 50, batch.ids).int())
    per_row = trainer._supervised_rows(0)
    prepared = step.prepare(batch, [batch.ids.shape[1]] * len(batch.ids), seed=3, max_supervised=max(per_row))
    captured = capture(target.decoder, batch, step.model.config.aux_layers)
    passing = step._reach(prepared, captured).passing.view(*batch.ids.shape, -1)
    slots, ended = prepared.slots, 0
    for row in range(len(batch.ids)):
        for anchor, depth in zip(slots.anchors[row].tolist(), slots.depths.tolist(), strict=True):
            # The slot reads tokens up to anchor + 1 + depth and guesses the next one.
            guessed = anchor + depth + 2
            if guessed >= batch.ids.shape[1]:
                continue
            same = captured.choices[row, guessed - 1] == batch.ids[row, guessed]
            assert passing[row, anchor, depth] == float(same)
            ended += not same
    assert ended > 20
