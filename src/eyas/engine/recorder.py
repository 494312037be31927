"""Recording CUDA graphs: what is captured runs twice before, and all graphs share one pool of memory."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """Makes graphs; CUDA only. Graphs of one recorder must run one after another, on one stream."""

    def rehearse(self, function: Callable[[], object]) -> None:
        """Run what is to be captured twice: the first run compiles kernels and may allocate the rows of q."""
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        current.wait_stream(side)
        torch.cuda.synchronize()

    @cached_property
    def _pool(self) -> Any:
        """Memory that all graphs share."""
        return torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], T]) -> tuple[T, torch.cuda.CUDAGraph]:
        """What a function returns, and the graph of what it launched."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server) may talk to the device meanwhile: hence thread_local.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return result, graph
