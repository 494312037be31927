"""One run on 1 .. N processes: torchrun starts them, FSDP2 shards weights, gradients and optimizer states.

    torchrun --nproc-per-node 2 -m eyas train recipes/train/smollm2-135m-peagle.yaml

The recipe means the same on any number: a step's rows are shared out, its loss is divided by the supervised
slots of ALL of them, and gradients are summed. This is the only file that knows torch.distributed.

A step is one forward in FSDP2's eyes. `World.backward` gathers the weights, lets the trainer run whatever
forwards and backwards the step has (they leave gradients on the gathered weights), and then sends one
backward of value zero through FSDP2's hooks, which reduce the gradients to the shards, once a step. So
neither objectives nor losses know that there are shards, and gradient accumulation costs no traffic. A head
is small: it is one group; what is sharded at rest are the weights, the optimizer's moments and the moving
average.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas.core.errors import ConfigError
from eyas.targets.decoder import Decoder

PATIENCE = timedelta(hours=4)
"""How long ranks wait for each other: rank 0 decodes prompts and writes files while the others wait."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rows begin .. end - 1 of batch `micro` of a step."""

    micro: int
    begin: int
    end: int


def shares(rank: int, size: int, *, accumulation: int, batch_rows: int) -> list[Share]:
    """What a rank runs of a step of `accumulation` batches.

    Whole batches where their number allows, else rows of every batch; ConfigError where neither divides.
    rank 1 of 2: accumulation 4 -> batches 1 and 3; accumulation 1, batch_rows 8 -> rows 4 .. 7 of batch 0.
    """
    if accumulation % size == 0:
        return [Share(micro, 0, batch_rows) for micro in range(rank, accumulation, size)]
    if batch_rows % size == 0:
        part = batch_rows // size
        return [Share(micro, rank * part, (rank + 1) * part) for micro in range(accumulation)]
    raise ConfigError(
        f"run.batch_rows={batch_rows} and run.accumulation={accumulation}: one of them must be a multiple of "
        f"the {size} processes"
    )


class _Whole(nn.Module):
    """Calls what it is given; its forward is what FSDP2 hangs its hooks on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], None]) -> Tensor:
        """Run `call`, return a zero that the hooks can go backward through."""
        call()
        return next(p for p in self.model.parameters() if p.requires_grad).flatten()[0] * 0.0


class World:
    """This process among the run's processes; alone, everything here is a plain call."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = None if device is None else torch.device(device)
        """Where this rank computes; None where nobody says."""
        self._root: Any = None
        self._mesh: Any = None

    @classmethod
    def join(cls, device: str | None = None) -> "World":
        """The world that torchrun's variables describe (alone without them); `device` is "cpu" or "cuda"."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=device)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        local = int(os.environ["LOCAL_RANK"])
        if kind == "cuda":
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"process {local} of this machine has no GPU: {torch.cuda.device_count()} here"
                )
            torch.cuda.set_device(local)
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
        world = cls(int(os.environ["RANK"]), size, f"cuda:{local}" if kind == "cuda" else kind)
        world._mesh = torch.distributed.device_mesh.init_device_mesh(kind, (size,))
        return world

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.rank == 0

    # -- weights ----------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> None:
        """Give every rank its part of the head's parameters, which become DTensors."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        self._root = fully_shard(_Whole(model), mesh=self._mesh, reshard_after_forward=False)

    def shard_target(self, decoder: Decoder) -> None:
        """Give every rank its part of the frozen target's layers; they are gathered one at a time."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        for layer in decoder.layers:
            fully_shard(layer, mesh=self._mesh)

    def backward(self, run: Callable[[], None], parameters: list[nn.Parameter]) -> None:
        """Call `run`, which makes gradients on whole weights; then every rank holds its part of their sum."""
        if self._root is None:
            run()
            return
        torch.autograd.backward(self._root(run))
        # FSDP2 takes the mean over ranks; the step's loss is a sum.
        parts = [self.local(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(parts, float(self.size))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole weights inside; nothing may be changed."""
        if self._root is None:
            yield
            return
        self._root.unshard()
        try:
            yield
        finally:
            self._root.reshard()

    @staticmethod
    def local(tensor: Tensor) -> Tensor:
        """This rank's part of a sharded tensor, sharing its storage."""
        plain = tensor.detach()
        return plain.to_local() if isinstance(plain, DTensor) else plain

    @staticmethod
    def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """The whole of a sharded tensor, or of a local part that is cut as `like` is; all ranks must call."""
        plain = tensor.detach()
        if isinstance(like, DTensor):
            plain = DTensor.from_local(
                plain, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
        return plain.full_tensor() if isinstance(plain, DTensor) else plain

    @staticmethod
    def cut(whole: Tensor, like: Tensor) -> Tensor:
        """`whole`, cut and placed as the parameter `like` is."""
        placed = whole.to(like.device)
        if not isinstance(like, DTensor):
            return placed
        return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)

    # -- values -----------------------------------------------------------------------------------------

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks."""
        if self.size == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    def agree(self, value: float) -> float:
        """Rank 0's value: clocks differ, and ranks must not."""
        if self.size == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(held, 0)
        return float(held)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            torch.distributed.barrier()

    def leave(self) -> None:
        """Close the process group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
