"""Prompts -> the target's own answers, in JSONL shards that survive a kill at any moment.

    out/run.json            what this run is: source, target, parameters; another run refuses the folder
    out/shard-00000.jsonl   finished conversations, moved into place whole; ids in them are skipped on resume
    out/manifest.json       totals: answers, tokens, seconds, tok/s, hash

A record: {"id", "source", "messages", "temperature", "finish_reasons"} and, where the generator speaks token
ids, "token_ids" and "spans": the exact ids that the target was given and chose. They are never made again
from text: tokenising an answer need not give back the ids that the target chose.

One of several answers to a prompt has "prompt_id" too, the id of the prompt; a conversation whose last user
turns the target wrote has "num_written", how many.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from eyas.core.errors import DataError
from eyas.core.sampling import SamplingParams
from eyas.data.files import key_of
from eyas.data.follow_ups import FollowUpWriter
from eyas.data.mix import point_of, spread
from eyas.data.regenerate_dialog import Dialog, Generate, Progress, RegenerateConfig
from eyas.data.regenerate_shards import ShardWriter
from eyas.data.sources import Prompt
from eyas.data.template import ChatTemplate


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
    users: FollowUpWriter | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer every prompt that no finished shard in `out` has; returns the manifest.

    `about` says where the answers come from (target identity, endpoint, source file) and, with `config`,
    decides whether a folder may be continued. `users` writes the user's next turns (`config.follow_ups`).
    Raises DataError if `out` holds another run, or two answers would get one id.
    """
    if config.follow_ups and users is None:
        raise DataError("follow_ups: nobody is there to write them; give the target's chat template")
    dialogs = [dialog for prompt in prompts for dialog in open_dialogs(prompt, config)]
    _check_ids(dialogs)
    run = _Run(answerer, users if config.follow_ups else None, ShardWriter(out, config, about), config)
    run.total, run.progress = len(dialogs), progress
    return run.go(dialogs)


def open_dialogs(prompt: Prompt, config: RegenerateConfig) -> list[Dialog]:
    """The samples of a prompt. Temperatures go by the id's hash: share 0.7 at T 0 takes hashes below 0.7.

    The first sample has the prompt's id, so that more of them may be told apart from it: p, p/1, p/2.
    """
    temperatures = spread(config.temperatures, point_of(f"{config.seed}:{prompt.id}"), config.samples)
    names = [prompt.id, *(f"{prompt.id}/{number}" for number in range(1, len(temperatures)))]
    return [
        Dialog(replace(prompt, id=name), temperature, prompt.opening, prompt_id=prompt.id)
        for name, temperature in zip(names, temperatures, strict=True)
    ]


def _check_ids(dialogs: list[Dialog]) -> None:
    seen: dict[str, str] = {}
    for dialog in dialogs:
        other = seen.setdefault(dialog.prompt.id, dialog.prompt_id)
        if other != dialog.prompt_id:
            raise DataError(
                f"samples of the prompts {other!r} and {dialog.prompt_id!r} would both be called "
                f"{dialog.prompt.id!r}; rename one of the prompts"
            )


def turn_params(dialog: Dialog, config: RegenerateConfig, *, user: bool = False) -> SamplingParams:
    """How a dialog's next turn is sampled; each turn has a seed of its own."""
    name = f"{config.seed}:{dialog.prompt.id}:{len(dialog.finish_reasons)}"
    if user:
        return SamplingParams(
            temperature=config.follow_up_temperature,
            top_p=config.follow_up_top_p,
            max_tokens=config.max_follow_up_tokens,
            seed=key_of(f"{name}:user") >> 33,
        )
    return SamplingParams(
        temperature=dialog.temperature, max_tokens=config.max_new_tokens, seed=key_of(name) >> 33
    )


class _Run:
    """Answers turn after turn of many dialogs at a time."""

    def __init__(
        self,
        answerer: Answerer,
        users: FollowUpWriter | None,
        writer: ShardWriter,
        config: RegenerateConfig,
    ) -> None:
        self.answerer, self.users, self.writer, self.config = answerer, users, writer, config
        self.progress: Progress | None = None
        self.total, self.finished, self.skipped, self.tokens = 0, 0, 0, 0

    def go(self, dialogs: list[Dialog]) -> dict[str, Any]:
        """Answer what is not done yet; returns the manifest."""
        waiting = [dialog for dialog in dialogs if dialog.prompt.id not in self.writer.done]
        self.finished, started = len(dialogs) - len(waiting), time.monotonic()
        try:
            for first in range(0, len(waiting), self.config.window):
                active = waiting[first : first + self.config.window]
                while active:
                    active = self._turn(active)
        finally:
            # Also when the user stops it: what is answered is kept.
            self.writer.flush()
        seconds = time.monotonic() - started
        return self.writer.manifest(seconds=seconds, new_tokens=self.tokens, skipped=self.skipped)

    def _turn(self, active: list[Dialog]) -> list[Dialog]:
        """Answer the next turn of each; returns those that have another user turn behind it."""
        ready = [dialog for dialog in active if self._opens(dialog)]
        params = [turn_params(dialog, self.config) for dialog in ready]
        going, asked = [], []
        for index, text, reason, count in self.answerer.answer(ready, params):
            dialog = ready[index]
            self.tokens += count
            turn = len(dialog.finish_reasons) + 1
            dialog.finish_reasons.append(reason)
            dialog.messages.append({"role": "assistant", "content": text})
            good, num_turns = bool(text.strip()) and reason != "error", len(dialog.prompt.turns)
            if good and count and turn < num_turns:
                dialog.messages.append({"role": "user", "content": dialog.prompt.turns[turn]})
                going.append(dialog)
            elif good and self.users and turn < num_turns + self.config.follow_ups and reason == "stop":
                asked.append(dialog)
            elif good:
                self._finish(dialog)
            elif turn > 1:
                dialog.drop_turn()
                self._finish(dialog)
            else:
                self.skipped += 1
            self._report()
        return going + self._ask(asked)

    def _opens(self, dialog: Dialog) -> bool:
        """Whether the next answer can be asked for; one that has grown too long ends before this turn."""
        size = len(dialog.ids)
        try:
            if self.answerer.open(dialog) <= self.config.max_prompt_tokens:
                return True
        except DataError:
            # Text that the target wrote may be none that its template takes; what was given must be.
            if len(dialog.finish_reasons) < len(dialog.prompt.turns):
                raise
        if dialog.finish_reasons:
            dialog.messages.pop()  # the user turn that no longer fits
            dialog.ids = dialog.ids[:size]
            self._finish(dialog)
        else:
            self.skipped += 1
        return False

    def _ask(self, dialogs: list[Dialog]) -> list[Dialog]:
        """Let the target write a user's next turn; returns the dialogs that got one."""
        if self.users is None or not dialogs:
            return []
        going = []
        params = [turn_params(dialog, self.config, user=True) for dialog in dialogs]
        for index, text, count in self.users.write(dialogs, params, self.config.max_prompt_tokens):
            self.tokens += count
            if text:
                dialogs[index].messages.append({"role": "user", "content": text})
                going.append(dialogs[index])
            else:
                self._finish(dialogs[index])
            self._report()
        return going

    def _finish(self, dialog: Dialog) -> None:
        self.writer.add(dialog)
        self.finished += 1

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.finished + self.skipped, self.total, self.tokens)
