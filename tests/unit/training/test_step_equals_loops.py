"""The whole step against loops over raw documents: whose guess, whose teacher, what weight, what divisor."""

from dataclasses import replace

import pytest
import torch
from slot_helpers import naive_eagle3, naive_peagle
from test_trainer import recipe

from eyas.data.loader import Batch
from eyas.data.store import StoreWriter, TokenStore
from eyas.nn.packed import PackedContext
from eyas.training.config import LossSection
from eyas.training.trainer import Trainer
from tiny import tiny_target

SEQ_LEN = 24
NAIVE = {"eagle3": naive_eagle3, "peagle": naive_peagle}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Documents of two turns, some longer than a row, some too short to have a rollout."""
    folder = tmp_path_factory.mktemp("store")
    generator = torch.Generator().manual_seed(4)
    writer = StoreWriter(folder, vocab_size=64, meta={})
    for number, length in enumerate([9, 31, 5, 14, 50, 7, 22, 3, 11] * 3):
        ids = torch.randint(4, 60, (length,), generator=generator).tolist()
        spans = [(2, length)] if length < 10 else [(3, 5), (length // 2, length - 1)]
        writer.add(f"doc-{number}", ids, spans)
    writer.close()
    return tiny_target(), TokenStore.load(folder)


def pieces(batch):
    """(row, first column, ids, supervised) of every document's piece."""
    for row in range(batch.ids.shape[0]):
        segments = batch.segments[row].tolist()
        for first in sorted({segments.index(s) for s in segments if s >= 0}):
            length = segments.count(segments[first])
            place = slice(first, first + length)
            yield row, first, batch.ids[row, place].long(), batch.supervised[row, place].tolist()


def loop_loss(trainer, batch, kept, kind, oov):
    """Sum of weight * soft cross-entropy over kept slots, over its divisor; hits and counts by depth."""
    target, model, objective = trainer.target, trainer.model, trainer.objective
    ids_known = trainer.vocab_map.target_ids.tolist()
    total, firsts, all_slots = 0.0, 0, 0
    hits, counts = [0] * objective.num_depths, [0] * objective.num_depths
    for row, first, ids, supervised in pieces(batch):
        context = PackedContext.of(torch.zeros(1, len(ids), dtype=torch.int32))
        hidden, features = target.decoder(
            ids[None], torch.arange(len(ids))[None], context, capture=model.config.aux_layers
        )
        says = target.decoder.logits(hidden)[0]
        alone = Batch(ids[None], torch.zeros(1, len(ids)), torch.arange(len(ids))[None], torch.ones(1))
        for anchor in range(len(ids)):
            for depth in range(objective.num_depths):
                guessed = anchor + depth + 2
                if (row, first + anchor, depth) not in kept or guessed >= len(ids):
                    continue
                if not supervised[guessed]:
                    continue
                all_slots, firsts = all_slots + 1, firsts + (depth == 0)
                counts[depth] += 1
                teacher = says[guessed - 1]
                best = int(teacher.argmax())
                if oov == "mask" and best not in ids_known:
                    continue
                normed = NAIVE[kind](model, alone, features, 0, 0, anchor, depth)
                if depth and model.config.markov_rank:
                    normed = hear(model, normed, int(ids[guessed - 1]))
                logits = model.logits(normed)
                p = torch.softmax(teacher[ids_known], -1)
                weight = 0.8**depth if kind == "eagle3" else 1.0
                total = total - weight * (p * torch.log_softmax(logits, -1)).sum()
                hits[depth] += ids_known[int(logits.argmax())] == best
    return total / (firsts if kind == "eagle3" else all_slots), hits, counts


def hear(model, normed, before):
    """The hidden form of the correction, of one slot after the data's token `before`."""
    weights = dict(model.markov.named_parameters())
    inner = weights["hidden.weight"] @ normed + weights["hidden.bias"]
    inner = inner + weights["token.weight"] @ model.embed_weight[before]
    return normed + weights["up.weight"] @ (inner * torch.sigmoid(inner))


@pytest.mark.parametrize("oov", ["mask", "keep"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "hidden"])
def test_loss_hits_and_gradients_equal_the_loop(kind, oov, world, tmp_path):
    target, store = world
    rank, kind = (5, "peagle") if kind == "hidden" else (0, kind)
    config = recipe(tmp_path, kind, batch_rows=2)
    if rank:
        config = replace(config, head=replace(config.head, markov_rank=rank, markov_form="hidden"))
    config = replace(
        config,
        data=replace(config.data, seq_len=SEQ_LEN),
        head=replace(config.head, draft_vocab_size=40),
        loss=LossSection(chunk=64, oov=oov),
    )
    trainer = Trainer(config, target, store)
    if rank:
        torch.nn.init.normal_(trainer.model.markov.up.weight, std=0.2)
    (prepared,) = trainer.prepare()
    batch, slots = prepared.batch, prepared.slots
    depths = slots.depths.expand_as(slots.anchors)
    kept = {
        (row, int(slots.anchors[row, i]), int(depths[row, i]))
        for row in range(batch.ids.shape[0])
        for i in (slots.segments[row] >= 0).nonzero().flatten().tolist()
    }
    result = trainer.step.run(prepared, trainer.step.normaliser(prepared))
    mine = {name: p.grad for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad(set_to_none=True)
    loss, hits, counts = loop_loss(trainer, batch, kept, kind, oov)
    assert min(counts) > 0
    torch.testing.assert_close(result.loss, loss.detach().to(result.loss.dtype), rtol=1e-5, atol=1e-6)
    assert result.hits.tolist() == hits
    assert result.counts.tolist() == counts
    loss.backward()
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-3, atol=2e-6, msg=name)
