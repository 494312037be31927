"""The trainer end to end on a tiny target: it learns, resumes exactly, saves what it trained."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.core.errors import ConfigError, DataError
from eyas.data.features import FeatureShape, write_features
from eyas.data.loader import split_documents
from eyas.data.store import StoreWriter, TokenStore
from eyas.drafters.artifact import load_head
from eyas.training.capture import capture, capture_meta
from eyas.training.config import (
    DataSection,
    Eagle3Section,
    HeadSection,
    LossSection,
    OptimSection,
    PEagleSection,
    RunSection,
    TargetSection,
    TrainConfig,
)
from eyas.training.trainer import Trainer
from eyas.training.validate import measure
from tiny import tiny_target

OBJECTIVES = {"eagle3": Eagle3Section(ttt_steps=4), "peagle": PEagleSection(num_depths=4)}


def greedy_store(folder, target, *, documents=12, length=20, copies=4):
    """Documents that the target itself wrote greedily after random prompts.

    Each stands there several times under other names, so that held-out ones are in the training split too:
    nobody can learn a random target, but any head can learn it by heart.
    """
    generator = torch.Generator().manual_seed(1)
    writer = StoreWriter(folder, vocab_size=target.config.vocab_size, meta={})
    from eyas.nn.packed import PackedContext

    for number in range(documents):
        ids = torch.randint(4, 60, (1, 4), generator=generator)
        for _ in range(length - 4):
            positions = torch.arange(ids.shape[1])[None]
            context = PackedContext.of(torch.zeros_like(ids, dtype=torch.int32))
            hidden, _ = target.decoder(ids, positions, context)
            ids = torch.cat((ids, target.decoder.logits(hidden[:, -1:]).argmax(-1)), 1)
        for copy in range(copies):
            writer.add(f"doc-{number}-{copy}", ids[0].tolist(), [(4, length)])
    writer.close()
    return TokenStore.load(folder)


def recipe(out, kind, **run):
    defaults = {"max_steps": 30, "batch_rows": 4, "log_every": 5, "validate_every": 0, "checkpoint_every": 0}
    return TrainConfig(
        target=TargetSection(path="tiny"),
        data=DataSection(store="store", seq_len=48, held_out=0.2),
        objective=OBJECTIVES[kind],
        head=HeadSection(num_layers=1, draft_vocab_size=56),
        loss=LossSection(chunk=64),
        optim=OptimSection(lr=1e-2),
        run=RunSection(out=str(out), tensorboard=False, **(defaults | run)),
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    target = tiny_target()
    return target, greedy_store(tmp_path_factory.mktemp("store"), target)


def losses(out):
    records = [json.loads(line) for line in (Path(out) / "training_log.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_learning_by_heart_improves_acceptance(kind, world, tmp_path):
    target, store = world
    trainer = Trainer(recipe(tmp_path, kind, max_steps=40), target, store)
    before = measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).simulated_al
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    validation = [r["simulated_al"] for r in records if r["kind"] == "validation"]
    train = [r["loss"] for r in records if r["kind"] == "train"]
    assert train[-1] < 0.8 * train[0]
    assert validation[-1] > before + 0.5
    meta = json.loads((tmp_path / "eyas.json").read_text())
    assert meta["validation"]["simulated_al"] == validation[-1]
    assert meta["data"]["hash"] == store.manifest["hash"]
    assert len(meta["validation"]["acceptance"]) == 4


def test_steps_fed_their_own_guesses_learn_too(world, tmp_path):
    """Validation counts the same of the same weights: only drafts that were right are followed."""
    target, store = world
    forced = Trainer(recipe(tmp_path / "forced", "eagle3"), target, store)
    config = recipe(tmp_path / "own", "eagle3", max_steps=40)
    loss = replace(config.loss, reach=0.9, reach_by="hit")
    objective = replace(config.objective, teacher_forcing=False)
    own = Trainer(replace(config, objective=objective, loss=loss), target, store)
    before = measure(own.step, own.vocab_map, own.validation, batch_rows=4).simulated_al
    own.train()
    forced.model.load_state_dict(own.model.state_dict())
    counts = [measure(t.step, t.vocab_map, t.validation, batch_rows=4) for t in (own, forced)]
    assert counts[0] == counts[1]
    assert counts[0].simulated_al > before + 0.5


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("by", ["overlap", "hit"])
def test_overlap_loss_weighted_by_reach_learns_too(kind, by, world, tmp_path):
    target, store = world
    config = recipe(tmp_path, kind, max_steps=40)
    loss = LossSection(kind="lk_hybrid", reach=0.9, reach_by=by, chunk=64)
    trainer = Trainer(replace(config, loss=loss), target, store)
    before = measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).simulated_al
    trainer.train()
    assert trainer._last_validation["simulated_al"] > before + 0.5


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "tables", "hidden"])
def test_simulated_and_decoded_acceptance_length_agree(kind, world, tmp_path):
    """Held-out text decoded for real: the engine drafts and accepts as often as validation counted."""
    from eyas.core.sampling import SamplingParams
    from eyas.engine.llm import LLM

    target, store = world
    corrected = kind in ("tables", "hidden")
    config = recipe(tmp_path, "peagle" if corrected else kind, max_steps=60)
    if corrected:
        config = replace(config, head=replace(config.head, markov_rank=8, markov_form=kind))
    trainer = Trainer(config, target, store)
    trainer.train()
    llm = LLM(target, tmp_path, num_draft_tokens=4, max_num_seqs=8, max_model_len=64)
    _, held_out = split_documents(store, config.data.held_out)
    prompts = [store.document(int(i))[0][:4] for i in held_out]
    llm.generate_ids(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    count = measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4)
    assert count.simulated_al > 1.8
    assert sum(count.reached) > sum(count.visited_reached)
    assert count.visited_reached[0] == llm.stats.drafted_row_steps
    # The last draft of an answer may be right to its end: the engine has no room there for one token more.
    assert 0 <= sum(count.visited_right) - llm.stats.accepted <= len(prompts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_saved_head_is_the_trained_one(kind, packed, world, tmp_path):
    target, store = world
    trainer = Trainer(recipe(tmp_path, kind, max_steps=3, packed=packed), target, store)
    trainer.train()
    loaded = load_head(
        tmp_path,
        target.config,
        target.decoder.embed_tokens.weight,
        identity=target.identity,
        lm_head_weight=target.decoder.lm_head_weight,
    )
    assert torch.equal(loaded.vocab_map.target_ids, trainer.vocab_map.target_ids)
    mine = dict(trainer.model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        tolerance = mine[name].abs().max().item() / 100 if packed else 0.0
        torch.testing.assert_close(parameter, mine[name].detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_resumed_run_has_the_same_loss_curve(kind, world, tmp_path):
    target, store = world
    whole = recipe(tmp_path / "whole", kind, max_steps=12, log_every=1)
    optim = replace(whole.optim, ema=0.9)
    Trainer(replace(whole, optim=optim), target, store).train()
    cut = recipe(tmp_path / "cut", kind, max_steps=12, log_every=1, checkpoint_every=5, keep_checkpoints=1)
    cut = replace(cut, optim=optim)

    class Stopped(Exception):  # noqa: N818
        pass

    trainer = Trainer(cut, target, store)
    run_step = trainer.step.run

    def stop_at_eight(*args, **kwargs):
        if trainer.state.step == 7:
            raise Stopped
        return run_step(*args, **kwargs)

    trainer.step.run = stop_at_eight
    with pytest.raises(Stopped):
        trainer.train()
    Trainer(cut, target, store).train()
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    assert first.read_bytes() == second.read_bytes()


def test_gradient_accumulation_equals_a_larger_batch(world, tmp_path):
    target, store = world
    results = []
    for number, (rows, times) in enumerate(((4, 1), (2, 2))):
        config = recipe(tmp_path / str(number), "eagle3", batch_rows=rows, accumulation=times, max_steps=2)
        trainer = Trainer(config, target, store)
        trainer.train()
        results.append(trainer.model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=2e-5)


def test_a_checkpoint_of_another_recipe_is_refused(world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "eagle3", max_steps=2, checkpoint_every=2)
    Trainer(config, target, store).train()
    other = replace(config, optim=replace(config.optim, lr=0.5))
    with pytest.raises(ConfigError, match="another optim"):
        Trainer(other, target, store).train()
    (newest,) = (tmp_path / "checkpoints").glob("step-*")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConfigError, match=r"damaged checkpoint .* remove this folder"):
            Trainer(config, target, store).train()
        (newest / name).write_bytes(whole)


def test_a_warm_start_keeps_vocabulary_and_weights(world, tmp_path):
    target, store = world
    first = Trainer(recipe(tmp_path / "a", "peagle", max_steps=2), target, store)
    first.train()
    config = recipe(tmp_path / "b", "peagle", max_steps=1)
    second = Trainer(replace(config, head=HeadSection(warm_start=str(tmp_path / "a"))), target, store)
    assert torch.equal(second.vocab_map.target_ids, first.vocab_map.target_ids)
    assert second.model.config == first.model.config
    torch.testing.assert_close(second.model.fc.weight, first.model.fc.weight)
    with pytest.raises(ConfigError, match="peagle"):
        Trainer(
            replace(recipe(tmp_path / "c", "eagle3"), head=HeadSection(warm_start=str(tmp_path / "a"))),
            target,
            store,
        )


def test_a_peagle_head_begins_where_an_eagle3_head_ended(world, tmp_path):
    """Three added layers change nothing at depth 0, and all of them learn."""
    target, store = world
    first = Trainer(recipe(tmp_path / "a", "eagle3", max_steps=40), target, store)
    first.train()
    config = recipe(tmp_path / "b", "peagle", max_steps=1)
    head = HeadSection(warm_start=str(tmp_path / "a"), num_layers=4)
    second = Trainer(replace(config, head=head), target, store)
    assert second.model.config.num_layers == 4
    assert torch.equal(second.vocab_map.target_ids, first.vocab_map.target_ids)
    before = [
        measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).acceptance[0]
        for trainer in (first, second)
    ]
    assert before[0] == before[1] > 0.1
    frozen = {name: p.detach().clone() for name, p in second.model.named_parameters()}
    second.train()
    changed = {name for name, p in second.model.named_parameters() if not torch.equal(p, frozen[name])}
    assert "layers.3.mlp.down_proj.weight" in changed
    assert {"mask_hidden", "mask_embedding", "layers.0.self_attn.qkv_proj.weight"} <= changed


@pytest.mark.parametrize("form", ["tables", "hidden"])
def test_a_markov_correction_is_added_to_a_finished_head_and_trained(form, world, tmp_path):
    """The head guesses as before at first; then the token before a slot tells two rollouts apart."""
    target, store = world
    first = Trainer(recipe(tmp_path / "a", "peagle", max_steps=20), target, store)
    first.train()
    head = HeadSection(warm_start=str(tmp_path / "a"), markov_rank=8, markov_form=form)
    second = Trainer(replace(recipe(tmp_path / "b", "peagle", max_steps=20), head=head), target, store)
    before = [
        measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).acceptance
        for trainer in (first, second)
    ]
    assert before[0] == before[1]
    second.train()
    last = second.model.markov.out if form == "tables" else second.model.markov.up.weight
    assert last.abs().max() > 1e-3
    loaded = load_head(
        tmp_path / "b", target.config, target.decoder.embed_tokens.weight, identity=target.identity
    )
    assert (loaded.config.markov_form, loaded.config.markov_rank) == (form, 8)


def test_a_depth_encoding_trains_from_the_shared_state_on(world, tmp_path):
    """It starts where a head without one does, in a run of its own and on top of a finished head."""
    target, store = world
    plain = Trainer(recipe(tmp_path / "plain", "peagle", max_steps=8), target, store)
    config = recipe(tmp_path / "own", "peagle", max_steps=8)
    own = Trainer(replace(config, head=replace(config.head, depth_encoding="learned")), target, store)
    weights = dict(plain.model.named_parameters())
    for name, parameter in own.model.named_parameters():
        assert torch.equal(parameter, weights.get(name, torch.zeros_like(parameter))), name
    plain.train()
    own.train()
    assert (own.model.depth_encoding.abs().amax(1) > 1e-4).all()
    meta = json.loads((tmp_path / "own" / "eyas.json").read_text())
    assert meta["head"]["depth_encoding"] == "learned"

    def go_on(start, name, **changes):
        config = recipe(tmp_path / name, "peagle", max_steps=4)
        head = HeadSection(warm_start=str(tmp_path / start), **changes)
        return Trainer(replace(config, head=head), target, store)

    def acceptance(trainer):
        return measure(trainer.step, trainer.vocab_map, trainer.validation, batch_rows=4).acceptance

    later = go_on("plain", "later", depth_encoding="learned")
    assert acceptance(later) == acceptance(plain)
    later.train()
    assert later.model.config.encoded_depths == config.objective.num_depths - 1
    kept = go_on("own", "kept")
    assert torch.equal(kept.model.depth_encoding, own.model.depth_encoding)
    assert kept.facts["depth_encoding"] == "learned"


@pytest.mark.parametrize("trained", ["none", "mask", "all"])
def test_which_embeddings_train(trained, world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "peagle", max_steps=2)
    trainer = Trainer(replace(config, head=replace(config.head, train_embeddings=trained)), target, store)
    table = target.decoder.embed_tokens.weight.clone()
    mask = trainer.model.mask_embedding.detach().clone()
    trainer.train()
    assert torch.equal(target.decoder.embed_tokens.weight, table)
    assert torch.equal(trainer.model.mask_embedding, mask) == (trained == "none")
    assert torch.equal(trainer.model.embed_weight, table) == (trained != "all")


def test_a_run_does_not_write_over_a_model(world, tmp_path):
    """With run.out at the target's own folder the head replaced the target."""
    target, store = world
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a config\.json that eyas did not write"):
        Trainer(recipe(tmp_path, "eagle3"), target, store)


