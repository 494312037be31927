"""Read prompts and conversations from JSONL (also .jsonl.gz); every error names file and line.

A line is an object with an `id` and one of

    {"id": "a-1", "prompt": "Hi"}                                    one user turn
    {"id": "a-2", "turns": ["Hi", "And in French?"]}                 user turns, answered one after the other
    {"id": "a-3", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...]}

As prompts, the assistant's messages are dropped (the target answers itself) and a system message is kept.
Other keys are ignored. Without an id, file name and line number make one. Two lines with one id are an error.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.core.text import is_unicode

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns without answers."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""

    @property
    def opening(self) -> list[Message]:
        """Messages before the first answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with answers; `token_ids` and `spans` where the answers' exact ids are known."""

    id: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    prompt_id: str = ""
    """What it shares with other answers to the same prompt; its own id where there are none."""


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSONL file; blank lines are skipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
                if not isinstance(value, dict):
                    raise DataError(f"{path}:{number}: expected an object, got {type(value).__name__}")
                yield number, value
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from error


def read_prompts(path: Path, *, limit: int | None = None) -> list[Prompt]:
    """All prompts of a file, or its first `limit`; raises DataError where a line has none."""
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, value in read_lines(path):
        if limit is not None and len(prompts) >= limit:
            break
        where = f"{path}:{number}"
        prompts.append(_prompt(value, _identity(value, path, number, seen), where))
    if not prompts:
        raise DataError(f"{path}: has no prompts")
    return prompts


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file or of every *.jsonl shard in a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: the folder has no *.jsonl shard")
    seen: dict[str, int] = {}
    for file in files:
        for number, value in read_lines(file):
            where = f"{file}:{number}"
            messages = tuple(_messages(value.get("messages"), where))
            name = _identity(value, file, number, seen)
            origin = str(value.get("prompt_id", name))
            ids, spans = value.get("token_ids"), value.get("spans")
            if (ids is None) != (spans is None):
                raise DataError(f"{where}: token_ids and spans belong together, one of them is missing")
            if ids is None:
                yield Conversation(name, messages, prompt_id=origin)
            elif _integers(ids) and isinstance(spans, list) and all(_integers(s, 2) for s in spans):
                yield Conversation(name, messages, tuple(ids), tuple((a, b) for a, b in spans), origin)
            else:
                raise DataError(f"{where}: token_ids must be a list of ids, spans a list of [begin, end]")


def _integers(value: Any, length: int | None = None) -> bool:
    """Whether `value` is a list of integers, of this length if one is given."""
    return (
        isinstance(value, list)
        and (length is None or len(value) == length)
        and all(type(item) is int for item in value)
    )


def _identity(value: dict[str, Any], path: Path, number: int, seen: dict[str, int]) -> str:
    name = str(value.get("id", f"{path.name}-{number}"))
    if name in seen:
        raise DataError(f"{path}:{number}: the id {name!r} stands at line {seen[name]} already")
    seen[name] = number
    return name


def _prompt(value: dict[str, Any], name: str, where: str) -> Prompt:
    turns: Any
    source = str(value.get("source") or value.get("dataset") or "")
    if "messages" in value:
        messages = _messages(value["messages"], where)
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        turns = [m["content"] for m in messages if m["role"] == "user"]
    else:
        system = None
        turns = value["turns"] if "turns" in value else [value.get("prompt", "")]
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(t, str) and is_unicode(t) and t.strip() for t in turns)
    ):
        raise DataError(
            f'{where}: needs "prompt" (text), "turns" (a list of texts) or "messages" with a user turn'
        )
    return Prompt(name, tuple(turns), system, source)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f'{where}: "messages" must be a list of {{"role", "content"}} objects')
    for message in value:
        good = isinstance(message, dict) and isinstance(message.get("content"), str)
        good = good and is_unicode(message["content"])
        if not good or message.get("role") not in ("system", "user", "assistant"):
            raise DataError(
                f"{where}: a message needs a role (system, user, assistant) and text content, got {message!r}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in value]
