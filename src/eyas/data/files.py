"""Files that are either whole or absent: written to a temporary name in the same folder, then moved."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader (or a crash) sees the old file or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; DataError where that is no place for one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be made a folder ({error.strerror}); choose another") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Return the JSON object at `path` if its "format" is `kind`; raise DataError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; is {path.parent} the right folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != kind:
        raise DataError(f'{path}: expected a manifest with "format": "{kind}"')
    return value


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(name: str) -> int:
    """64-bit number of a name, the same on every machine; decides splits and random choices by id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
