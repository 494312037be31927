"""Several timing processes on one device: compiling side by side, timed one after another.

Most of a short timing run is compilation on the host, which can go on while another process is timed. Each
process takes the memory that its case needs before it begins (else two of them would run out of it together),
and holds a lock while it times. The first step of a case, which compiles, runs unlocked and may disturb
a lap of another: the best lap of a case is the one to read.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from eyas.training.peagle.memory import GIB

SLACK = 1.12
"""Of the predicted peak: the allocator loses some to fragments, and predictions of long rows are off."""
POLL_SECONDS = 0.3


class Turn:
    """A place in the queue at `lock`, a file; None: nobody else is on the device."""

    def __init__(self, lock: Path | None, device: torch.device) -> None:
        self.lock, self.device = lock, device

    @contextmanager
    def alone(self, suffix: str = "") -> Iterator[None]:
        """Hold the lock."""
        if self.lock is None:
            yield
            return
        with Path(f"{self.lock}{suffix}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def take_memory(self, size: float) -> None:
        """Wait until `size` bytes are free on the device, then have this process's allocator keep them.

        Returns at once where there is no lock, no CUDA device, or less memory than that in all.
        """
        if self.lock is None or self.device.type != "cuda":
            return
        wanted = int(size * SLACK)
        if wanted > torch.cuda.get_device_properties(self.device).total_memory - GIB:
            return
        while True:
            with self.alone(".memory"):
                if torch.cuda.mem_get_info(self.device)[0] > wanted + GIB // 2:
                    torch.empty(wanted, dtype=torch.uint8, device=self.device)
                    return
            time.sleep(POLL_SECONDS)
