"""Prompts -> the target's own answers, in JSONL shards that survive a kill at any moment.

    out/run.json            what this run is: source, target, parameters; another run refuses the folder
    out/shard-00000.jsonl   finished conversations, moved into place whole; ids in them are skipped on resume
    out/manifest.json       totals: answers, tokens, seconds, tok/s, hash

A record: {"id", "source", "messages", "temperature", "finish_reasons"} and, where the generator speaks token
ids, "token_ids" and "spans": the exact ids that the target was given and chose. They are never made again
from text: tokenising an answer need not give back the ids that the target chose.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eyas.core.errors import DataError
from eyas.core.sampling import SamplingParams
from eyas.data.files import key_of, make_folder, read_manifest, sha256_json, write_bytes, write_json
from eyas.data.sources import Message, Prompt, read_lines
from eyas.data.template import ChatTemplate, Span

RUN_FORMAT, FORMAT = "eyas-regeneration-run", "eyas-regeneration"

Generate = Callable[[list[list[int]], list[SamplingParams]], Iterator[tuple[int, list[int], str]]]
"""Answers prompts of token ids: yields (index, ids, finish reason) in any order. The ids include the
end-of-text token that ended an answer (reason "stop")."""

Progress = Callable[[int, int, int], None]
"""Told (answered conversations, all conversations, generated tokens of this run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig:
    """How prompts are answered."""

    temperatures: dict[float, float] = field(default_factory=lambda: {0.0: 0.7, 0.7: 0.3})
    """Temperature -> share of prompts; which prompt gets which goes by the hash of its id."""
    max_new_tokens: int = 512
    max_prompt_tokens: int = 2048
    """Longer prompts are left out (first turn) or end their conversation (later turns)."""
    seed: int = 0
    shard_size: int = 2000
    window: int = 16384
    """Conversations handed to the generator at a time; the rest waits."""


@dataclass(slots=True)
class Dialog:
    """A conversation while it is being answered."""

    prompt: Prompt
    temperature: float
    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    """Exact ids so far: what the next answer continues. Empty for generators that speak text."""
    spans: list[Span] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def drop_turn(self) -> None:
        """Take back the last turn, which got no usable answer: what was said before it stays."""
        del self.messages[-2:], self.finish_reasons[-1:], self.spans[-1:]
        self.ids = self.ids[: self.spans[-1][1]] if self.spans else []


class Answerer(Protocol):
    """Answers one turn of many dialogs, and grows them by what they need for the next turn."""

    def open(self, dialog: Dialog) -> int:
        """Prepare the next answer; returns the prompt's length in tokens (0 where unknown)."""
        ...

    def answer(
        self, dialogs: list[Dialog], params: list[SamplingParams]
    ) -> Iterator[tuple[int, str, str, int]]:
        """Yield (index, text, finish reason, generated tokens), having recorded ids in the dialog."""
        ...


class IdAnswerer:
    """Through a generator of token ids: exact ids are kept."""

    def __init__(self, template: ChatTemplate, generate: Generate) -> None:
        self.template, self.generate = template, generate

    def open(self, dialog: Dialog) -> int:
        """Render the first prompt, or the piece between the last answer and the next."""
        if not dialog.ids:
            dialog.ids = self.template.prompt_ids(dialog.messages)
        else:
            *history, answer, following = dialog.messages
            ended = dialog.ids[-1] in self.template.end_ids
            dialog.ids += self.template.follow_up_ids(history, answer["content"], following, ended=ended)
        return len(dialog.ids)

    def answer(
        self, dialogs: list[Dialog], params: list[SamplingParams]
    ) -> Iterator[tuple[int, str, str, int]]:
        """Answer all dialogs; each gets its answer's ids and span."""
        for index, ids, reason in self.generate([list(dialog.ids) for dialog in dialogs], params):
            dialog = dialogs[index]
            dialog.spans.append((len(dialog.ids), len(dialog.ids) + len(ids)))
            dialog.ids += ids
            body = ids[:-1] if ids and ids[-1] in self.template.end_ids else ids
            text: str = self.template.tokenizer.decode(body, skip_special_tokens=True)
            yield index, text, reason, len(ids)


def regenerate(
    prompts: list[Prompt],
    answerer: Answerer,
    out: Path,
    config: RegenerateConfig,
    *,
    about: dict[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer every prompt that no finished shard in `out` has; returns the manifest.

    `about` says where the answers come from (target identity, endpoint, source file) and, with `config`,
    decides whether a folder may be continued. Raises DataError if it holds another run.
    """
    writer = _ShardWriter(out, config, about)
    waiting = [_dialog(prompt, config) for prompt in prompts if prompt.id not in writer.done]
    total, tokens, skipped, started = len(prompts), 0, 0, time.monotonic()
    finished = len(prompts) - len(waiting)
    try:
        for first in range(0, len(waiting), config.window):
            active = waiting[first : first + config.window]
            while active:
                ready = []
                for dialog in active:
                    if answerer.open(dialog) <= config.max_prompt_tokens:
                        ready.append(dialog)
                    elif dialog.spans or dialog.finish_reasons:
                        dialog.messages.pop()  # the user turn that no longer fits
                        dialog.ids = dialog.ids[: dialog.spans[-1][1]] if dialog.spans else []
                        writer.add(dialog)
                        finished += 1
                    else:
                        skipped += 1
                active = []
                params = [_params(dialog, config) for dialog in ready]
                for index, text, reason, count in answerer.answer(ready, params):
                    dialog = ready[index]
                    tokens += count
                    turn = len(dialog.finish_reasons) + 1
                    dialog.finish_reasons.append(reason)
                    dialog.messages.append({"role": "assistant", "content": text})
                    if count and text.strip() and reason != "error" and turn < len(dialog.prompt.turns):
                        dialog.messages.append({"role": "user", "content": dialog.prompt.turns[turn]})
                        active.append(dialog)
                    elif text.strip() and reason != "error":
                        writer.add(dialog)
                        finished += 1
                    elif turn > 1:
                        dialog.drop_turn()
                        writer.add(dialog)
                        finished += 1
                    else:
                        skipped += 1
                    if progress is not None:
                        progress(finished + skipped, total, tokens)
    finally:
        # Also when the user stops it: what is answered is kept.
        writer.flush()
    return writer.manifest(seconds=time.monotonic() - started, new_tokens=tokens, skipped=skipped)


def _dialog(prompt: Prompt, config: RegenerateConfig) -> Dialog:
    """Choose the temperature by the id's hash: share 0.7 at T 0 takes hashes below 0.7."""
    point = (key_of(f"{config.seed}:{prompt.id}") >> 11) / 2**53 * sum(config.temperatures.values())
    temperature = next(iter(config.temperatures))
    for temperature, share in config.temperatures.items():  # noqa: B007 - the last stays
        point -= share
        if point < 0:
            break
    return Dialog(prompt, temperature, prompt.opening)


def _params(dialog: Dialog, config: RegenerateConfig) -> SamplingParams:
    turn = len(dialog.finish_reasons)
    return SamplingParams(
        temperature=dialog.temperature,
        max_tokens=config.max_new_tokens,
        seed=key_of(f"{config.seed}:{dialog.prompt.id}:{turn}") >> 33,
    )


class _ShardWriter:
    """Buffers finished dialogs and moves whole shards into place; knows which ids are done."""

    def __init__(self, out: Path, config: RegenerateConfig, about: dict[str, Any]) -> None:
        make_folder(out)
        self.out, self.shard_size = out, config.shard_size
        settings = {k: v for k, v in asdict(config).items() if k not in ("shard_size", "window")}
        settings["temperatures"] = [list(pair) for pair in config.temperatures.items()]
        self.run = {"format": RUN_FORMAT, "about": about, "settings": settings}
        path = out / "run.json"
        if path.exists():
            before = read_manifest(path, RUN_FORMAT)
            if before != json.loads(json.dumps(self.run)):
                changed = [
                    key for key in self.run if before.get(key) != json.loads(json.dumps(self.run[key]))
                ]
                raise DataError(
                    f"{path}: the folder holds another run ({', '.join(changed)} differ); continue it with "
                    "the same source, target and parameters, or choose another --out"
                )
        else:
            write_json(path, self.run)
        self.done: set[str] = set()
        self.counts = {"num_conversations": 0, "num_answers": 0, "num_answer_tokens": 0, "num_tokens": 0}
        self.shards = sorted(out.glob("shard-*.jsonl"))
        for shard in self.shards:
            for number, record in read_lines(shard):
                try:
                    self._count(record)
                except (KeyError, TypeError, ValueError) as error:
                    raise DataError(
                        f"{shard}:{number}: no record of this run ({error!r}); remove it"
                    ) from None
        self.buffer: list[dict[str, Any]] = []

    def _count(self, record: dict[str, Any]) -> None:
        self.done.add(record["id"])
        self.counts["num_conversations"] += 1
        self.counts["num_answers"] += len(record["finish_reasons"])
        self.counts["num_answer_tokens"] += sum(end - begin for begin, end in record.get("spans", []))
        self.counts["num_tokens"] += len(record.get("token_ids", []))

    def add(self, dialog: Dialog) -> None:
        """Take a finished dialog; writes a shard when one is full."""
        record: dict[str, Any] = {
            "id": dialog.prompt.id,
            "source": dialog.prompt.source,
            "temperature": dialog.temperature,
            "messages": dialog.messages,
            "finish_reasons": dialog.finish_reasons,
        }
        if dialog.spans:
            record |= {"token_ids": dialog.ids, "spans": dialog.spans}
        self.buffer.append(record)
        if len(self.buffer) >= self.shard_size:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as a shard."""
        if not self.buffer:
            return
        path = self.out / f"shard-{len(self.shards):05d}.jsonl"
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in self.buffer]
        write_bytes(path, ("\n".join(lines) + "\n").encode())
        self.shards.append(path)
        for record in self.buffer:
            self._count(record)
        self.buffer = []

    def manifest(self, *, seconds: float, new_tokens: int, skipped: int) -> dict[str, Any]:
        """Write and return the totals; seconds and tok/s add up over resumed runs."""
        path = self.out / "manifest.json"
        before = read_manifest(path, FORMAT) if path.exists() else {}
        seconds += float(before.get("seconds", 0.0))
        generated = new_tokens + int(before.get("num_generated", 0))
        manifest = {
            "format": FORMAT,
            "run": self.run,
            **self.counts,
            "num_skipped": skipped,
            "num_generated": generated,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(generated / seconds, 1) if seconds else 0.0,
            "shards": [shard.name for shard in self.shards],
        }
        manifest["hash"] = sha256_json({"run": self.run, "counts": self.counts, "shards": manifest["shards"]})
        write_json(path, manifest)
        return manifest
