"""What a run will need, before it begins: memory by part, and time from a few real steps.

On CUDA the recipe's own steps are run (their results are thrown away) and the device says its peak. Elsewhere
the trainer must be made with one row a batch: its step is timed, and what autograd keeps of that row is
counted; both grow with the rows of a step.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.training.config import RunSection
from eyas.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes by part, seconds a step and of the whole run."""

    memory: dict[str, int]
    """Bytes by part; "peak measured" where a device said it."""
    seconds_per_step: float
    steps: int | None
    """None where only the clock ends the run."""

    @property
    def total_bytes(self) -> int:
        """Peak as measured, or the sum of the parts."""
        return self.memory.get("peak measured", sum(self.memory.values()))

    @property
    def hours(self) -> float | None:
        """Length of the run."""
        return None if self.steps is None else self.seconds_per_step * self.steps / 3600


def predict(trainer: Trainer, run: RunSection, *, steps: int = 2) -> Prediction:
    """Run `steps` steps after one to warm up; `run` is the real recipe's where the trainer's is cut down."""
    window = trainer.new_window()
    trainer.advance(window)
    device = trainer.target.device
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    for _ in range(steps):
        trainer.advance(window)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / steps
    own = trainer.config.run
    grown = run.batch_rows * run.accumulation / (own.batch_rows * own.accumulation)
    memory = memory_parts(trainer, rows=run.batch_rows)
    if device.type == "cuda":
        memory["peak measured"] = torch.cuda.max_memory_allocated()
    # An epoch of the real recipe has as many rows, and fewer, larger steps.
    total = None if trainer.total_steps is None else max(1, round(trainer.total_steps / grown))
    return Prediction(memory, seconds * grown, run.max_steps if run.epochs is None else total)


def memory_parts(trainer: Trainer, *, rows: int) -> dict[str, int]:
    """Bytes of a step over `rows` rows, by what holds them."""
    head, loss = trainer.model.config, trainer.config.loss
    decoder = trainer.target.decoder
    trained = sum(parameter.numel() for parameter in trainer.parameters)
    width = 2 if trainer.step.autocast is not None else 4
    taken = trainer.config.data.seq_len * (head.feature_size + head.target_hidden_size)
    return {
        "target": sum(p.numel() * p.element_size() for p in decoder.parameters()),
        "head, gradients, moments": trained * 16 + (trained * 4 if trainer.average is not None else 0),
        "features": rows * taken * decoder.embed_tokens.weight.element_size(),
        "activations": rows * saved_bytes(trainer),
        "loss": loss.chunk * head.draft_vocab_size * (2 * width + 16)
        + 4 * head.draft_vocab_size * head.hidden_size,
    }


def saved_bytes(trainer: Trainer) -> int:
    """What autograd keeps of one row's forward, without weights."""
    item = trainer.prepare()[0].part(0, 1, 0)
    known = {p.untyped_storage().data_ptr() for p in (*trainer.model.parameters(), *trainer.model.buffers())}
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    size = trainer.model.config.feature_size
    features = torch.zeros(*item.rows.tokens.shape, size, device=trainer.target.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), trainer.step.autocasting():
        output = trainer.objective.forward(trainer.model, item.rows, features, item.slots)
    del output
    return sum(seen.values())
