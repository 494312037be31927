import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.config import dump_config, load_config
from eyas.core.errors import ConfigError
from eyas.core.vocab_map import VocabMap
from eyas.training.build import make_objective
from eyas.training.config import TrainConfig
from eyas.training.presets import PRESETS

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes" / "train").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_dumps_to_itself(path, tmp_path):
    config = load_config(TrainConfig, path, [])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(TrainConfig, again, []) == config
    assert len(make_objective(config.objective, VocabMap.identity(9)).depth_weights) >= 7


def test_the_shipped_recipes_are_the_papers_objectives():
    found = {path.stem: load_config(TrainConfig, path, []) for path in RECIPES}
    eagle3, peagle, markov = (found[f"smollm2-135m-{name}"] for name in ("eagle3", "peagle", "peagle-markov"))
    assert make_objective(eagle3.objective, VocabMap.identity(9)).depth_weights == tuple(
        0.8**step for step in range(7)
    )
    assert (peagle.objective.num_depths, peagle.objective.retention, peagle.head.num_layers) == (8, 0.8, 4)
    assert (markov.objective, markov.loss) == (peagle.objective, peagle.loss)
    assert (markov.head.train, markov.head.warm_start) == ("markov", peagle.run.out)
    # The head that ships has a correction, and another form or rank would be refused.
    shipped = json.loads((ROOT / "heads" / "smollm2-135m-peagle" / "config.json").read_text())
    kept = (shipped["markov_form"], shipped["markov_rank"])
    assert (markov.head.markov_form, markov.head.markov_rank) == kept


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.epochs=null", "never ends"),
        ("run.schedule_by=time", "schedule_by=time needs max_minutes"),
        ("optim.lr=-1", "lr=-1.0: it must be positive"),
        ("optim.larning_rate=1", "larning_rate"),
        ("data.held_out=1.5", "held_out=1.5"),
        ("objective.depth_weights=[1, 2]", "one a step"),
        ("objective.ttt_steps=1000", "ttt_steps=1000: it must be 1 to 64"),
        ("objective={kind: peagle, num_depths: 0}", "num_depths=0"),
        ("objective.decay=0", "decay=0.0: it must be positive"),
        ("optim.betas=[2, 3]", "betas="),
        ("optim.eps=-1", "eps=-1.0"),
        ("optim.weight_decay=-1", "weight_decay=-1.0"),
        ("optim.clip=0", "clip=0.0"),
        ("optim.final_lr=5", "final_lr=5.0"),
        ("run.max_steps=0", "max_steps=0: it must be positive"),
        ("run.epochs=-1", "epochs=-1.0"),
        ("run.max_minutes=0", "max_minutes=0.0"),
        ("run.validate_every=-1", "validate_every=-1"),
        ("run.validate_rows=0", "validate_rows=0"),
        ("run.keep_checkpoints=0", "keep_checkpoints=0"),
        ("run.seed=-1", "seed=-1"),
        ("run.out=", "out=''"),
        ("data.store=", "store=''"),
        ("data.seq_len=10000000", "seq_len=10000000"),
        ("head.draft_vocab_size=0", "draft_vocab_size=0"),
        ("head.num_layers=0", "num_layers=0"),
        ("head.intermediate_size=-4", "intermediate_size=-4"),
        ("head.aux_layers=[]", r"aux_layers=\(\)"),
        ("head.init_std=-1", "init_std=-1.0"),
        ("head.mask_token_id=5", "mask_token_id=5: it must be left out"),
        ("head.markov_rank=5", "markov_rank=5: it must be left out"),
        ("head.markov_form=hidden", "markov_form='hidden': it must be left out, or have head.markov_rank"),
        ("head.train=markov", "head.train='markov': it must be all: only peagle has the correction"),
        (
            "head.depth_encoding=learned",
            "depth_encoding='learned': it must be none: only peagle has mask slots",
        ),
        ("head.depth_encoding=sines", "depth_encoding"),
        ("head.num_layers=99999999", "num_layers=99999999"),
        ("run.batch_rows=99999999999", "batch_rows=99999999999"),
        ("objective={kind: peagle, max_anchors: -3}", "max_anchors=-3"),
        ("loss.chunk=0", "chunk=0"),
        ("decoding.num_draft_tokens=0", "num_draft_tokens=0"),
    ],
)
def test_wrong_values_are_named(override, message):
    path = next(path for path in RECIPES if path.stem == "smollm2-135m-eagle3")
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, path, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.warm_start=null", "head.train=markov trains .*: give head.warm_start"),
        ("head.train_embeddings=all", "head.train_embeddings='all': it must be mask where head.train=markov"),
        ("head.markov_form=wide", "markov_form"),
        ("head.train=some", "head.train"),
        (
            "head.depth_encoding=learned",
            "depth_encoding='learned': it must be left out where head.train=markov",
        ),
        ("head.markov_rank=-1", "markov_rank=-1"),
        ("head.markov_rank=0", "markov_form='hidden': it must be left out, or have head.markov_rank"),
    ],
)
def test_wrong_values_about_a_correction_are_named(override, message):
    path = next(path for path in RECIPES if path.stem == "smollm2-135m-peagle-markov")
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, path, [override])


def test_a_row_is_longer_than_its_chains():
    path = next(path for path in RECIPES if path.stem == "smollm2-135m-peagle")
    with pytest.raises(ConfigError, match=r"num_depths=8: it must be below data.seq_len=8"):
        load_config(TrainConfig, path, ["data.seq_len=8"])


MINIMAL = "target: {path: t}\ndata: {store: s}\nrun: {out: o}\n"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_only_names_and_dumps_to_itself(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"preset: {name}\n{MINIMAL}")
    config = load_config(TrainConfig, path)
    assert config.preset == name
    path.write_text(MINIMAL)
    assert load_config(TrainConfig, path, [f"preset={name}"]) == config
    path.write_text(dump_config(config))
    assert load_config(TrainConfig, path) == config


def test_presets_are_what_the_papers_say(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    eagle3, eagle31, peagle = (load_config(TrainConfig, path, [f"preset={name}"]) for name in PRESETS)
    assert (eagle3.optim.lr, eagle3.optim.schedule, eagle3.objective.ttt_steps) == (5e-5, "linear", 7)
    changed = {"fc_norm": True, "norm_output": True}
    assert eagle31 == replace(eagle3, preset="eagle3.1", head=replace(eagle3.head, **changed))
    assert (peagle.head.num_layers, peagle.head.train_embeddings, peagle.data.seq_len) == (4, "all", 8192)
    assert (peagle.optim.lr, peagle.optim.warmup, peagle.run.accumulation) == (1e-4, 0.0025, 8)


def test_the_recipe_and_the_command_line_win_over_a_preset(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"preset: eagle3.1\nhead: {{norm_output: false}}\noptim:\n{MINIMAL}")
    config = load_config(TrainConfig, path, ["optim.lr=3e-4", "run.epochs=null", "run.max_steps=9"])
    assert (config.head.fc_norm, config.head.norm_output) == (True, False)
    assert (config.optim.lr, config.optim.clip) == (3e-4, 0.5)
    assert (config.run.epochs, config.run.max_steps, config.run.accumulation) == (None, 9, 2)
    with pytest.raises(ConfigError, match="preset 'eagle4' is unknown; choose one of eagle3-paper"):
        load_config(TrainConfig, path, ["preset=eagle4"])
    with pytest.raises(
        ConfigError, match="preset peagle-paper is for kind peagle, the recipe says kind eagle3"
    ):
        load_config(TrainConfig, path, ["preset=peagle-paper", "objective.kind=eagle3"])
