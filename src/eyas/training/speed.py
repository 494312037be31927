"""Speed and memory of training steps on this device, from random features: no model, no data.

    python -m eyas.training.speed --length 8192 --parts 1 4 --weights bfloat16
    python -m eyas.training.speed --objective eagle3 --length 4096 32768
    python -m eyas.training.speed --way dense flex --length 8192
    python -m eyas.training.speed --kernel --length 8192

One JSON object a line, one line a case. A step is forward, backward, clipping and AdamW of the drafter; the
target is not run. Seven eighths of a row are supervised. Utilisation counts the slots that are really
trained (training/flops.py) against a large matrix product in bfloat16 on this device.

Ways: staircase (this package's), dense (one mask of slots x slots, or EAGLE-3's masks), flex (FlexAttention
over a block mask of the same slots ordered by depth). A way that does not fit says "out of memory". All ways
begin with the same weights and draw the same slots: their first losses differ by rounding alone.

With `--turn FILE` several such processes may share a device: they compile side by side and are timed in turn
(training/speed_turn.py).
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eyas.core.model_config import TargetConfig
from eyas.core.vocab_map import VocabMap
from eyas.data.loader import Batch
from eyas.drafters.artifact import make_model
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.shapes import head_shape
from eyas.nn.random_weights import fill
from eyas.targets.shapes import SHAPES
from eyas.training.capture import Captured
from eyas.training.config import LossSection
from eyas.training.flops import Work, count_work, step_flops
from eyas.training.objectives.base import Objective
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.peagle.memory import GIB, StepShape, choose, predict
from eyas.training.peagle.partition import Partition
from eyas.training.rivals import DensePEagle, FlexPEagle
from eyas.training.rows import draft_rows
from eyas.training.speed_turn import Turn
from eyas.training.step import Prepared, TrainStep
from eyas.training.timing import gemm_rate

NUM_DEPTHS, RETENTION, TTT_STEPS = 8, 0.8, 7


@dataclass(frozen=True, slots=True)
class Case:
    """One line of output."""

    objective: str
    way: str
    length: int
    parts: int
    mode: str
    weights: str


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time training steps of a drafter on random features.")
    parser.add_argument("--objective", choices=["peagle", "eagle3"], default="peagle")
    parser.add_argument("--way", nargs="+", choices=["staircase", "dense", "flex"], default=["staircase"])
    parser.add_argument("--length", nargs="+", type=int, default=[8192])
    parser.add_argument("--parts", nargs="+", type=int, default=[1], help="peagle: parts of a row")
    parser.add_argument("--mode", nargs="+", choices=["shared", "replayed", "prefix"], default=["shared"])
    parser.add_argument(
        "--case", nargs="+", default=[], metavar="LENGTH:PARTS:MODE", help="peagle: just these"
    )
    parser.add_argument("--budget-gib", type=float, help="peagle: choose parts and mode for this budget")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--shape", choices=sorted([*SHAPES]), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4, help="peagle: layers of the drafter")
    parser.add_argument("--chunk", type=int, default=2048, help="slots whose logits are held at a time")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, help="no further steps once they took so long")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, the first of which compiles")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turn", type=Path, metavar="FILE", help="share the device: take turns by this lock")
    parser.add_argument("--need-gib", type=float, default=0.0, help="with --turn: memory of a case at least")
    parser.add_argument("--kernel", action="store_true", help="time the attention kernel alone, tile by tile")
    return parser.parse_args(arguments)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every combination that makes sense."""
    for case in args.case:
        length, parts, mode = case.split(":")
        yield Case("peagle", "staircase", int(length), int(parts), mode, args.weights)
    for length in args.length if not args.case else ():
        for way in args.way:
            if args.objective == "eagle3" or way != "staircase":
                yield Case(args.objective, way, length, 1, "shared", args.weights)
                continue
            for parts in args.parts:
                for mode in args.mode if parts > 1 else ["shared"]:
                    yield Case(args.objective, way, length, parts, mode, args.weights)


def make_objective(case: Case) -> Objective:
    """The objective with the way's attention."""
    staircase = case.way == "staircase"
    if case.objective == "eagle3":
        return Eagle3Objective(TTT_STEPS, staircase=staircase)
    kinds = {"staircase": PEagleObjective, "dense": DensePEagle, "flex": FlexPEagle}
    return kinds[case.way](NUM_DEPTHS, RETENTION, staircase=True)


