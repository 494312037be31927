"""The trainer, one for every objective: data in, head folder out, resumable at any step.

    out/config.json model.safetensors eyas.json    the head (drafters/artifact.py)
    out/recipe.yaml                                the resolved recipe
    out/training_log.jsonl                         a record every log_every steps and at validations
    out/checkpoints/                               see checkpoint.py

A step is: prepare this process's share of `accumulation` batches (slots chosen, so the number of supervised
slots is known), run each, clip, update. The host reads values back only when it logs. With several
processes (parallel.py) all of them compute, and rank 0 writes.
"""

import copy
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas import __version__
from eyas.config import dump_config
from eyas.config.dump import to_plain
from eyas.core.device import device_name
from eyas.core.errors import ConfigError, DataError, EyasError
from eyas.data.features import FeatureStore
from eyas.data.files import write_bytes
from eyas.data.loader import Batch, LoaderState, RowLoader, once, pack_rows, split_documents
from eyas.data.store import TokenStore
from eyas.data.vocab_count import count_tokens
from eyas.drafters.artifact import make_model, save_head
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.files import refuse_foreign
from eyas.targets.base import Target
from eyas.training.build import build_head, describe, make_objective, with_depths
from eyas.training.capture import capture_meta, captured_before
from eyas.training.checkpoint import (
    RunState,
    best_checkpoint,
    check_space,
    clean,
    fingerprint,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from eyas.training.config import TrainConfig
from eyas.training.display import Display, Log, QuietDisplay
from eyas.training.flops import Work, count_work, step_flops
from eyas.training.optim import MovingAverage, learning_rate, make_optimizer
from eyas.training.parallel import World, shares
from eyas.training.peagle.plan import make_plan
from eyas.training.rows import draft_rows
from eyas.training.step import Prepared, TrainStep
from eyas.training.timing import gemm_rate
from eyas.training.validate import measure
from eyas.training.window import Window

Evaluate = Callable[[Path], dict[str, Any]]
"""Real decoding with the head in a folder; its result goes to eyas.json. Handed in: no engine here."""


class Paused(EyasError):  # noqa: N818 -- not a mistake
    """A run that stopped at its deadline, with a checkpoint of this very step."""


class Trainer:
    """Builds everything from a recipe; `train()` runs it to the end and writes the head."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        store: TokenStore,
        *,
        template_ids: frozenset[int] = frozenset(),
        display: Display | None = None,
        evaluate: Evaluate | None = None,
        world: World | None = None,
        shared: dict[Any, Any] | None = None,
    ) -> None:
        """`shared` keeps what trainers over one store need alike: its counts and packed rows."""
        self.config, self.target, self.store = config, target, store
        self.world = world or World()
        self.display = display if display is not None and self.world.is_main else QuietDisplay()
        self.evaluate = evaluate
        self.out = Path(config.run.out)
        refuse_foreign(self.out)
        limit = target.config.max_position_embeddings
        self.validate_seq_len = config.run.validate_seq_len or config.data.seq_len
        for name, length in (
            ("data.seq_len", config.data.seq_len),
            ("run.validate_seq_len", self.validate_seq_len),
        ):
            if length > limit:
                raise ConfigError(f"{name}={length}: the target reads at most {limit} tokens")
        self.shares = shares(
            self.world.rank,
            self.world.size,
            accumulation=config.run.accumulation,
            batch_rows=config.run.batch_rows,
        )
        if int(store.manifest["vocab_size"]) != target.config.vocab_size:
            raise DataError(
                f"{config.data.store}: made for a vocabulary of {store.manifest['vocab_size']}, "
                f"the target has {target.config.vocab_size}"
            )
        self.counts = once(shared, ("counts", store.manifest["hash"]), lambda: count_tokens(store))
        resident = self._allocated()
        self.model, self.vocab_map, self.coverage = build_head(config, target, self.counts, template_ids)
        self.facts = describe(self.model, self.coverage)
        self.plan = make_plan(
            config,
            self.model.config,
            trained=self.facts["num_trained_parameters"],
            device=target.device,
            compute_bytes=(self._autocast() or torch.float32).itemsize,
            resident=resident,
        )
        self.objective = make_objective(config.objective, self.vocab_map, staircase=self.plan.staircase)
        self.world.shard(self.model)
        if config.run.shard_target:
            self.world.shard_target(target.decoder)
        self.parameters: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config.optim)
        local = [self.world.local(parameter) for parameter in self.parameters]
        self.average = MovingAverage(local, config.optim.ema) if config.optim.ema else None
        training, held_out = split_documents(store, config.data.held_out, config.data.share)
        self.loader = RowLoader(
            store,
            training,
            seq_len=config.data.seq_len,
            batch_rows=config.run.batch_rows,
            seed=config.run.seed,
            device=target.device,
            with_source=config.data.features is not None,
            shared=shared,
        )
        self.batches_per_epoch = self.loader.batches_per_epoch()
        self.total_steps = self._total_steps()
        self.validation = self._validation_rows(held_out)
        self.step = TrainStep(
            target,
            self.model,
            self.vocab_map,
            self.objective,
            config.loss,
            autocast=self._autocast(),
            compiled=config.run.compile,
            partition=self.plan.partition,
        )
        if config.data.features is not None:
            meta = capture_meta(target.identity, self.model.config.aux_layers)
            seq_len = config.data.seq_len
            known = FeatureStore(Path(config.data.features), store, seq_len=seq_len, meta=meta)
            self.step.capture_with(captured_before(known))
        self.examined = copy.copy(self.step)
        """What validation drafts with: the same weights, perhaps more or fewer depths."""
        if config.run.validate_depths is not None:
            self.examined.objective = make_objective(
                with_depths(config.objective, config.run.validate_depths),
                self.vocab_map,
                staircase=self.plan.staircase,
            )
        self.deadline: float | None = None
        """time.monotonic() after which `train` stops with Paused."""
        self.state = RunState()
        self._started = time.monotonic()
        self._startup: float | None = None
        """Seconds of this leg's first step: compilation, which a schedule by time must not follow."""
        self._supervised: tuple[int, list[int]] = (-1, [])
        self._last_validation: dict[str, Any] = {}
        self._num_validations, self._best_al = 0, 0.0
        self._gemm_rate = 0.0

    def _allocated(self) -> int:
        """Bytes of tensors on the target's GPU; 0 on the CPU."""
        device = self.target.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def _autocast(self) -> torch.dtype | None:
        wanted = self.config.run.precision
        bfloat16 = wanted == "bfloat16" or (wanted == "auto" and self.target.device.type == "cuda")
        return torch.bfloat16 if bfloat16 else None

    def _validation_rows(self, held_out: Any) -> Batch | None:
        if not len(held_out) or not self.config.run.validate_rows:
            return None
        rows = pack_rows(self.store, self.loader.mask, held_out, self.validate_seq_len, seed=0)
        size, device = self.config.run.validate_rows, self.target.device
        tensors = (rows.ids, rows.segments, rows.positions, rows.supervised)
        return Batch(*(tensor[:size].to(device) for tensor in tensors))

    # -- a run ------------------------------------------------------------------------------------------

    def train(self) -> Path:
        """Run to the end of the recipe (or on from the newest checkpoint); returns the head's folder."""
        for _ in self.steps():
            pass
        return self.out

    def steps(self) -> Iterator[int]:
        """`train`, handing out the number of each step before it is logged: for several trainers in turn."""
        run, identity = self.config.run, fingerprint(to_plain(self.config), self.store.manifest["hash"])
        checkpoints = self.out / "checkpoints"
        self._resume(checkpoints, identity)
        log = Log(self.out, self.config, after_step=self.state.step) if self.world.is_main else None
        if log is not None:
            write_bytes(self.out / "recipe.yaml", dump_config(self.config).encode())
        self.display.start(self._header())
        self._gemm_rate = gemm_rate(self.target.device, self._autocast() or torch.float32)
        self._started = time.monotonic() - self.state.seconds
        window = self.new_window()
        try:
            while not self._finished():
                self.advance(window)
                step = self.state.step
                yield step
                if step % run.log_every == 0:
                    self._record(log, self._summary(window))
                    window = self.new_window()
                better = bool(run.validate_every) and step % run.validate_every == 0 and self._validate(log)
                if run.checkpoint_every and (better or step % run.checkpoint_every == 0):
                    self._checkpoint(checkpoints, identity, window)
                if self.deadline is not None and step % run.log_every == 0:
                    self._pause(checkpoints, identity, window)
            if window.steps:
                self._record(log, self._summary(window))
                window = self.new_window()
            if self._last_validation.get("step") != self.state.step:
                self._validate(log)
            if run.checkpoint_every:
                self._checkpoint(checkpoints, identity, window)
            self._finish(log, checkpoints)
        finally:
            self.display.stop()
            if log is not None:
                log.close()
            self.loader.close()

    def _resume(self, checkpoints: Path, identity: dict[str, Any]) -> None:
        """Go on from the newest checkpoint; see that those of this run will fit."""
        run, found = self.config.run, list_checkpoints(checkpoints)
        if found and not run.resume:
            raise ConfigError(
                f"{checkpoints} holds checkpoints of an earlier run, and run.resume is off: use another "
                "run.out, or remove them"
            )
        if self.world.is_main and run.checkpoint_every:
            clean(checkpoints)
            check_space(
                checkpoints, self.parameters, averaged=self.average is not None, keep=run.keep_checkpoints
            )
        if found:
            self.state = load_checkpoint(
                found[-1],
                model=self.model,
                optimizer=self.optimizer,
                average=self.average,
                identity=identity,
                world=self.world,
            )
            self.loader.state = LoaderState(self.state.epoch, self.state.batch)
            best = best_checkpoint(checkpoints)
            self._best_al = best[1] if best else 0.0

    def _pause(self, checkpoints: Path, identity: dict[str, Any], window: Window) -> None:
        """Stop where the deadline has passed; on the boundary of a log record, so that no sum is lost."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._checkpoint(checkpoints, identity, window)
            raise Paused(f"{self.out}: paused at step {self.state.step}; the same recipe goes on from there")

    @property
    def seconds(self) -> float:
        """Wall clock of the run, earlier legs included."""
        return time.monotonic() - self._started

    def _total_steps(self) -> int | None:
        """Optimizer steps of the recipe where epochs or max_steps say so."""
        run = self.config.run
        limits = [] if run.max_steps is None else [run.max_steps]
        if run.epochs is not None:
            limits.append(max(1, round(run.epochs * self.batches_per_epoch / run.accumulation)))
        return min(limits) if limits else None

    def progress(self) -> float:
        """How far the run is, in [0, 1], by what the schedule follows."""
        run = self.config.run
        if run.schedule_by == "time":
            assert run.max_minutes is not None
            startup = self._startup or 0.0
            passed = (self.seconds - startup) / max(60 * run.max_minutes - startup, 1e-9)
            return self.world.agree(passed)
        assert self.total_steps is not None
        return self.state.step / self.total_steps

    def _finished(self) -> bool:
        run = self.config.run
        if self.total_steps is not None and self.state.step >= self.total_steps:
            return True
        return run.max_minutes is not None and self.world.agree(self.seconds) >= 60 * run.max_minutes

    def advance(self, window: Window) -> None:
        """One optimizer step, its sums into `window`."""
        run, began, clock = self.config.run, self.seconds, self.step.clock
        clock.start()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._next_progress(), self.config.optim)
        prepared = self.prepare()
        counted = [self.step.normaliser(item) for item in prepared]
        normaliser = self.world.sum(torch.stack(counted).sum())
        clock.lap("data")

        def run_all() -> None:
            for item in prepared:
                window.add(self.step.run(item, normaliser), count_work(item.rows, item.slots))

        self.world.backward(run_all, self.parameters)
        clock.lap("backward")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = run.accumulation * run.batch_rows * self.config.data.seq_len
        self.state = RunState(
            self.state.step + 1,
            self.loader.state.epoch,
            self.loader.state.batch,
            self.seconds,
            self.state.tokens + tokens,
        )
        if self._startup is None:
            self._startup = self.seconds - began
        if self.average is not None:
            self.average.update(self.state.step)
        window.close_step(tokens, self.world.whole(norm))
        clock.lap("optimizer")

    def prepare(self) -> list[Prepared]:
        """This process's part of the step's batches; the loader moves past all of them."""
        run, mine, prepared = self.config.run, {share.micro: share for share in self.shares}, []
        for micro in range(run.accumulation):
            place = self.loader.state.batch * run.batch_rows
            per_row = self._supervised_rows(self.loader.state.epoch)
            batch, share = self.loader.next(), mine.get(micro)
            if share is None:
                continue
            counts = per_row[place : place + run.batch_rows]
            seed = (run.seed * 1_000_003 + self.state.step) * 1_009 + micro
            # Slots are drawn for the whole batch, so that they are the same for any number of processes.
            whole = self.step.prepare(batch, counts, seed=seed, max_supervised=_round_up(max(per_row), 32))
            if share.end - share.begin == run.batch_rows:
                prepared.append(whole)
                continue
            bound = self.objective.bound(counts[share.begin : share.end])
            prepared.append(whole.part(share.begin, share.end, bound))
        return prepared

    def _next_progress(self) -> float:
        """Progress in the middle of the coming step by steps; now, by time."""
        if self.config.run.schedule_by == "time":
            return self.progress()
        assert self.total_steps is not None
        return (self.state.step + 0.5) / self.total_steps

    def _supervised_rows(self, epoch: int) -> list[int]:
        """Supervised draft rows of every packed row of an epoch; read back once an epoch."""
        if self._supervised[0] != epoch:
            rows = self.loader.epoch_rows(epoch)
            self._supervised = (epoch, draft_rows(rows).supervised.sum(1).tolist())
        return self._supervised[1]

    # -- records ----------------------------------------------------------------------------------------

    def new_window(self) -> Window:
        """Empty sums."""
        return Window(self.objective.num_depths, self.target.device, self.step.clock)

    def _check_finite(self, window: Window) -> None:
        if not window.finite(self.world):
            raise EyasError(
                f"the loss or its gradient is not a number at step {self.state.step}; lower optim.lr. The "
                f"newest checkpoint in {self.out / 'checkpoints'} is from before"
            )

    def _summary(self, window: Window) -> dict[str, Any]:
        self._check_finite(window)
        summary = window.summary(self.world)
        work, passed = Work(*summary.pop("work")), summary.pop("window_seconds")
        shapes = (self.model.config, self.target.config)
        frozen, captured = self.step.frozen, self.config.data.features is not None
        head_flops = step_flops(work, *shapes, online=False, frozen=frozen)
        flops = head_flops if captured else step_flops(work, *shapes, frozen=frozen)
        return {
            "kind": "train",
            "step": self.state.step,
            "epoch": self.state.epoch,
            "seconds": round(self.seconds, 2),
            "tokens": self.state.tokens,
            **summary,
            **self._peak(),
            "lr": self.optimizer.param_groups[0]["lr"],
            # Of the steps since the last record; head_flops leaves the target's own forward out.
            "flops": flops,
            "head_flops": head_flops,
            "utilisation": round(flops / (self._gemm_rate * self.world.size * passed), 4),
        }

    def _peak(self) -> dict[str, float]:
        """Most that was ever allocated since the run began, to hold against run.predicted_gib."""
        if self.target.device.type != "cuda":
            return {}
        return {"peak_gib": round(torch.cuda.max_memory_allocated(self.target.device) / 2**30, 2)}

    def _record(self, log: Log | None, record: dict[str, Any]) -> None:
        progress = min(self.progress(), 1.0)
        if log is not None:
            log.write(record)
            self.display.update(progress, record)

    def _validate(self, log: Log | None) -> bool:
        """Measure acceptance, simulated and every so often decoded; whether it is better than ever before."""
        if self.validation is None:
            return False
        if self.average is not None:
            self.average.swap()
        try:
            rows = min(8, self.config.run.batch_rows)
            with self.world.gathered():
                count = measure(
                    self.examined, self.vocab_map, self.validation, batch_rows=rows, world=self.world
                )
            self._num_validations += 1
            every = self.config.decoding.every
            decoded = self._decode() if every and self._num_validations % every == 0 else None
        finally:
            if self.average is not None:
                self.average.swap()
        self._last_validation = {
            "kind": "validation",
            "step": self.state.step,
            "seconds": round(self.seconds, 2),
            "acceptance": [round(share, 4) for share in count.acceptance],
            "reached": count.reached,
            "visited_acceptance": [round(share, 4) for share in count.visited_acceptance],
            "simulated_al": round(count.simulated_al, 4),
        }
        if decoded is not None:
            self._last_validation["decoded"] = decoded
        self.state = replace(self.state, validated=count.simulated_al)
        self._record(log, self._last_validation)
        better, self._best_al = count.simulated_al > self._best_al, max(count.simulated_al, self._best_al)
        return better

    def _decode(self) -> dict[str, Any] | None:
        """Real decoding with the present weights, on rank 0 while the others wait."""
        plain = self._plain_model()
        result = None
        if self.world.is_main and self.evaluate is not None:
            folder = self.out / ".decoding"
            try:
                self._save(plain, {}, folder)
                result = self.evaluate(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        self.world.wait()
        return result

    def _checkpoint(self, folder: Path, identity: dict[str, Any], window: Window) -> None:
        self._check_finite(window)
        save_checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            average=self.average,
            state=self.state,
            identity=identity,
            keep=self.config.run.keep_checkpoints,
            world=self.world,
        )

    def _header(self) -> dict[str, Any]:
        manifest = self.store.manifest
        return {
            "target": self.target.identity.name,
            "preset": self.config.preset,
            "objective": to_plain(self.config.objective),
            "head": {**to_plain(self.config.head), **self.facts},
            "data": {
                **to_plain(self.config.data),
                **{key: manifest[key] for key in ("num_documents", "num_tokens", "num_supervised", "hash")},
            },
            "loss": to_plain(self.config.loss),
            "optim": to_plain(self.config.optim),
            "run": {
                **to_plain(self.config.run),
                "total_steps": self.total_steps,
                "first_step": self.state.step,
                **self.plan.report(),
            },
            "decoding": to_plain(self.config.decoding),
        }

    # -- the end ----------------------------------------------------------------------------------------

    def _finish(self, log: Log | None, checkpoints: Path) -> None:
        best = best_checkpoint(checkpoints) if self.config.run.write == "best" else None
        if best is not None:
            load_weights(best[0], self.model, self.world, averaged=self.average is not None)
        elif self.average is not None:
            self.average.swap()
        meta = {
            **self._header(),
            "recipe": to_plain(self.config),
            "validation": self._last_validation,
            "training": {
                "steps": self.state.step,
                "epochs": round(self.state.epoch + self.state.batch / self.batches_per_epoch, 3),
                "tokens": self.state.tokens,
                "seconds": round(self.seconds, 1),
                "device": device_name(self.target.device),
                "processes": self.world.size,
            },
            "versions": {
                "eyas": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        if best is not None:
            meta["training"]["weights_of"] = {"checkpoint": best[0].name, "simulated_al": round(best[1], 4)}
        del meta["target"], meta["decoding"]
        plain = self._plain_model()
        if log is None:
            return
        self._save(plain, meta, self.out)
        if self.evaluate is not None:
            meta["decoding"] = self.evaluate(self.out)
            log.write({"kind": "decoding", "step": self.state.step, "result": meta["decoding"]})
            self._save(plain, meta, self.out)

    def _plain_model(self) -> Eagle3Model:
        """The head with whole weights; with several processes a copy, made only on rank 0. All must call."""
        if self.world.size == 1:
            return self.model
        whole = {name: self.world.whole(parameter) for name, parameter in self.model.named_parameters()}
        if not self.world.is_main:
            return self.model
        plain = make_model(self.model.config, self.target.decoder.embed_tokens.weight).float()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole[name])
        return plain

    def _save(self, model: Eagle3Model, meta: dict[str, Any], folder: Path) -> None:
        save_head(
            folder,
            model,
            self.vocab_map,
            meta=meta,
            identity=self.target.identity,
            packed=self.config.run.packed,
            target_embedding=self.target.decoder.embed_tokens.weight,
            target_lm_head=self.target.decoder.lm_head_weight,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
