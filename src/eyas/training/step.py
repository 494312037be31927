"""One forward and backward of a batch: target -> rows -> slots -> drafter -> loss. No value is read back."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.core.vocab_map import VocabMap
from eyas.data.loader import Batch, slice_rows
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.peagle.markov import TableMarkov
from eyas.drafters.peagle.model import PEagleModel
from eyas.nn.staircase import KeysValues
from eyas.targets.base import Target
from eyas.training.capture import Captured, CaptureFn, capture
from eyas.training.compiled import compile_fixed
from eyas.training.config import LossSection
from eyas.training.losses import Reach, compact, slot_loss
from eyas.training.losses_chunk import chunk_loss
from eyas.training.objectives.base import Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.peagle.partition import Partition, draft_parts, train_parts
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
        partition: Partition | None = None,
    ) -> None:
        self.target, self.model, self.objective, self.loss = target, model, objective, loss
        self.autocast, self.partition = autocast, partition or Partition()
        """With more than one part, `objective` lays its slots out by anchor."""
        trained = (name for name, weight in model.named_parameters() if weight.requires_grad)
        self.frozen = all(name.startswith("markov.") for name in trained)
        """Only the correction trains: the drafter's forward needs no graph, and no parts."""
        device = target.device
        # Only the draft vocabulary's rows of the teacher enter the loss.
        self.teacher_weight = target.decoder.lm_head_weight[vocab_map.target_ids.to(device)].detach()
        all_ids = torch.arange(vocab_map.vocab_size, device=device)
        self.draft_ids = vocab_map.to(device).draft_ids(all_ids)
        self.clock = Clock(device)
        self.depth_weights = torch.tensor(objective.depth_weights, device=device)
        self._capture: Any = compile_fixed(capture) if compiled else capture
        self.capture_held_out: CaptureFn = capture
        """What validation asks the target with."""
        masked = isinstance(objective, PEagleObjective) and not objective.staircase
        # Inductor's backward of those masks is wrong on CUDA: gradients 10^4 times too large (torch 2.11).
        eager = masked and device.type == "cuda"
        self._forward: Any = compile_fixed(self._draft) if compiled and not eager else self._draft
        self._part: Any = compile_fixed(self._draft_part) if compiled else self._draft_part
        self._chunk: Any = compile_fixed(chunk_loss) if compiled else chunk_loss

    @property
    def capture_fn(self) -> CaptureFn:
        """How it asks the target."""
        function: CaptureFn = self._capture
        return function

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

    def _draft_part(
        self, tokens: Tensor, features: Tensor | None, *rest: Any
    ) -> tuple[Tensor, list[KeysValues]]:
        assert isinstance(self.objective, PEagleObjective)
        with self.autocasting():
            if features is not None and self.autocast is None:
                features = features.to(self.model.fc.weight.dtype)
            normed, made = self.objective.forward_part(self.model, tokens, features, *rest)
        return normed if self.autocast is None else normed.to(self.autocast), made

    def draft(self, prepared: Prepared, captured: Captured) -> Tensor:
        """Normed [B, M, D] of all slots without gradients, uncompiled; rollouts in parts where steps are."""
        return self._draft_alone(prepared, captured, self._draft, self._draft_part)

    @torch.no_grad()
    def _draft_alone(self, prepared: Prepared, captured: Captured, whole: Any, part: Any) -> Tensor:
        rows, slots = prepared.rows, prepared.slots
        if self.partition.num_parts == 1:
            normed: Tensor = whole(prepared.batch, rows, captured.features, slots)
            return normed
        num_depths = self.objective.num_depths
        return draft_parts(
            self.partition, rows, captured.features, slots, num_depths=num_depths, forward=part
        )

    def output(self, normed: Tensor, rows: DraftRows, slots: Slots) -> tuple[Tensor, Tensor]:
        """The lm_head's input [B, M, D] and weight, with what a correction by the token before makes of them.

        The token before is the data's, which need not be in the draft vocabulary for the hidden form.
        """
        weight, model = self.model.lm_head.weight, self.model
        if not isinstance(model, PEagleModel) or model.markov is None:
            return normed, weight
        previous = previous_tokens(slots, rows)
        if isinstance(model.markov, TableMarkov):
            known = torch.where(previous >= 0, self.draft_ids[previous.clamp(min=0)], -1)
            return model.markov.joined(normed, weight, known)
        batch, n = rows.tokens.shape
        with self.autocasting():
            # One row of R numbers a token: there are far fewer tokens than slots.
            of_rows = model.markov.token(model.embed(rows.tokens)).flatten(0, 1)
            first = torch.arange(batch, device=previous.device).unsqueeze(1) * n
            token_part = of_rows[guess_index(slots, n) + first]
            return model.markov.corrected(normed, token_part, previous >= 0), weight

    def prepare(self, batch: Batch, num_supervised: list[int], *, seed: int, max_supervised: int) -> Prepared:
        """Choose the batch's slots; num_supervised holds the supervised draft rows of each of its rows."""
        rows = draft_rows(batch)
        slots = self.objective.slots(rows, seed=seed, max_supervised=max_supervised)
        return Prepared(batch, rows, slots, self.objective.bound(num_supervised))

    def weigh(self, slots: Slots, captured: Captured) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and draft ids of the teacher's choices (-1 outside) [B * M]; which slots count [B, M]."""
        choices = self.draft_ids[teacher_rows(captured.choices)]
        answers = choices.gather(1, guess_index(slots, choices.shape[1]))
        counted = slots.supervised & (answers >= 0) if self.loss.oov == "mask" else slots.supervised
        weights = counted * self.depth_weights[slots.depths]
        return weights.flatten(), answers.flatten(), counted

    def _reach(self, prepared: Prepared, captured: Captured) -> Reach | None:
        """What weighs slots by the chance that they are reached (losses.Reach), if that is on."""
        if not self.loss.reach:
            return None
        slots, (batch, n) = prepared.slots, prepared.rows.tokens.shape
        _, answers, _ = self.weigh(slots, captured)
        by = self.loss.reach_by
        reach = Reach(batch * n, self.objective.num_depths, self.loss.reach, by=by, device=answers.device)
        ends = torch.zeros_like(slots.supervised).flatten()
        if self.loss.oov == "mask":
            ends = slots.supervised.flatten() & (answers < 0)
        if by == "hit":
            # Greedy decoding goes the teacher's way; past a token that was sampled otherwise it never is.
            on_path = teacher_rows(captured.choices) == prepared.rows.answers
            ends |= ~on_path.gather(1, guess_index(slots, n)).flatten()
        reach.end_rollouts(*self._places(slots, n), ends)
        return reach

    @staticmethod
    def _places(slots: Slots, row_length: int) -> tuple[Tensor, Tensor]:
        """Anchors over all rows of the batch, row * n + anchor, and depths: int64 [B * M] each."""
        rows = torch.arange(slots.anchors.shape[0], device=slots.anchors.device).unsqueeze(1) * row_length
        return (slots.anchors + rows).flatten(), slots.depths.expand_as(slots.anchors).flatten()

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
        with torch.no_grad():
            captured: Captured = self._capture(
                self.target.decoder, prepared.batch, self.model.config.aux_layers
            )
        return self.learn(prepared, captured, normaliser, backward=backward)

    def learn(
        self, prepared: Prepared, captured: Captured, normaliser: Tensor, *, backward: bool = True
    ) -> StepResult:
        """What `run` does after the target: the drafter and its loss, in one piece or part by part."""
        slots, device = prepared.slots, normaliser.device
        depths = slots.depths.expand_as(slots.supervised).flatten()
        zero = torch.zeros(self.objective.num_depths, device=device)
        counts = zero.index_add(0, depths, slots.supervised.flatten().float())
        result = StepResult(torch.zeros((), device=device), zero, counts)
        with torch.no_grad():
            reach = self._reach(prepared, captured)

        def lose(normed: Tensor, part: Slots, bound: int) -> Tensor:
            loss, hits = self._lose(normed, part, bound, prepared.rows, captured, reach)
            loss = loss / normaliser.clamp(min=1)
            result.loss, result.hits = result.loss + loss.detach(), result.hits + hits
            self.clock.lap("forward")
            return loss

        if self.frozen:
            loss = lose(
                self._draft_alone(prepared, captured, self._forward, self._part), slots, prepared.bound
            )
            if backward:
                torch.autograd.backward(loss)
        elif self.partition.num_parts > 1 and backward:
            self._learn_parts(prepared, captured, lose)
        else:
            loss = lose(
                self._forward(prepared.batch, prepared.rows, captured.features, slots), slots, prepared.bound
            )
            if backward:
                torch.autograd.backward(loss)
        self.clock.lap("backward")
        return result

    def _learn_parts(
        self, prepared: Prepared, captured: Captured, lose: Callable[[Tensor, Slots, int], Tensor]
    ) -> None:
        """One sequence part by part (peagle/partition.py)."""
        config, shape = self.model.config, prepared.rows.tokens.shape
        dtype = self.autocast or self.model.fc.weight.dtype

        def forward(*inputs: Any) -> tuple[Tensor, list[KeysValues]]:
            self.clock.lap("backward")
            part: tuple[Tensor, list[KeysValues]] = self._part(*inputs)
            return part

        def empty_past() -> list[KeysValues]:
            shapes = [(*shape, config.num_kv_heads, config.head_dim)] * 2
            return [
                (
                    torch.zeros(shapes[0], dtype=dtype, device=captured.features.device),
                    torch.zeros(shapes[1], dtype=dtype, device=captured.features.device),
                )
                for _ in range(config.num_layers)
            ]

        train_parts(
            self.partition,
            prepared.rows,
            # Row j stands beside feature j; the last row is padding, which nobody sees.
            captured.features,
            prepared.slots,
            num_depths=self.objective.num_depths,
            bound=prepared.bound,
            forward=forward,
            lose=lose,
            empty_past=empty_past,
        )

    def _lose(
        self,
        normed: Tensor,
        slots: Slots,
        bound: int,
        rows: DraftRows,
        captured: Captured,
        reach: Reach | None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of the loss over slots [B, M], at most `bound` supervised, and hits by depth [K]."""
        with torch.no_grad():
            weights, answers, counted = self.weigh(slots, captured)
        normed, head_weight = self.output(normed, rows, slots)
        batch, n = rows.tokens.shape
        chunk, size = chunk_sizes(min(bound, weights.numel()), self.loss.chunk)
        chosen = compact(weights, min(size, weights.numel()))
        anchors, depths = self._places(slots, n)
        if reach is not None and slots.stairs is not None:
            # Rollouts stand side by side there; a slot's chance needs the depths before it.
            chosen = chosen[depths[chosen].argsort(stable=True)]
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
            reach=None if reach is None else (reach, anchors[chosen], depths[chosen]),
        )
        zero = torch.zeros(self.objective.num_depths, device=weights.device)
        taken = counted.flatten()[chosen]
        return loss, zero.index_add(0, depths[chosen], (hits & taken).float())


def chunk_sizes(bound: int, largest: int) -> tuple[int, int]:
    """Chunks as equal as may be: (slots of a chunk, slots of all), for `bound` slots or a few more.

    Chunks that are all full would leave up to one whole chunk of padding: 5,000 slots in chunks of at most
    4,096 are 2 x 2,560, not 2 x 4,096. They are whole sixteenths of the largest, so that a run's batches need
    few sizes: each is compiled for itself, and past eight torch.compile gives up.
    """
    number, grain = max(-(-bound // largest), 1), max(largest // 16, 64)
    chunk = min(-(-bound // (number * grain)) * grain, largest)
    chunk = max(chunk, -(-bound // number), 1)
    return chunk, chunk * number
