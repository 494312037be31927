"""Prompts to measure with: JSONL, one object a line.

    {"id": "mt-3", "dataset": "mt", "category": "maths", "turns": ["first turn", "second"], "reference": []}

`turns` is needed, or `prompt` for one turn, or OpenAI-style `messages`; the rest has defaults. Files may
end in .gz. "builtin" names the twelve prompts that ship with the package. Spec-Bench's question.jsonl
(`question_id`, `category`, `turns`) and SPEED-Bench's prepared files (`messages`) are read as they are.
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
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""SPEED-Bench rows whose text must be fetched from its source begin so."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation of a benchmark: the user's turns, answered in order."""

    id: str
    dataset: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()
    history: tuple[tuple[str, str], ...] = ()
    """(role, text) of what stands before the first turn: a system prompt, earlier turns and answers."""

    def opening(self) -> list[dict[str, str]]:
        """Return the conversation up to its first turn, as messages."""
        return [{"role": role, "content": text} for role, text in self.history]


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
    history, turns = _conversation(where, row)
    if any(PLACEHOLDER in turn for turn in turns):
        raise DataError(f"{where}: the row holds no prompt yet; run SPEED-Bench's own prepare.py first")
    return Prompt(
        id=str(row.get("id", row.get("question_id", number))),
        dataset=str(row.get("dataset", _dataset_name(Path(source)))),
        category=str(row.get("category", "")),
        turns=turns,
        reference=_texts(where, "reference", row.get("reference") or [], empty=True),
        history=history,
    )


def _conversation(where: str, row: dict[str, Any]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return (history, turns) of a row, whichever of the three layouts it has.

    Of `messages`, everything up to the last message that is not the user's is history; the user's messages
    behind it are the turns:
        system, user A, assistant B, user C, user D -> history (system, A, B), turns (C, D)
    """
    if "turns" in row:
        return (), _texts(where, "turns", row["turns"])
    if "prompt" in row:
        return (), _texts(where, "turns", [row["prompt"]])
    if "messages" not in row:
        raise DataError(
            f"{where}: needs the field 'turns' (a list of user turns), 'prompt' or 'messages'; "
            f"has {sorted(row)}"
        )
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{where}: 'messages' must be a list of objects")
    roles = [message.get("role") for message in messages]
    if not set(roles) <= {"system", "developer", "user", "assistant"} or roles[-1:] != ["user"]:
        raise DataError(
            f"{where}: 'messages' must have the roles system, user and assistant and end with the user's, "
            f"got {roles}"
        )
    texts = _texts(where, "messages", [_content(message.get("content")) for message in messages])
    first = max((i + 1 for i, role in enumerate(roles) if role != "user"), default=0)
    return tuple(zip(map(str, roles[:first]), texts[:first], strict=True)), texts[first:]


def _content(content: Any) -> Any:
    """Return a message's text: a string, or the text parts of OpenAI's list form; anything else as it is."""
    parts = content if isinstance(content, list) else None
    if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return content


def _dataset_name(path: Path) -> str:
    """Return the file's name without endings; the folder's where files are all called question.jsonl."""
    stem = path.name.split(".")[0]
    return path.parent.name if stem == "question" and path.parent.name else stem


def _texts(where: str, name: str, value: Any, *, empty: bool = False) -> tuple[str, ...]:
    good = isinstance(value, list) and all(
        isinstance(item, str) and is_unicode(item) and (empty or item.strip()) for item in value
    )
    if not good or not (value or empty):
        raise DataError(f"{where}: '{name}' must be a list of texts, got {value!r}"[:300])
    return tuple(value)
