"""EAGLE-3's training-time test: the head is trained on its own output, `steps` deep (arXiv 2503.01840).

Step s of every rollout runs at once: row a carries the token that is really next (teacher forcing, as EAGLE's
authors do) or what the head itself guessed at step s - 1, and the hidden state that step s - 1 gave for the
SAME row, at RoPE position a + s. So row a of step s is slot (a, s).

    step 0   (x[a+1], fc(features[a]))   -> guess x[a+2], state h1[a]
    step 1   (x[a+2], h1[a])             -> guess x[a+3], state h2[a]   ...

Gradients flow through the states of all steps; loss weights fall as decay^s. The teacher is the text's either
way, so a row whose own guess was another token learns what follows the text's: what decoding never asks for,
unless it is weighed down (`loss.reach`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.nn.attention import AttentionContext
from eyas.nn.rollout import TTTContext
from eyas.nn.staircase import StaircaseTTTContext, row_stairs
from eyas.training.metrics import draft_argmax
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots, make_slots


class Eagle3Objective:
    """Training-time test of `steps` steps; slots are [B, steps * n], step-major.

    `staircase` chooses attention by ranges (nn/staircase.py) instead of masks. With `guess_ids`, the target
    ids int64 [Vd] of the draft ids, steps are fed the head's own guesses instead of the text's tokens.
    """

    mean_over_first_depth = True

    def __init__(
        self,
        steps: int = 7,
        decay: float = 0.8,
        depth_weights: tuple[float, ...] | None = None,
        *,
        staircase: bool = False,
        guess_ids: Tensor | None = None,
    ) -> None:
        self.num_depths, self.staircase, self.guess_ids = steps, staircase, guess_ids
        self.depth_weights = depth_weights or tuple(decay**step for step in range(steps))

    def slots(self, rows: DraftRows, *, seed: int, max_supervised: int) -> Slots:
        """All anchors at all steps; nothing is drawn."""
        del seed, max_supervised
        return self.all_slots(rows)

    def all_slots(self, rows: DraftRows) -> Slots:
        """All anchors at all steps."""
        batch, n = rows.tokens.shape
        index = torch.arange(n, device=rows.tokens.device)
        anchors = index.repeat(self.num_depths).expand(batch, -1)
        depths = torch.arange(self.num_depths, device=index.device).repeat_interleave(n)
        slots = make_slots(rows, anchors, depths)
        return slots._replace(stairs=row_stairs(rows.segments)) if self.staircase else slots

    def forward(self, model: Eagle3Model, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        """Unroll the steps: features [B, n, A * D] -> normed [B, steps * n, D]."""
        n = rows.tokens.shape[1]
        stairs = slots.stairs
        context: AttentionContext = (
            TTTContext(rows.segments) if stairs is None else StaircaseTTTContext(stairs)
        )
        hidden = model.fuse(features)
        tokens = functional.pad(rows.tokens, (0, self.num_depths - 1))
        outputs: list[Tensor] = []
        for step in range(self.num_depths):
            fed = tokens[:, step : step + n]
            if step and self.guess_ids is not None:
                with torch.no_grad():
                    fed = self.guess_ids[draft_argmax(outputs[-1], model.lm_head.weight)]
            normed, hidden = model(model.embed(fed), hidden, rows.positions + step, context)
            outputs.append(normed)
        return torch.cat(outputs, dim=1)

    def bound(self, num_supervised: list[int]) -> int:
        """Each step supervises a supervised row at most once."""
        return self.num_depths * sum(num_supervised)
