"""Fill Triton's cache with the kernels of `eyas bench step`, for several targets and switches at once.

    python tests/gpu/warm.py
    python tests/gpu/warm.py --targets shape:smollm2-135m --pdl off,late,auto --acceptance 3.7 --steps 24

Prints seconds and failures as JSON. Afterwards the same options of `eyas bench step` find every kernel
compiled: what it is given here (context, K, steps) should be what it is given there. One target alone needs
no more than `eyas bench step --warm 14`.
"""

import argparse
import json
import os

from eyas.bench.step_method import StepOptions
from eyas.bench.step_warm import jobs_of, warm
from eyas.kernels.settings import PDL


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default="shape:smollm2-135m,shape:llama-3.1-8b")
    parser.add_argument("--drafters", default="shape:peagle-4,shape:eagle3")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--pdl", default="late", help=f"of {', '.join(PDL)}")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--acceptance", type=float, default=3.7)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--no-invariant", action="store_true")
    parser.add_argument("--both", action="store_true", help="with and without invariance")
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    jobs = []
    for pdl in given.pdl.split(","):
        options = StepOptions(
            num_draft_tokens=given.k,
            batch_sizes=tuple(int(batch) for batch in given.batch.split(",")),
            context=given.context,
            acceptance=given.acceptance,
            num_steps=given.steps,
            invariant=not given.no_invariant,
            both=given.both,
            pdl=pdl,
        )
        for target in given.targets.split(","):
            drafters = [spec for spec in given.drafters.split(",") if spec not in ("", "none")]
            jobs += jobs_of(target, drafters, options, given.device, None)
    print(json.dumps({"jobs": len(jobs), **warm(jobs, given.processes)}))


if __name__ == "__main__":
    main()
