"""head.train=markov: a correction learns on top of a finished head whose own weights stay bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import greedy_store, losses, recipe

from eyas.core.errors import ConfigError
from eyas.training.config import HeadSection, LossSection
from eyas.training.peagle.partition import Partition
from eyas.training.trainer import Trainer
from eyas.training.validate import measure
from tiny import tiny_target

FORMS = pytest.mark.parametrize("form", ["tables", "hidden"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a store, and folders of a packed P-EAGLE head and an EAGLE-3 head."""
    target = tiny_target()
    store = greedy_store(tmp_path_factory.mktemp("store"), target)
    heads = {}
    for kind in ("eagle3", "peagle"):
        heads[kind] = tmp_path_factory.mktemp(kind)
        Trainer(recipe(heads[kind], kind, max_steps=12, packed=True), target, store).train()
    return target, store, heads


def alone(out, base, form="hidden", *, head=None, **run):
    """The recipe of a correction on top of `base`."""
    section = HeadSection(warm_start=str(base), train="markov", markov_rank=8, markov_form=form)
    config = recipe(out, "peagle", **{"max_steps": 12, "packed": True, "attention": "staircase", **run})
    loss = LossSection(chunk=64, reach=0.9, reach_by="hit")
    return replace(config, head=replace(section, **(head or {})), loss=loss)


def al(trainer):
    return measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).simulated_al


@FORMS
def test_the_base_is_written_as_it_was_read_and_the_correction_learns(form, world, tmp_path):
    target, store, heads = world
    trainer = Trainer(alone(tmp_path, heads["peagle"], form, max_steps=40), target, store)
    assert trainer.step.frozen
    assert {name.split(".")[0] for name, p in trainer.model.named_parameters() if p.requires_grad} == {
        "markov"
    }
    assert trainer.facts["num_trained_parameters"] == sum(
        p.numel() for p in trainer.model.markov.parameters()
    )
    before = al(trainer)
    trainer.train()
    assert al(trainer) > before + 0.02
    read, written = (load_file(folder / "model.safetensors") for folder in (heads["peagle"], tmp_path))
    assert {name.split(".")[0] for name in written.keys() - read.keys()} == {"markov"}
    for name, tensor in read.items():
        assert torch.equal(written[name], tensor), name
    assert written["markov.up.weight" if form == "hidden" else "markov.out"].dtype == torch.int8
    about = json.loads((tmp_path / "eyas.json").read_text())["head"]
    assert (about["markov_form"], about["markov_rank"]) == (form, 8)


@FORMS
def test_gradients_are_those_of_a_run_that_trains_everything(form, world, tmp_path):
    """For one piece and for parts; and the frozen forward leaves nothing to go back through."""
    target, store, heads = world
    config = alone(tmp_path, heads["peagle"], form)
    found = []
    for train, partition in (("all", 1), ("markov", 1), ("markov", 3), ("all", 3)):
        trainer = Trainer(replace(config, head=replace(config.head, train=train)), target, store)
        for parameter in trainer.model.markov.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
        trainer.step.partition = Partition(partition)
        (prepared,) = trainer.prepare()
        seen = []
        lose = trainer.step._lose
        trainer.step._lose = lambda normed, *rest, seen=seen, lose=lose: (
            seen.append(normed) or lose(normed, *rest)
        )
        result = trainer.step.run(prepared, trainer.step.normaliser(prepared))
        assert all(normed.requires_grad == (train == "all") for normed in seen)
        assert len(seen) == 1 or train == "all"
        frozen = [p.grad for n, p in trainer.model.named_parameters() if not n.startswith("markov.")]
        assert all((gradient is None) == (train == "markov") for gradient in frozen)
        found.append((result, {n: p.grad for n, p in trainer.model.markov.named_parameters()}))
    (expected, gradients), *others = found
    assert expected.counts.sum() > 50
    for result, mine in others:
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert torch.equal(result.hits, expected.hits)
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=2e-3, atol=2e-6, msg=name)


def test_a_run_goes_on_from_a_checkpoint_of_the_correction_alone(world, tmp_path):
    target, store, heads = world
    whole = Trainer(alone(tmp_path / "whole", heads["peagle"], log_every=1), target, store)
    whole.train()
    run = {"log_every": 1, "checkpoint_every": 5}
    first = Trainer(alone(tmp_path / "parts", heads["peagle"], **run), target, store)
    advance = first.advance

    def stop(window):
        if first.state.step == 7:
            raise KeyboardInterrupt
        advance(window)

    first.advance = stop
    with pytest.raises(KeyboardInterrupt):
        first.train()
    (checkpoint,) = (tmp_path / "parts/checkpoints").iterdir()
    assert all(name.startswith("markov.") for name in load_file(checkpoint / "model.safetensors"))
    second = Trainer(alone(tmp_path / "parts", heads["peagle"], **run), target, store)
    second.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_what_cannot_be_trained_so_is_refused(world, tmp_path):
    target, store, heads = world

    def refused(match, base, **head):
        with pytest.raises(ConfigError, match=match):
            Trainer(alone(tmp_path / "b", base, head=head), target, store)

    refused("an eagle3 head, whose mask rows nobody trained", heads["eagle3"])
    refused(
        "has no correction, and head.markov_rank asks for none",
        heads["peagle"],
        markov_rank=0,
        markov_form="tables",
    )
    Trainer(alone(tmp_path / "a", heads["peagle"], max_steps=1), target, store).train()
    refused("has a correction already, hidden of rank 8", tmp_path / "a", markov_rank=9)
    refused("has a correction already, hidden of rank 8", tmp_path / "a", markov_form="tables")
    again = Trainer(
        alone(tmp_path / "b", tmp_path / "a", head={"markov_rank": 0, "markov_form": "tables"}), target, store
    )
    assert again.facts["markov_rank"] == 8
