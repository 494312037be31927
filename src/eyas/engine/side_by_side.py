"""Several engines over one target at once, each on a CUDA stream of its own, from one thread.

A small batch leaves most of a GPU idle, and its bits are those of its own graphs whatever runs beside it. So
N engines answer N times as many prompts in little more time, as long as the host keeps up: it goes round and
moves each engine on by a step, of which each waits for its own device work only.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.intake import Group
from eyas.engine.llm import LLM


class SideBySide:
    """Engines that take turns.

    Args:
        make: makes an engine; all are over the same target.
        count: how many.
        device: the target's.
    """

    def __init__(self, make: Callable[[], LLM], count: int, device: torch.device) -> None:
        self.llms: list[LLM] = []
        self._streams: list[torch.cuda.Stream | None] = []
        for _ in range(count):
            stream = None
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # weights, and what the engine before has filled
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with _on(stream):
                self.llms.append(make())
            self._streams.append(stream)

    def generate_ids(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], size: int
    ) -> list[list[int]]:
        """Output ids of the prompts, answered in batches of `size` by whichever engine is free.

        Example, two engines, five prompts, size 2: prompts 0 and 1 | 2 and 3, then 4 by the first that ends.
        """
        begins = deque(range(0, len(prompts), size))
        outputs: list[list[int]] = [[] for _ in prompts]
        at_work: list[tuple[int, list[Group]] | None] = [None] * len(self.llms)
        while begins or any(at_work):
            for place, (llm, stream) in enumerate(zip(self.llms, self._streams, strict=True)):
                with _on(stream):
                    if at_work[place] is None and begins:
                        part = slice(begin := begins.popleft(), begin + size)
                        groups = llm.new_intake().groups(prompts[part], params[part])
                        for group in groups:
                            llm.submit(group)
                        at_work[place] = begin, groups
                    work = at_work[place]
                    if work is not None and not llm.step():
                        begin, groups = work
                        outputs[begin : begin + size] = [group.requests[0].output_ids for group in groups]
                        at_work[place] = None
        return outputs


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
