"""Where a run's numbers go besides training_log.jsonl: tensorboard, wandb, trackio, mlflow, where installed.

A tracker is told (name, value, step) by `log`, with records made flat: {"ms": {"data": 3}} is
"train/ms/data", a list by depth is "train/accuracy/0", ... Values that are no numbers stay in the log file.
"""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from eyas.config.dump import to_plain
from eyas.core.errors import ConfigError
from eyas.training.config import TrainConfig


class Tracker(Protocol):
    """Somewhere that draws curves."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers of a step."""
        ...

    def close(self) -> None:
        """After the last one."""
        ...


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers by name: {"kind": "train", "acc": [1.0, 0.5]} -> train/acc/0, train/acc/1."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(f"{name}/{key}", item)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(f"{name}/{index}", item)
        elif isinstance(value, float | int) and not isinstance(value, bool):
            yield name, float(value)

    fields = {key: value for key, value in record.items() if key not in ("kind", "step")}
    return dict(walk(str(record["kind"]), fields))


class Tensorboard:
    """Event files in out/tensorboard."""

    def __init__(self, out: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else None
        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=purge)

    def log(self, values: dict[str, float], step: int) -> None:
        """One scalar a name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class WandbLike:
    """wandb and trackio, which share init, log and finish. The run's folder is its name and its id."""

    def __init__(self, module: Any, config: TrainConfig) -> None:
        self.module = module
        name = Path(config.run.out).name
        extra = {"id": name} if module.__name__ == "wandb" else {}
        module.init(project="eyas", name=name, config=to_plain(config), resume="allow", **extra)

    def log(self, values: dict[str, float], step: int) -> None:
        """All values at once."""
        self.module.log(values, step=step)

    def close(self) -> None:
        """End the run."""
        self.module.finish()


class Mlflow:
    """An mlflow run in the experiment "eyas"."""

    def __init__(self, module: Any, config: TrainConfig) -> None:
        self.module = module
        module.set_experiment("eyas")
        module.start_run(run_name=Path(config.run.out).name)
        settings = flat({"kind": "recipe", **{k: v for k, v in to_plain(config).items() if v is not None}})
        module.log_params(settings)

    def log(self, values: dict[str, float], step: int) -> None:
        """All values at once."""
        self.module.log_metrics(values, step=step)

    def close(self) -> None:
        """End the run."""
        self.module.end_run()


def open_trackers(out: Path, config: TrainConfig, *, first_step: int) -> list[Tracker]:
    """Tensorboard where it is installed and wanted, and the trackers that the recipe names.

    Raises ConfigError for a named one that is not installed.
    """
    trackers: list[Tracker] = []
    if config.run.tensorboard:
        with suppress(ImportError):  # the log file has everything; tensorboard is a comfort
            trackers.append(Tensorboard(out, first_step))
    for name in config.run.trackers:
        try:
            module = import_module(name)
        except ImportError:
            raise ConfigError(
                f"run.trackers: {name} is not installed; `pip install {name}`, or leave it out"
            ) from None
        trackers.append(Mlflow(module, config) if name == "mlflow" else WandbLike(module, config))
    return trackers
