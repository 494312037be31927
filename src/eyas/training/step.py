"""One forward and backward of a batch: target -> rows -> slots -> drafter -> loss. No value is read back."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.core.vocab_map import VocabMap
from eyas.data.loader import Batch, slice_rows
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.peagle.model import PEagleModel
from eyas.targets.base import Target
from eyas.training.capture import Captured, CaptureFn, capture
from eyas.training.compiled import compile_fixed
from eyas.training.config import LossSection
from eyas.training.losses import Reach, compact, slot_loss
from eyas.training.losses_chunk import chunk_loss
from eyas.training.objectives.base import Objective
from eyas.training.rows import DraftRows, draft_rows, shift_features, teacher_rows
from eyas.training.slots import Slots, guess_index, previous_tokens
from eyas.training.timing import Clock


@dataclass(slots=True)
class StepResult:
    """Sums over the slots of a batch, on the device."""

    loss: Tensor
    """Weighted sum, already divided by the step's normaliser."""
    hits: Tensor
    """float32 [K], supervised slots whose argmax is the target's"""
    counts: Tensor
    """float32 [K], supervised slots"""


@dataclass(slots=True)
class Prepared:
    """A batch with its slots chosen: what the step's normaliser needs to know before any forward."""

    batch: Batch
    rows: DraftRows
    slots: Slots
    bound: int
    """Bound of the supervised slots, known on the host."""

    def part(self, begin: int, end: int, bound: int) -> "Prepared":
        """Rows begin .. end - 1 of it, whose supervised slots are at most `bound`."""
        batch, rows, slots = (_rows(value, begin, end) for value in (self.batch, self.rows, self.slots))
        return Prepared(batch, rows, slots, bound)


def _rows(value: Any, begin: int, end: int) -> Any:
    """Rows of every tensor [B, n, ...] in (nested) tuples and batches; what is not by row stays."""
    if isinstance(value, Batch):
        return slice_rows(value, begin, end)
    if isinstance(value, Tensor):
        return value[begin:end] if value.ndim > 1 else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows(item, begin, end) for item in value))
    return value


