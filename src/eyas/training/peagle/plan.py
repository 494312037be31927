"""From a recipe to how its slots attend and into how many parts its rows are cut."""

from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.drafters.head_config import HeadConfig
from eyas.training.config import PEagleSection, TrainConfig
from eyas.training.peagle.cod import capacities
from eyas.training.peagle.memory import GIB, StepShape, choose, predict
from eyas.training.peagle.partition import Mode, Partition

STAIRCASE_FROM = 2048
"""Rows at least this long attend by ranges on CUDA unless the recipe says otherwise."""
SHARE_OF_DEVICE = 0.9
"""What a step may take of a GPU where the recipe gives no budget; the rest is the target's and fragments."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run's rows are trained."""

    staircase: bool
    partition: Partition = field(default_factory=Partition)
    predicted: dict[str, int] | None = None
    """Bytes of a step (memory.predict); None where nothing is estimated."""

    def report(self) -> dict[str, Any]:
        """For the run's header, in GiB."""
        report: dict[str, Any] = {"attention": "staircase" if self.staircase else "masks"}
        if self.predicted is not None:
            report |= {"partitions": self.partition.num_parts, "partition_mode": self.partition.mode}
            report["predicted_gib"] = {name: round(size / GIB, 2) for name, size in self.predicted.items()}
        return report


def make_plan(
    config: TrainConfig,
    head: HeadConfig,
    *,
    trained: int,
    device: torch.device,
    compute_bytes: int,
    resident: int = 0,
) -> Plan:
    """Plan of a recipe for a head with `trained` trained numbers; ConfigError where no cut fits the budget.

    `resident` bytes of a GPU are taken by others (the target) before the head is there.
    """
    run, section = config.run, config.objective
    long = device.type == "cuda" and config.data.seq_len >= STAIRCASE_FROM
    staircase = run.attention == "staircase" or (run.attention == "auto" and long)
    if not isinstance(section, PEagleSection):
        return Plan(staircase)
    n = config.data.seq_len
    sizes = capacities(
        n, n, section.num_depths, retention=section.retention, min_retention=section.min_retention
    )
    if section.max_anchors is not None:
        sizes = tuple(min(size, section.max_anchors) for size in sizes)
    shape = StepShape(
        batch_rows=run.batch_rows,
        row_length=n,
        num_rollout_slots=sum(sizes),
        chunk=config.loss.chunk,
        trained=trained,
        compute_bytes=compute_bytes,
        averaged=config.optim.ema is not None,
        compiled=run.compile,
    )
    budget = _budget(run.memory_budget_gib, device, resident)
    mode: Mode | None = None if section.partition_mode == "auto" else section.partition_mode
    if config.loss.reach:
        mode = "shared"
    if section.partitions != "auto":
        partition = Partition(section.partitions, mode or "shared")
    elif budget is None or run.attention == "masks" or not (staircase or run.memory_budget_gib):
        partition = Partition()
    else:
        partition = choose(head, shape, budget, mode)
    return Plan(staircase or partition.num_parts > 1, partition, predict(head, shape, partition))


def _budget(wanted_gib: float | None, device: torch.device, resident: int) -> int | None:
    """Bytes that a step may take: the recipe's, or most of what the GPU has beside what is on it already."""
    if wanted_gib is not None:
        return int(wanted_gib * GIB)
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(SHARE_OF_DEVICE * total) - resident
