"""Time to the first token, and what prefill takes of it, from CUDA graphs and eagerly.

    python tests/gpu/bench_prefill.py                                  one JSON object a line
    python tests/gpu/bench_prefill.py --target MODEL --drafter HEAD --prompts 1x100,8x100

`ttft_ms` is the whole of `generate_ids` for so many prompts that come together, one token each;
`prefill_ms` is the device's share by the engine's own clock. Medians; every run has fresh prompts.
"""

import argparse
import json
import random
import statistics
import time

import torch

from eyas.bench.step_models import open_drafter, open_target
from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def timed(llm: LLM, count: int, length: int, repeats: int) -> tuple[float, float]:
    """Medians (ttft_ms, prefill_ms) of so many prompts of a length."""
    draw, size = random.Random(0), llm.target.config.vocab_size
    walls, prefills = [], []
    for _ in range(repeats + 2):
        prompts = [[draw.randrange(size) for _ in range(length)] for _ in range(count)]
        llm.stats.reset()
        begin = time.perf_counter()
        llm.generate_ids(prompts, PARAMS)
        walls.append(1e3 * (time.perf_counter() - begin))
        if llm.target.device.type == "cuda":
            torch.cuda.synchronize()
        llm._runner._clock.collect()
        prefills.append(1e3 * llm.stats.prefill_seconds)
    return statistics.median(walls[2:]), statistics.median(prefills[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="shape:smollm2-135m")
    parser.add_argument("--drafter", default="shape:peagle-4")
    parser.add_argument("--prompts", default="1x20,1x100,1x500,8x100,64x100")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    target = open_target(given.target, device=given.device, dtype=None)
    for name, enforce_eager in (("graphs", False), ("eager", True)):
        drafter = open_drafter(given.drafter, target).make(None, None)
        llm = LLM(target, drafter, max_model_len=1024, enforce_eager=enforce_eager)
        begin = time.perf_counter()
        llm.warm_prefill(1024)
        capture = time.perf_counter() - begin
        for prompts in given.prompts.split(","):
            count, length = map(int, prompts.split("x"))
            ttft, prefill = timed(llm, count, length, given.repeats)
            times = {"ttft_ms": round(ttft, 3), "prefill_ms": round(prefill, 3)}
            print(json.dumps({"way": name, "prompts": prompts, **times, "capture_s": round(capture, 1)}))


if __name__ == "__main__":
    main()
