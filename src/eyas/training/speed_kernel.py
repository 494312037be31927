"""Time of the staircase kernels alone, for each size of tiles: how slot_tiles.candidates was chosen."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from eyas.core.model_config import TargetConfig
from eyas.kernels.slots import stairs_attention
from eyas.training.peagle.cod import capacities, chain_lengths
from eyas.training.peagle.layout import rollout_slots
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots
from eyas.training.timing import Clock

TILES = {
    "forward": [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (128, 64, 4, 3),
        (128, 32, 4, 4),
    ],
    "queries": [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (128, 128, 8, 2),
        (64, 128, 8, 2),
        (128, 32, 4, 3),
    ],
    "keys": [
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (32, 128, 8, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 2),
        (32, 64, 4, 3),
    ],
}
"""(rows, keys, warps, stages) by kernel."""


def make_slots(length: int, device: torch.device, *, num_depths: int = 8, retention: float = 0.8) -> Slots:
    """Slots of one document, seven eighths of it supervised."""
    index = torch.arange(length, device=device)[None]
    rows = DraftRows(index, index, torch.zeros_like(index), index >= length // 8, index)
    generator = torch.Generator(device).manual_seed(0)
    uniforms = torch.rand(num_depths - 1, 1, length, generator=generator, device=device)
    lengths = chain_lengths(rows.supervised, rows.segments, uniforms, retention=retention)
    sizes = capacities(length - length // 8, length, num_depths, retention=retention)
    return rollout_slots(rows, lengths, sum(sizes))


def kernel_cases(length: int, target: TargetConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds and TFLOP/s of forward, and of forward and backward, with each size of tiles."""
    from eyas.kernels.triton.slot_tiles import FORCED, Tiles

    slots = make_slots(length, device)
    assert slots.stairs is not None
    stairs, size = slots.stairs, slots.anchors.shape[1]
    heads, kv, width = target.num_heads, target.num_kv_heads, target.head_dim

    def noise(rows: int, count: int) -> Tensor:
        return torch.randn(1, rows, count, width, device=device, dtype=torch.bfloat16).requires_grad_()

    inputs = [
        noise(size, heads),
        *(noise(length, kv) for _ in "kv"),
        *(noise(size - length, kv) for _ in "kv"),
    ]
    seen = (stairs.last - stairs.first).sum() + (
        torch.arange(size - length, device=device) + 1 - stairs.own
    ).sum()
    flops = 4.0 * heads * width * float(seen)

    def forward() -> Tensor:
        q, k, v, own_k, own_v = inputs
        return stairs_attention(q, k, v, own_k, own_v, stairs, scale=width**-0.5)[0]

    def both() -> None:
        torch.autograd.grad(forward().sum(), inputs)

    for kernel, sizes in TILES.items():
        for tiles in sizes:
            record: dict[str, Any] = {"kernel": kernel, "tiles": tiles, "length": length, "slots": size}
            FORCED[kernel] = Tiles(*tiles)
            try:
                if kernel == "forward":
                    ms = _time(lambda: forward().detach())
                    record |= {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1)}
                else:
                    ms = _time(both)
                    record |= {"ms_both": round(ms, 3), "tflops_both": round(3.5 * flops / ms / 1e9, 1)}
            except RuntimeError as error:
                record["error"] = str(error)[:300]
            finally:
                del FORCED[kernel]
            yield record


def _time(call: Callable[[], Any], repeats: int = 10) -> float:
    """Milliseconds of a call, the best of `repeats`."""
    clock, best = Clock(torch.device("cuda")), float("inf")
    for attempt in range(repeats + 2):
        clock.start()
        call()
        clock.lap("call")
        passed = clock.take()["call"]
        if attempt >= 2:  # the first ones compile
            best = min(best, 1000 * passed)
    return best
