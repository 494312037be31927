"""Prompts to measure with: JSONL, one object a line.

    {"id": "mt-3", "dataset": "mt", "category": "maths", "turns": ["first turn", "second"], "reference": []}

`turns` is needed (or `prompt`, for one turn); the rest has defaults. Files may end in .gz. "builtin" names
the twelve prompts that ship with the package.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.core.text import is_unicode

BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation of a benchmark: the user's turns, answered in order."""

    id: str
    dataset: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def read_prompts(source: str | Path, num_prompts: int | None = None) -> list[Prompt]:
    """Return the prompts of a JSONL file or of "builtin"; num_prompts of them, evenly spaced, if given.

    Evenly spaced rather than the first ones, because benchmark files are sorted by category: 4 of 12 rows
    are rows 0, 3, 6, 9. Raises DataError naming the file, the line and the field.
    """
    if num_prompts is not None and num_prompts < 1:
        raise DataError(f"num_prompts={num_prompts} must be at least 1")
    lines = _read_lines(source)
    prompts = [_parse(source, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise DataError(f"{source}: the file holds no prompts")
    if num_prompts is None or num_prompts >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // num_prompts] for i in range(num_prompts)]


def _read_lines(source: str | Path) -> list[str]:
    if str(source) == BUILTIN:
        return files("eyas.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    path = Path(source)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # split on \n only: JSON strings may hold other line separators unescaped.
        return raw.decode("utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: there is no such prompts file; '{BUILTIN}' names the shipped ones"
        ) from error
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _parse(source: str | Path, number: int, line: str) -> Prompt:
    where = f"{source}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    turns = row["turns"] if "turns" in row else [row["prompt"]] if "prompt" in row else None
    if turns is None:
        raise DataError(
            f"{where}: needs the field 'turns' (a list of user turns) or 'prompt'; has {sorted(row)}"
        )
    return Prompt(
        id=str(row.get("id", number)),
        dataset=str(row.get("dataset", Path(source).name.split(".")[0])),
        category=str(row.get("category", "")),
        turns=_texts(where, "turns", turns),
        reference=_texts(where, "reference", row.get("reference") or [], empty=True),
    )


def _texts(where: str, name: str, value: Any, *, empty: bool = False) -> tuple[str, ...]:
    good = isinstance(value, list) and all(
        isinstance(item, str) and is_unicode(item) and (empty or item.strip()) for item in value
    )
    if not good or not (value or empty):
        raise DataError(f"{where}: '{name}' must be a list of texts, got {value!r}"[:300])
    return tuple(value)