def empty_head(case: Case, target: TargetConfig, layers: int, table: Tensor) -> Eagle3Model:
    """A drafter that trains everything, without weights; its embeddings too if `table` is on "meta"."""
    spec = "shape:eagle3" if case.objective == "eagle3" else f"shape:peagle-{layers}"
    config = replace(head_shape(spec, target), trained_embedding=case.objective == "peagle")
    with torch.device("meta"):
        return make_model(config, table)


def make_head(case: Case, target: TargetConfig, layers: int, device: torch.device) -> Eagle3Model:
    """A drafter of random weights."""
    dtype = getattr(torch, case.weights)
    if case.objective == "peagle":
        table = torch.empty(target.vocab_size, target.hidden_size, device="meta")
    else:
        table = torch.randn(target.vocab_size, target.hidden_size, device=device).mul_(0.02).to(dtype)
    model = empty_head(case, target, layers, table)
    fill(model, device=device, dtype=dtype, std=0.02, seed=0)
    model.rotary.to(device)
    model.requires_grad_(requires_grad=True)
    return model


def make_batch(length: int, target: TargetConfig, aux: int, device: torch.device) -> tuple[Batch, Captured]:
    """One document that fills a row, and what a target might have said about it."""
    generator = torch.Generator(device).manual_seed(0)
    index = torch.arange(length, device=device, dtype=torch.int32)[None]
    ids = torch.randint(0, target.vocab_size - 1, (1, length), generator=generator, device=device)
    batch = Batch(ids.int(), torch.zeros_like(index), index, index >= length // 8)

    def noise(width: int) -> Tensor:
        return torch.randn(1, length, width, generator=generator, device=device, dtype=torch.bfloat16)

    choices = torch.randint(0, target.vocab_size, (1, length), generator=generator, device=device)
    return batch, Captured(noise(aux * target.hidden_size), noise(target.hidden_size), choices)


def trained_numbers(model: Eagle3Model) -> int:
    """Numbers that the optimizer changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def predicted_bytes(case: Case, args: argparse.Namespace, target: TargetConfig) -> int:
    """Peak of a case that memory.py can predict, else 0."""
    if case.objective != "peagle" or case.way != "staircase":
        return 0
    model = empty_head(
        case, target, args.layers, torch.empty(target.vocab_size, target.hidden_size, device="meta")
    )
    supervised = case.length - case.length // 8
    sizes = PEagleObjective(NUM_DEPTHS, RETENTION, staircase=True).capacities(supervised, case.length)
    shape = step_shape(case, args, trained_numbers(model), sum(sizes))
    return predict(model.config, shape, Partition(case.parts, case.mode))["total"]  # type: ignore[arg-type]


def step_shape(case: Case, args: argparse.Namespace, trained: int, num_rollout_slots: int) -> StepShape:
    """What memory.py wants to know."""
    return StepShape(
        batch_rows=1,
        row_length=case.length,
        num_rollout_slots=num_rollout_slots,
        chunk=args.chunk,
        trained=trained,
        weight_bytes=getattr(torch, case.weights).itemsize,
        compute_bytes=2 if args.device.startswith("cuda") else 4,
        compiled=not args.eager,
    )


def run_case(case: Case, args: argparse.Namespace, rate: float, turn: Turn) -> dict[str, Any]:
    """Time one case."""
    device, target = torch.device(args.device), SHAPES[args.shape]
    torch.manual_seed(0)
    turn.take_memory(max(args.need_gib * GIB, predicted_bytes(case, args, target)))
    cuda = device.type == "cuda"
    autocast = torch.bfloat16 if case.weights == "float32" and cuda else None
    model = make_head(case, target, args.layers, device)
    objective = make_objective(case)
    batch, captured = make_batch(case.length, target, len(model.config.aux_layers), device)
    if not cuda or autocast is None:
        dtype = model.fc.weight.dtype
        captured = Captured(captured.features.to(dtype), captured.hidden.to(dtype), captured.choices)
    draft_vocab = model.config.draft_vocab_size
    stride = target.vocab_size // draft_vocab
    vocab_map = VocabMap(torch.arange(draft_vocab) * stride, target.vocab_size)
    head = torch.randn(target.vocab_size, target.hidden_size, device=device).mul_(0.02).to(torch.bfloat16)
    decoder: Any = SimpleNamespace(lm_head_weight=head, embed_tokens=None)
    stand_in: Any = SimpleNamespace(device=device, decoder=decoder, config=target)
    # Slots whose teacher stands outside the draft vocabulary are trained too, so that none is idle.
    loss = LossSection(chunk=args.chunk, oov="keep")
    rows = draft_rows(batch)
    supervised = int(rows.supervised.sum())
    partition, num_rollout_slots = Partition(case.parts, case.mode), 0  # type: ignore[arg-type]
    if isinstance(objective, PEagleObjective):
        num_rollout_slots = sum(objective.capacities(supervised, case.length))
    shape = step_shape(case, args, trained_numbers(model), num_rollout_slots)
    if isinstance(objective, PEagleObjective) and args.budget_gib is not None:
        partition = choose(model.config, shape, int(args.budget_gib * GIB))
    step = TrainStep(
        stand_in,
        model,
        vocab_map,
        objective,
        loss,
        autocast=autocast,
        compiled=not args.eager,
        partition=partition,
    )
    del head
    decoder.lm_head_weight = step.teacher_weight
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), fused=cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def one_step(seed: int) -> tuple[Prepared, Tensor]:
        slots = objective.slots(rows, seed=seed, max_supervised=supervised)
        prepared = Prepared(batch, rows, slots, objective.bound([supervised]))
        loss = step.learn(prepared, captured, step.normaliser(prepared)).loss
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return prepared, loss

    began = time.perf_counter()
    _, first = one_step(0)  # compiles
    _wait(device)
    startup = time.perf_counter() - began
    laps = []
    with turn.alone():
        for seed in range(1, args.warmup):
            one_step(seed)
        _wait(device)
        for seed in range(args.steps):
            began = time.perf_counter()
            prepared, _ = one_step(100 + seed)
            _wait(device)
            laps.append(time.perf_counter() - began)
            if args.seconds is not None and sum(laps) >= args.seconds:
                break
    seconds = sorted(laps)[len(laps) // 2]
    work = Work(*count_work(prepared.rows, prepared.slots).tolist())
    flops = step_flops(work, model.config, target, online=False)
    found: dict[str, Any] = {
        "num_parts": partition.num_parts,
        "partition_mode": partition.mode,
        "step_seconds": round(seconds, 4),
        "best_seconds": round(min(laps), 4),
        "laps": [round(lap, 4) for lap in laps],
        "tokens_per_second": round(case.length / seconds, 1),
        "slots": int(work.slots),
        "first_loss": round(float(first), 6),
        "tflops": round(flops / seconds / 1e12, 1),
        "utilisation": round(flops / seconds / rate, 4),
        "startup_seconds": round(startup, 1),
        "trained_numbers": shape.trained,
    }
    if isinstance(objective, PEagleObjective) and case.way == "staircase":
        sizes = predict(model.config, shape, partition)
        found["predicted_gib"] = {name: round(size / GIB, 2) for name, size in sizes.items()}
    if cuda:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / GIB, 2)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Run every case; a line each."""
    args = parse(arguments)
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    # The paper's parts have prefixes of S lengths, each compiled for itself.
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - there is no public name
    if args.kernel:
        from eyas.training.speed_kernel import kernel_cases

        for length in args.length:
            for timed in kernel_cases(length, SHAPES[args.shape], device):
                _say(timed)
        return
    turn = Turn(args.turn, device)
    with turn.alone():
        rate = gemm_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for case in cases(args):
        record: dict[str, Any] = {
            "objective": case.objective,
            "way": case.way,
            "length": case.length,
            "weights": case.weights,
            "shape": args.shape,
            "compiled": not args.eager,
            "device": name,
            "torch": torch.__version__,
            "gemm_tflops": round(rate / 1e12, 1),
        }
        try:
            record |= run_case(case, args, rate, turn)
        except torch.cuda.OutOfMemoryError:
            record |= {"num_parts": case.parts, "partition_mode": case.mode, "error": "out of memory"}
        except Exception as error:  # noqa: BLE001 - the other cases still run
            record |= {"num_parts": case.parts, "error": f"{type(error).__name__}: {error}"[:2000]}
        _say(record)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
