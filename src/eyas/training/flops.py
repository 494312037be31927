"""Floating-point operations that a training step needs, counted from the slots actually trained.

Padding, dropped slots and recomputation count as nothing, so utilisation rises only when useful work gets
faster. A product of [T, a] and [a, b] is 2 T a b; forward and backward of a trained matrix are three such
products.

    drafter   6 * matrices * slots        and 12 * H * dh * layers * keys      (scores, mixing; times three)
    loss      6 * D * Vd * supervised     and 2 * Dt * Vd * supervised         (the teacher's logits: forward
    only) target    2 * matrices * tokens       and 4 * H * dh * layers * keys       and 2 * Dt * V * tokens

`keys` is the sum over slots (tokens) of how many keys each attends to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.model_config import TargetConfig
from eyas.drafters.head_config import HeadConfig
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots


class Work(NamedTuple):
    """Counts of a batch; add them up over a window."""

    tokens: Tensor
    token_keys: Tensor
    slots: Tensor
    slot_keys: Tensor
    supervised: Tensor


def count_work(rows: DraftRows, slots: Slots) -> Tensor:
    """The numbers of `Work`, float64 [5], on the device.

    A document of 3 tokens: 3 tokens, 1 + 2 + 3 keys. Slot (anchor at position p, depth k) has p + 1 + k keys.
    """
    real = rows.segments >= 0
    there = slots.segments >= 0
    anchored = rows.positions.gather(1, slots.anchors) + 1 + slots.depths
    sums = (
        real.sum(),
        (real * (rows.positions + 1)).sum(),
        there.sum(),
        (there * anchored).sum(),
        slots.supervised.sum(),
    )
    return torch.stack(sums).to(torch.float64)


def layer_matrices(config: HeadConfig | TargetConfig, input_size: int) -> int:
    """Weights in the matrices of one decoder layer whose attention reads `input_size` numbers."""
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = input_size * (heads + 2 * keys) + heads * config.hidden_size
    return attention + 3 * config.hidden_size * config.intermediate_size


def step_flops(
    work: Work, head: HeadConfig, target: TargetConfig, *, online: bool = True, frozen: bool = False
) -> float:
    """Operations of everything counted in `work` (plain numbers or 0-d tensors).

    Not `online`, the target's own forward is left out: its features were captured before. `frozen`, only the
    correction by the token before trains (head.train=markov): the drafter has a forward alone.
    """
    size = head.hidden_size
    matrices = layer_matrices(head, 2 * size) + (head.num_layers - 1) * layer_matrices(head, size)
    tokens, token_keys, slots, slot_keys, supervised = (float(count) for count in work)
    passes = 1 if frozen else 3
    drafter = 2 * matrices * slots + 4 * head.num_heads * head.head_dim * head.num_layers * slot_keys
    drafter = passes * (drafter + 2 * head.feature_size * size * tokens)
    output = head.draft_vocab_size * supervised
    hidden_form = head.markov_form == "hidden"
    columns = size if hidden_form else size + head.markov_rank
    # A frozen lm_head needs no gradient of its own; one with the tables' columns is one matrix with them.
    loss = (4 if frozen and hidden_form else 6) * columns * output + 2 * target.hidden_size * output
    if hidden_form:
        # W2 of every slot, W1h of every slot, W1e of every token; frozen, their inputs need no gradient.
        inputs = 4 if frozen else 6
        drafter += head.markov_rank * size * ((6 + inputs) * slots + inputs * tokens)
    teacher = 2 * target.num_layers * layer_matrices(target, target.hidden_size) * tokens
    teacher += 4 * target.num_heads * target.head_dim * target.num_layers * token_keys
    teacher += 2 * target.hidden_size * target.vocab_size * tokens
    return drafter + loss + (teacher if online else 0.0)