class TrainStep:
    """Everything that a step needs, with the compiled functions if they are wanted."""

    def __init__(
        self,
        target: Target,
        model: Eagle3Model,
        vocab_map: VocabMap,
        objective: Objective,
        loss: LossSection,
        *,
        autocast: torch.dtype | None,
        compiled: bool,
    ) -> None:
        self.target, self.model, self.objective, self.loss = target, model, objective, loss
        self.autocast = autocast
        device = target.device
        # Only the draft vocabulary's rows of the teacher enter the loss.
        self.teacher_weight = target.decoder.lm_head_weight[vocab_map.target_ids.to(device)].detach()
        all_ids = torch.arange(vocab_map.vocab_size, device=device)
        self.draft_ids = vocab_map.to(device).draft_ids(all_ids)
        self.clock = Clock(device)
        self.depth_weights = torch.tensor(objective.depth_weights, device=device)
        self._capture: Any = compile_fixed(capture) if compiled else capture
        self._forward: Any = compile_fixed(self._draft) if compiled else self._draft
        self._chunk: Any = compile_fixed(chunk_loss) if compiled else chunk_loss

    def capture_with(self, function: CaptureFn) -> None:
        """Take what the target knows from elsewhere than its forward."""
        self._capture = function

    def autocasting(self) -> Any:
        """Context of the drafter's products."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.target.device.type, dtype=self.autocast)

    def _draft(self, batch: Batch, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        with self.autocasting():
            shifted = shift_features(batch, features.to(self.model.fc.weight.dtype))
            normed = self.objective.forward(self.model, rows, shifted, slots)
        return normed if self.autocast is None else normed.to(self.autocast)

    def output(self, normed: Tensor, rows: DraftRows, slots: Slots) -> tuple[Tensor, Tensor]:
        """The lm_head's input [B, M, D] and weight, or both with the columns of a Markov correction."""
        weight = self.model.lm_head.weight
        if not isinstance(self.model, PEagleModel) or self.model.markov is None:
            return normed, weight
        previous = previous_tokens(slots, rows)
        previous = torch.where(previous >= 0, self.draft_ids[previous.clamp(min=0)], -1)
        return self.model.markov.joined(normed, weight, previous)

    def prepare(self, batch: Batch, num_supervised: list[int], *, seed: int, max_supervised: int) -> Prepared:
        """Choose the batch's slots; num_supervised holds the supervised draft rows of each of its rows."""
        rows = draft_rows(batch)
        slots = self.objective.slots(rows, seed=seed, max_supervised=max_supervised)
        return Prepared(batch, rows, slots, self.objective.bound(num_supervised))

    def weigh(self, prepared: Prepared, captured: Captured) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and draft ids of the teacher's choices (-1 outside) [B * M]; which slots count [B, M]."""
        slots = prepared.slots
        choices = self.draft_ids[teacher_rows(captured.choices)]
        answers = choices.gather(1, guess_index(slots, choices.shape[1]))
        counted = slots.supervised & (answers >= 0) if self.loss.oov == "mask" else slots.supervised
        weights = counted * self.depth_weights[slots.depths]
        return weights.flatten(), answers.flatten(), counted

    def _reach(
        self, slots: Slots, row_length: int, answers: Tensor, chosen: Tensor
    ) -> tuple[Reach, Tensor, Tensor] | None:
        """What weighs the chosen slots by the chance that they are reached (losses.Reach), if that is on."""
        if not self.loss.reach:
            return None
        batch = slots.anchors.shape[0]
        rows = torch.arange(batch, device=answers.device).unsqueeze(1) * row_length
        anchors = (slots.anchors + rows).flatten()
        depths = slots.depths.expand_as(slots.anchors).flatten()
        reach = Reach(batch * row_length, self.objective.num_depths, self.loss.reach, device=answers.device)
        if self.loss.oov == "mask":
            reach.end_rollouts(anchors, depths, slots.supervised.flatten() & (answers < 0))
        return reach, anchors[chosen], depths[chosen]

    def normaliser(self, prepared: Prepared) -> Tensor:
        """What the loss of a step is divided by, summed over its batches: supervised slots (see Objective).

        Out-of-vocabulary slots stay counted, so that it needs no forward of the target.
        """
        supervised = prepared.slots.supervised
        if self.objective.mean_over_first_depth:
            return (supervised & (prepared.slots.depths == 0)).sum()
        return supervised.sum()

    def run(self, prepared: Prepared, normaliser: Tensor, *, backward: bool = True) -> StepResult:
        """Forward and backward of one batch; gradients add up in the model."""
        slots, rows = prepared.slots, prepared.rows
        with torch.no_grad():
            captured: Captured = self._capture(
                self.target.decoder, prepared.batch, self.model.config.aux_layers
            )
            weights, answers, counted = self.weigh(prepared, captured)
        normed = self._forward(prepared.batch, rows, captured.features, slots)
        normed, head_weight = self.output(normed, rows, slots)
        batch, n = rows.tokens.shape
        chunk = min(self.loss.chunk, weights.numel())
        chosen = compact(weights, min(-(-prepared.bound // chunk) * chunk, weights.numel()))
        base = torch.arange(batch, device=weights.device).unsqueeze(1) * n
        # The teacher of row j's guess stands at position j + 1 of the same row.
        teacher = (base + (guess_index(slots, n) + 1).clamp(max=n - 1)).flatten()
        loss, hits = slot_loss(
            normed.flatten(0, 1),
            head_weight,
            captured.hidden.flatten(0, 1).to(normed.dtype),
            self.teacher_weight.to(normed.dtype),
            slot_index=chosen,
            teacher_index=teacher[chosen],
            weights=weights[chosen],
            answers=answers[chosen],
            kind=self.loss.kind,
            chunk=chunk,
            chunk_fn=self._chunk,
            reach=self._reach(slots, n, answers, chosen),
        )
        loss = loss / normaliser.clamp(min=1)
        self.clock.lap("forward")
        if backward:
            torch.autograd.backward(loss)
        self.clock.lap("backward")
        depths = slots.depths.expand_as(slots.supervised).flatten()
        zero = torch.zeros(self.objective.num_depths, device=weights.device)
        counts = zero.index_add(0, depths, slots.supervised.flatten().float())
        taken = counted.flatten()[chosen]
        return StepResult(loss.detach(), zero.index_add(0, depths[chosen], (hits & taken).float()), counts)
