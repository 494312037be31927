"""A whole step replayed alone and many times in a row, beside the device's clocks: what a busy loop costs.

    python tests/gpu/sustained.py --target shape:llama-3.1-8b --drafter shape:peagle-4 --batch 64

`eyas bench step` times a step alone, after a pause, and the engine's loop back to back. Where products of
many rows draw all the power there is, the second runs at lower clocks: its "idle" is not the host's. Prints
one JSON line: milliseconds alone, of the first, middle and last replays in a row, what nvidia-smi saw.
"""

import argparse
import json
import statistics
import subprocess
import threading
import time

import torch

from eyas.bench.step_clock import capture
from eyas.bench.step_models import open_drafter, open_target
from eyas.bench.step_rig import make_rig

FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


class Watch(threading.Thread):
    """Asks nvidia-smi again and again until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[list[str]] = []
        self.over = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        while not self.over.is_set():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.seen.append([part.strip() for part in done.stdout.split("\n")[0].split(",")])
            self.over.wait(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="shape:llama-3.1-8b")
    parser.add_argument("--drafter", default="shape:peagle-4", help="none: plain decoding")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--acceptance", type=float, default=3.7)
    parser.add_argument("--replays", type=int, default=120)
    given = parser.parse_args()
    target = open_target(given.target, device="cuda", dtype=None)
    drafter = None if given.drafter == "none" else open_drafter(given.drafter, target).make(given.k, None)
    shared = {"batch": given.batch, "context": given.context, "acceptance": given.acceptance}
    rig = make_rig(target, drafter, **shared)
    graph = capture(rig.step)

    def replays(count: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in marks:
            rig.restore()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]

    replays(2)
    alone = []
    for _ in range(5):
        time.sleep(0.3)
        torch.cuda._sleep(20_000_000)
        alone += replays(1)
    watch = Watch()
    watch.start()
    row = replays(given.replays)
    watch.over.set()
    watch.join()
    third = len(row) // 3
    parts = [statistics.median(row[at : at + third]) for at in (0, third, 2 * third)]
    record = {"batch": given.batch, "drafter": given.drafter, "alone_ms": statistics.median(alone)}
    print(json.dumps(record | {"in_a_row_ms": parts, "fields": FIELDS, "seen": watch.seen}))


if __name__ == "__main__":
    main()
