"""What an objective offers the trainer: which slots a batch has, and the drafter's forward over them.

To add one: write a file here with a class like those of eagle3.py and peagle.py, its section in config.py,
and a line in build.make_objective.
"""

from typing import Protocol

from torch import Tensor

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots


class Objective(Protocol):
    """How one kind of head is trained."""

    num_depths: int
    """Depths that are trained: steps of the training-time test, or K."""
    depth_weights: tuple[float, ...]
    """Weight of a slot by its depth."""
    mean_over_first_depth: bool
    """Whether the loss is divided by the supervised slots of depth 0 (a weighted sum of means over depths, as
    EAGLE-3's is) or by all supervised slots (one mean, as P-EAGLE's is)."""

    def slots(self, rows: DraftRows, *, seed: int, max_supervised: int) -> Slots:
        """Choose slots of a batch; `max_supervised` bounds the supervised rows of any row."""
        ...

    def all_slots(self, rows: DraftRows) -> Slots:
        """Every anchor at every depth, for validation."""
        ...

    def forward(self, model: Eagle3Model, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        """Run the drafter: shifted features [B, n, A * D] -> normed [B, M, D], the lm_head's input."""
        ...

    def bound(self, num_supervised: list[int]) -> int:
        """Bound of a batch's supervised slots, from the supervised rows of each of its rows."""
        ...