def test_a_row_longer_than_the_target_reads_is_refused(world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "eagle3")
    config = replace(config, data=replace(config.data, seq_len=2**20))
    with pytest.raises(ConfigError, match=r"data\.seq_len=1048576: the target reads at most 256 tokens"):
        Trainer(config, target, store)


def test_a_used_mask_token_is_refused(world, tmp_path):
    target, store = world
    used = int(store.ids[0])
    config = recipe(tmp_path, "peagle")
    with pytest.raises(DataError, match="in use"):
        Trainer(replace(config, head=replace(config.head, mask_token_id=used)), target, store)


def test_the_clock_ends_a_run_and_drives_the_schedule(world, tmp_path):
    target, store = world
    config = recipe(tmp_path, "eagle3", max_steps=None, max_minutes=0.02, schedule_by="time", log_every=1)
    trainer = Trainer(config, target, store)
    began = time.monotonic()
    trainer.train()
    assert time.monotonic() - began < 30
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    rates = [r["lr"] for r in records if r["kind"] == "train"]
    assert 0 <= rates[-1] < max(rates)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_training_on_captured_features_is_training_on_the_target(kind, world, tmp_path):
    """The loss curve of the target in the same process, to the rounding of what was stored."""
    target, store = world
    online = Trainer(recipe(tmp_path / "online", "peagle", max_steps=6, log_every=1), target, store)
    layers = online.model.config.aux_layers
    for _ in write_features(
        store,
        tmp_path / "features",
        run=lambda batch: tuple(capture(target.decoder, batch, layers)),
        shape=FeatureShape(3 * 32, 32, kind),
        seq_len=48,
        batch_rows=4,
        meta=capture_meta(target.identity, layers),
    ):
        pass
    online.train()
    config = recipe(tmp_path / "offline", "peagle", max_steps=6, log_every=1)
    config = replace(config, data=replace(config.data, features=str(tmp_path / "features")))
    offline = Trainer(config, target, store)
    offline.train()
    wanted = dict(losses(tmp_path / "online"))
    assert dict(losses(tmp_path / "offline")) == pytest.approx(wanted, rel=1e-2 if kind == "bf16" else 5e-2)
    assert dict(losses(tmp_path / "offline")) != wanted
