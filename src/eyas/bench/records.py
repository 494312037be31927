"""Records of a measurement: JSONL, each line with what is needed to take it again.

Provenance holds the command, the commit, versions, the machine in words and torch's threads; no host name,
user or absolute path stands in it, so a record can be published as it is.
"""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.core.device import cpu_name
from eyas.core.errors import ConfigError

PACKAGES = ("eyas", "torch", "transformers", "numpy", "triton")


def provenance(args: list[str] | None = None) -> dict[str, Any]:
    """Return the circumstances of this run; `args` are the command's, sys.argv's by default."""
    import torch

    words = ["eyas", *(sys.argv[1:] if args is None else args)]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(_relative(word) for word in words),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "num_cpus": available_cpus(),
            "gpus": gpus,
            "cuda": torch.version.cuda,
        },
        "torch_threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, "-dirty" if changed; None outside git."""
    folder = Path(__file__).parent
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
        if not (Path(top) / "src/eyas").is_dir():  # an installed copy inside someone else's repository
            return None
        sha = _git(folder, "rev-parse", "HEAD")
        return f"{sha}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.SubprocessError):
        return None


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_record(path: Path) -> None:
    """Make sure, before anything is measured, that `append_record` can write there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: the record cannot be written there ({error.strerror})") from None


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line to a JSONL file, in one write; half a line that a killed run left there goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8")
    old = path.read_bytes() if path.exists() else b""
    end = old.rfind(b"\n") + 1
    with path.open("ab") as file:
        if old[end:] and _is_json(old[end:]):
            line = b"\n" + line
        elif old[end:]:
            file.truncate(end)
        file.write(line)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _git(folder: Path, *args: str) -> str:
    command = ["git", "-C", str(folder), *args]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)  # noqa: S603 -- ours
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _relative(word: str) -> str:
    """Return the last part of an absolute path, other words as they are: folders mean nothing elsewhere."""
    return Path(word).name if word.startswith("/") and len(word) > 1 else word


def machine_name(device: str | None) -> str:
    """Return the device that cells run on, in words: the GPU's name, or the processor's."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    return cpu_name() if device == "cpu" else "endpoint"


def folder_fingerprint(folder: Path) -> str:
    """Return 16 hex digits over a head's config.json and tensors."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path}: the head cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]
