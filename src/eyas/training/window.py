"""What happened since the last log record: sums on the device, read back once."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from eyas.training.flops import Work
from eyas.training.parallel import World
from eyas.training.step import StepResult
from eyas.training.timing import PHASES, Clock


class Window:
    """Sums over steps; `summary` makes them the fields of a log record."""

    def __init__(self, num_depths: int, device: torch.device, clock: Clock) -> None:
        self.clock = clock
        clock.take()
        self.loss, self.norm, self.work = (
            torch.zeros(size, device=device, dtype=torch.float64) for size in ((), (), len(Work._fields))
        )
        self.hits, self.counts = torch.zeros(2, num_depths, device=device)
        self.steps = self.tokens = 0
        self.started = time.monotonic()

    def add(self, result: StepResult, work: Tensor) -> None:
        """Take in a batch."""
        self.loss += result.loss
        self.hits += result.hits
        self.counts += result.counts
        self.work += work

    def close_step(self, tokens: int, norm: Tensor) -> None:
        """Take in an optimizer step of `tokens` tokens of all ranks and the norm of its gradient."""
        self.norm += norm
        self.steps += 1
        self.tokens += tokens

    def finite(self, world: World) -> bool:
        """Whether losses and gradients of all its steps are numbers; waits for the device."""
        return math.isfinite(float(world.sum(self.loss))) and math.isfinite(float(self.norm))

    def summary(self, world: World) -> dict[str, Any]:
        """Loss, accuracy by depth, milliseconds a step by phase, tokens a second; all ranks must call.

        `work` is what the ranks did (training/flops.py) in `window_seconds` of wall clock, for utilisation.
        """
        loss, hits, counts, work = (world.sum(x) for x in (self.loss, self.hits, self.counts, self.work))
        seconds = max(time.monotonic() - self.started, 1e-9)
        laps = self.clock.take()
        return {
            "loss": float(loss) / self.steps,
            "grad_norm": round(float(self.norm) / self.steps, 6),
            "accuracy": [round(share, 4) for share in (hits / counts.clamp(min=1)).tolist()],
            "tokens_per_second": round(self.tokens / seconds, 1),
            # Slots of each depth that were trained, as a share of those of depth 0.
            "supervision": [round(share, 4) for share in (counts / counts[:1].clamp(min=1)).tolist()],
            "ms": {name: round(1000 * laps.get(name, 0.0) / self.steps, 2) for name in PHASES},
            "work": work.tolist(),
            "window_seconds": seconds,
        }
