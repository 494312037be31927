from pathlib import Path

import pytest

from eyas.config import dump_config, load_config
from eyas.core.errors import ConfigError
from eyas.training.build import make_objective
from eyas.training.config import TrainConfig

RECIPES = sorted((Path(__file__).parents[3] / "recipes" / "train").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_dumps_to_itself(path, tmp_path):
    config = load_config(TrainConfig, path, [])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(TrainConfig, again, []) == config
    assert len(make_objective(config.objective).depth_weights) >= 7


def test_the_shipped_recipes_are_the_papers_objectives():
    eagle3, peagle = (
        load_config(TrainConfig, path, []) for path in RECIPES if path.stem.startswith("smollm2-135m")
    )
    assert make_objective(eagle3.objective).depth_weights == tuple(0.8**step for step in range(7))
    assert (peagle.objective.num_depths, peagle.objective.retention, peagle.head.num_layers) == (8, 0.8, 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.epochs=null", "never ends"),
        ("run.schedule_by=time", "schedule_by=time needs max_minutes"),
        ("optim.lr=-1", "lr=-1.0: it must be positive"),
        ("optim.larning_rate=1", "larning_rate"),
        ("data.held_out=1.5", "held_out=1.5"),
        ("objective.depth_weights=[1, 2]", "one a step"),
    ],
)
def test_wrong_values_are_named(override, message):
    path = next(path for path in RECIPES if path.stem == "smollm2-135m-eagle3")
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, path, [override])
