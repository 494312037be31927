"""Which attention and how many parts a recipe gets, and what it is told."""

from dataclasses import replace

import pytest
import torch
from test_trainer import greedy_store, losses, recipe

from eyas.core.errors import ConfigError
from eyas.drafters.head_config import HeadConfig
from eyas.training.config import LossSection, PEagleSection, RunSection
from eyas.training.peagle.memory import GIB, StepShape, choose, predict
from eyas.training.peagle.partition import Partition
from eyas.training.peagle.plan import make_plan
from eyas.training.trainer import Trainer
from tiny import tiny_config, tiny_target

CPU = torch.device("cpu")
HEAD = HeadConfig.for_target(
    tiny_config(hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336),
    kind="peagle",
    mask_token_id=63,
)


def shape(n=8192, **changes):
    values = {"batch_rows": 1, "row_length": n, "num_rollout_slots": 3 * n, "chunk": 2048, "trained": 10**9}
    return StepShape(**(values | changes))


def test_prediction_falls_with_parts_to_the_rows_and_with_replay_to_the_keys():
    one, four, many = (predict(HEAD, shape(), Partition(s, "shared"))["total"] for s in (1, 4, 64))
    assert one > four > many
    replayed = predict(HEAD, shape(), Partition(64, "replayed"))
    assert replayed["total"] < many
    assert predict(HEAD, shape(), Partition(64, "shared"))["rows"] > 5 * replayed["rows"]


def test_prediction_of_one_part_by_hand():
    """Per slot and layer: 2 D + 2 queries + 2 keys + 2 I numbers of 2 bytes, and embeddings and hidden."""
    found = predict(HEAD, shape(1000), Partition())
    numbers = 4 * (2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336) + 2 * 4096
    assert found["rows"] == 1000 * int(numbers * 2 * 1.1)
    assert found["rollouts"] == 3 * found["rows"]
    assert found["weights"] >= 16 * 10**9
    assert found["total"] == sum(size for name, size in found.items() if name != "total")


def test_the_fewest_parts_that_fit_are_chosen():
    for budget in (60, 40, 30, 25):
        partition = choose(HEAD, shape(), budget * GIB)
        assert predict(HEAD, shape(), partition)["total"] <= budget * GIB
        if partition.num_parts > 1 and partition.mode == "shared":
            fewer = Partition(partition.num_parts - 1, "shared")
            # Every count is tried up to four; from there on steps are larger.
            assert partition.num_parts > 4 or predict(HEAD, shape(), fewer)["total"] > budget * GIB
    modes = {choose(HEAD, shape(65536), size * GIB).mode for size in (120, 30)}
    assert modes == {"shared", "replayed"}


def test_a_budget_below_the_weights_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match=r"needs about 1\d\.\d GiB even in .* run.memory_budget_gib"):
        choose(HEAD, shape(), 5 * GIB)


def plan(tmp_path, objective=None, kind="peagle", **run):
    config = recipe(tmp_path, kind, **run)
    if objective is not None:
        config = replace(config, objective=objective)
    return make_plan(config, HEAD, trained=10**6, device=CPU, compute_bytes=4)


def test_plans_of_recipes(tmp_path):
    assert not plan(tmp_path).staircase
    assert plan(tmp_path).partition == Partition()
    assert plan(tmp_path, attention="staircase").staircase
    assert plan(tmp_path, kind="eagle3", attention="staircase").staircase
    explicit = plan(tmp_path, PEagleSection(num_depths=4, partitions=3, partition_mode="prefix"))
    assert explicit.staircase
    assert explicit.partition == Partition(3, "prefix")
    cut = plan(tmp_path, memory_budget_gib=0.9)
    assert cut.partition.num_parts > 1
    assert cut.report()["predicted_gib"]["total"] <= 0.9


def test_what_cannot_be_cut_is_refused(tmp_path):
    config = recipe(tmp_path, "peagle")
    masks = replace(config.run, attention="masks")
    with pytest.raises(ConfigError, match="partitions=2"):
        replace(config, run=masks, objective=PEagleSection(partitions=2))
    with pytest.raises(ConfigError, match="partition_mode=shared"):
        replace(
            config,
            loss=LossSection(reach=0.5),
            objective=PEagleSection(partitions=2, partition_mode="replayed"),
        )
    with pytest.raises(ConfigError, match="partitions"):
        PEagleSection(partitions=0)
    with pytest.raises(ConfigError, match="memory_budget_gib"):
        RunSection(out="x", max_steps=1, memory_budget_gib=0.0)


@pytest.mark.slow
def test_a_run_in_parts_trains_like_one_in_a_piece(tmp_path):
    target = tiny_target()
    store = greedy_store(tmp_path / "store", target)
    curves = []
    for name, section in (
        ("one", PEagleSection(num_depths=4)),
        ("parts", PEagleSection(num_depths=4, partitions=3, partition_mode="replayed")),
    ):
        config = replace(recipe(tmp_path / name, "peagle", max_steps=10), objective=section)
        Trainer(config, target, store).train()
        curves.append(torch.tensor([loss for _, loss in losses(tmp_path / name)]))
    torch.testing.assert_close(*curves, rtol=2e-3, atol=1e-4)
