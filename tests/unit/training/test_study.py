"""Studies as files: what is refused, what every variant comes to, and those that ship."""

from pathlib import Path

import pytest
import yaml

from eyas.core.errors import ConfigError
from eyas.training.config import Eagle3Section, PEagleSection
from eyas.training.study import choose, load_study

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "recipes/studies").glob("*.yaml"))
RECIPE = "target: {path: t}\ndata: {store: s}\nobjective: {kind: peagle}\nrun: {out: o, epochs: 3}\n"
VARIANTS = {
    "base": [],
    "layers/1": ["head.num_layers=1"],
    "layers/2": ["head.num_layers=2"],
    "eagle3": {"recipe": "other.yaml", "overrides": ["optim.lr=0.5"]},
}


def write(folder, **changes):
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "other.yaml").write_text(RECIPE.replace("peagle", "eagle3"))
    study = {"recipe": "recipe.yaml", "steps": 2000, "overrides": ["data.seq_len=64"], "variants": VARIANTS}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study | changes, sort_keys=False))
    return path


def test_variants_differ_by_their_overrides_and_share_their_length(tmp_path):
    study = load_study(write(tmp_path), tmp_path / "out", overrides=("optim.clip=2", "run.batch_rows=4"))
    configs = {plan.name: plan.config for plan in study.plans}
    assert list(configs) == list(VARIANTS)
    assert [config.head.num_layers for config in configs.values()] == [None, 1, 2, None]
    assert isinstance(configs["eagle3"].objective, Eagle3Section)
    assert isinstance(configs["base"].objective, PEagleSection)
    assert (configs["eagle3"].optim.lr, configs["base"].optim.lr) == (0.5, 1e-3)
    for name, config in configs.items():
        run = config.run
        assert (config.data.seq_len, config.optim.clip, run.batch_rows) == (64, 2.0, 4)
        assert (run.max_steps, run.epochs, run.validate_depths) == (2000, None, 7)
        assert (run.log_every, run.validate_every, run.checkpoint_every) == (25, 250, 250)
        assert run.out == str(tmp_path / "out" / name)


@pytest.mark.parametrize("steps", [1, 2, 7, 30, 99, 100, 1000, 1001])
def test_records_end_where_checkpoints_are_made(steps, tmp_path):
    run = load_study(write(tmp_path), tmp_path, steps=steps).plans[0].config.run
    assert run.max_steps == steps
    assert run.validate_every % run.log_every == 0
    assert 1 <= run.validate_every <= max(1, steps // 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "there are none"),
        ({"steps": 0}, "at least 1"),
        ({"baseline": "none"}, "there is no variant 'none'"),
        ({"beside": ["x"]}, "there is no variant 'x'"),
        ({"variants": {"../up": []}}, "'../up'"),
        ({"variants": {"a/b/c": []}}, "at most one slash"),
        ({"variants": {"a": [], "a/b": []}}, "'a' is a variant and a group"),
        ({"variants": {"a": ["optim.larning_rate=1"]}}, "variant a: .*larning_rate"),
        ({"variants": {"a": {"recipe": "absent.yaml"}}}, "variant a: .*absent.yaml: there is no such file"),
        ({"colour": 1}, "colour: unknown key"),
    ],
)
def test_what_is_wrong_is_named(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, **changes), tmp_path)


def test_choosing_by_name_group_and_part(tmp_path):
    study = load_study(write(tmp_path), tmp_path)

    def names(*only, part=(1, 1)):
        return [plan.name for plan in choose(study, list(only), part)]

    assert names() == list(VARIANTS)
    assert names("layers") == ["layers/1", "layers/2"]
    assert names("eagle3", "layers/2") == ["layers/2", "eagle3"]
    assert names(part=(2, 3)) == ["layers/1"]
    assert sorted(names(part=(1, 2)) + names(part=(2, 2))) == sorted(VARIANTS)
    with pytest.raises(ConfigError, match="no variant 'layer'"):
        names("layer")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_that_ships_resolves(path, tmp_path):
    study = load_study(path, tmp_path)
    assert study.config.question
    shown = {str(plan.config).replace(plan.config.run.out, "") for plan in study.plans}
    assert len(shown) == len(study.plans), "two variants are the same"
