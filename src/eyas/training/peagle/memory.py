"""How much memory a step needs, and into how many parts a sequence must be cut to fit a budget.

An estimate by counting, in bytes; what a run really peaked at is logged beside it. Counted are

    weights      weights, gradients, AdamW's two moments, the moving average, bfloat16 copies under autocast
    features     A * Dt + Dt numbers a row, from the target
    rows         what autograd keeps of depth-0 rows; keys and values of all of them, and their sums
    rollouts     what autograd keeps of the rollout slots of one part
    loss         normed and its gradient of one part, the output matrix's gradient, logits of one chunk
    transient    the widest intermediate of one layer's backward

Not counted: the target's own weights and activations, and what the allocator loses to fragments.
"""

from dataclasses import dataclass

from eyas.core.errors import ConfigError
from eyas.drafters.head_config import HeadConfig
from eyas.training.flops import layer_matrices
from eyas.training.peagle.partition import Mode, Partition

GIB = 2**30
KEPT = {True: 1.1, False: 2.5}
"""Bytes that autograd keeps over those counted here, compiled or not: eagerly every norm and every
elementwise step keeps its own inputs (counted: 2.1 times in float32, 2.7 in autocast)."""
MAX_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the estimate depends on besides the head."""

    batch_rows: int
    row_length: int
    num_rollout_slots: int
    """Of one row of the batch."""
    chunk: int
    trained: int
    """Numbers that are trained."""
    weight_bytes: int = 4
    compute_bytes: int = 2
    averaged: bool = False
    compiled: bool = True


def slot_numbers(head: HeadConfig) -> int:
    """Numbers that a compiled forward keeps of one slot: what feeds a matrix product or attention."""
    query, key = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    layer = 2 * head.hidden_size + 2 * query + 2 * key + 2 * head.intermediate_size
    return head.num_layers * layer + 2 * head.hidden_size


def predict(head: HeadConfig, shape: StepShape, partition: Partition) -> dict[str, int]:
    """Bytes by the names above, and their sum as "total"."""
    parts, batch, half = partition.num_parts, shape.batch_rows, shape.compute_bytes
    slot = int(slot_numbers(head) * half * KEPT[shape.compiled])
    rows, rollouts = batch * shape.row_length, batch * shape.num_rollout_slots
    share = -(-rollouts // parts)
    live_rows = {"shared": rows, "replayed": -(-rows // parts), "prefix": rows}[partition.mode]
    live = live_rows + share if partition.mode == "prefix" or parts == 1 else max(live_rows, share)
    keys = 2 * head.num_layers * head.num_kv_heads * head.head_dim
    past = 0 if parts == 1 or partition.mode == "prefix" else rows * keys * (half + 4)
    size, wide = head.hidden_size, shape.weight_bytes
    matrices = layer_matrices(head, 2 * size) + (head.num_layers - 1) * layer_matrices(head, size)
    matrices += head.feature_size * size + head.draft_vocab_size * size
    copies = matrices * half if wide != half else 0
    output = head.draft_vocab_size * size
    found = {
        "weights": shape.trained * wide * (5 if shape.averaged else 4) + copies,
        "features": rows * (head.feature_size + head.target_hidden_size) * half,
        "rows": live_rows * slot + past,
        "rollouts": share * slot,
        "loss": 2 * live * size * half
        + output * (4 + wide + half)
        + 16 * shape.chunk * head.draft_vocab_size,
        "transient": live * 4 * head.intermediate_size * half,
    }
    if partition.mode == "replayed" and parts > 1:
        # Rows go backward after the rollouts: only one of the two is kept at a time.
        larger = max(live_rows, share) * slot
        found["rows"], found["rollouts"] = past, larger
    return {**found, "total": sum(found.values())}


def choose(head: HeadConfig, shape: StepShape, budget: int, mode: Mode | None = None) -> Partition:
    """Fewest parts whose prediction fits `budget` bytes; `shared` while that suffices, else `replayed`.

    ConfigError where MAX_PARTS parts are still too much, with what they would need.
    """
    modes: tuple[Mode, ...] = ("shared", "replayed") if mode is None else (mode,)
    best: tuple[int, Partition] | None = None
    for name in modes:
        parts = 1
        while parts <= MAX_PARTS:
            partition = Partition(parts, name)
            total = predict(head, shape, partition)["total"]
            if total <= budget:
                return partition
            if best is None or total < best[0]:
                best = (total, partition)
            parts = parts + 1 if parts < 4 else parts + parts // 2
    assert best is not None
    raise ConfigError(
        f"a step needs about {best[0] / GIB:.1f} GiB even in {best[1].num_parts} parts, and the budget is "
        f"{budget / GIB:.1f}: raise run.memory_budget_gib, or lower data.seq_len, run.batch_rows, loss.chunk"
    )
