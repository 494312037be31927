"""What a run tells: lines in training_log.jsonl, a live line on the terminal, curves in trackers."""

import json
from pathlib import Path
from typing import Any, Protocol

from eyas.core.errors import EyasError
from eyas.data.files import make_folder, write_bytes
from eyas.training.config import TrainConfig
from eyas.training.trackers import flat, open_trackers


class Display(Protocol):
    """Somewhere to show progress."""

    def start(self, header: dict[str, Any]) -> None:
        """Before the first step, with everything that the run resolved to."""
        ...

    def update(self, progress: float, record: dict[str, Any]) -> None:
        """A log record (kind "train" or "validation"); progress of the run in [0, 1]."""
        ...

    def stop(self) -> None:
        """After the last step, also when the run fails."""
        ...


class Log:
    """Appends records to out/training_log.jsonl and hands their numbers to the trackers."""

    def __init__(self, out: Path, config: TrainConfig, *, after_step: int) -> None:
        make_folder(out)
        self.path = out / "training_log.jsonl"
        self._drop_after(after_step)
        self.trackers = open_trackers(out, config, first_step=after_step)

    def _drop_after(self, step: int) -> None:
        """Records of steps that a resumed run does again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line that a kill cut short
            if step and record.get("step", 0) <= step:
                kept.append(line)
        write_bytes(self.path, "".join(line + "\n" for line in kept).encode())

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise EyasError(f"{self.path}: cannot be written ({error}); make room and run again") from None
        values = flat(record)
        for tracker in self.trackers:
            tracker.log(values, record["step"])

    def close(self) -> None:
        """Flush the trackers."""
        for tracker in self.trackers:
            tracker.close()


class RichDisplay:
    """A progress bar on stderr with loss, accuracy by depth, tokens a second and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task("starting", total=1.0)

    def start(self, header: dict[str, Any]) -> None:
        """Print what the run resolved to."""
        for key, value in header.items():
            self.console.print(f"[bold]{key}[/bold]: {json.dumps(value, ensure_ascii=False)}")
        self.progress.start()

    def update(self, progress: float, record: dict[str, Any]) -> None:
        """Refresh the line; validations stay on the screen."""
        if record["kind"] == "validation":
            shares = " ".join(f"{share:.3f}" for share in record["acceptance"])
            al = record["simulated_al"]
            self.console.print(f"step {record['step']}: simulated AL {al:.3f}  acceptance {shares}")
            for name, figures in record.get("decoded", {}).items():
                self.console.print(f"  {name}: decoded AL {figures['acceptance_length']:.3f}")
            return
        shares = " ".join(f"{share:.2f}" for share in record["accuracy"])
        speed = f"{record['tokens_per_second']:,.0f} tok/s"
        busy = f"{100 * record['utilisation']:.0f} % busy"
        text = f"step {record['step']} loss {record['loss']:.3f} acc {shares} {speed} {busy}"
        self.progress.update(self.task, completed=progress, description=text)

    def stop(self) -> None:
        """Leave the last line standing."""
        self.progress.stop()


class QuietDisplay:
    """Shows nothing; the log file still has everything."""

    def start(self, header: dict[str, Any]) -> None:
        """Nothing."""

    def update(self, progress: float, record: dict[str, Any]) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""
