"""Prompts that the target writes itself.

Its chat template is opened up to where a user's text begins, and the target goes on from there until it ends
the turn (as Magpie does, Xu et al. 2024).

    out/run.json           what this run is; another run refuses the folder
    out/draws-00000.json   texts that were judged, in order: those kept, and how many were not and why
    out/prompts.jsonl      {"id", "source", "prompt"}, or "messages" with the system message: for `regenerate`
    out/manifest.json      totals, faults, seconds, tok/s, hash

Draw i has a seed, a temperature and a system message by its number alone, and texts are judged in the order
of their numbers, whatever order they end in. So a run that was killed and went on writes the same file.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.core.errors import ConfigError, DataError
from eyas.core.sampling import SamplingParams
from eyas.data.alike import AlikeIndex, Known, words_of
from eyas.data.files import key_of, sha256_json
from eyas.data.mix import Mix, pick, point_of
from eyas.data.prompts_folder import DrawsFolder
from eyas.data.regenerate_dialog import Generate, Progress
from eyas.data.sources import Message, Prompt
from eyas.data.template import ChatTemplate
from eyas.data.written import UserTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    """How prompts are drawn, and which are kept."""

    temperatures: Mix = field(default_factory=lambda: {0.8: 0.5, 1.0: 0.5})
    top_p: float = 1.0
    """Less than 1 sorts every row: on CUDA a large part of a small target's step."""
    seed: int = 0
    source: str = "self"
    """Names the prompts: draw 7 of seed 0 has the id self-0-7."""
    systems: tuple[str, ...] = ()
    """System messages, taken in turn; none for the bare template."""
    keep_system: bool = False
    """Whether prompts keep their system message; it served only to vary them otherwise."""
    min_tokens: int = 4
    max_tokens: int = 512
    """A text that does not end before is left out."""
    alike: float = 0.7
    """Share of common three-word runs from which a text counts as one that is there already."""
    known: float = 0.2
    """Share of eight-word runs from which a text counts as one of the excluded ones."""

    def __post_init__(self) -> None:
        for name, value in (("alike", self.alike), ("known", self.known)):
            if not 0 < value <= 1:  # refuses NaN too
                raise ConfigError(f"{name} {value}: must be more than 0 and at most 1")

    @property
    def openings(self) -> list[list[Message]]:
        """What stands before the user's text; draws take them in turn."""
        return [[{"role": "system", "content": text}] if text else [] for text in self.systems or ("",)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a run goes about it; what it writes does not depend on this."""

    max_draws: int
    """End here even if too few texts were kept."""
    shard_size: int = 256
    """Texts judged between two writes to the disk."""
    window: int = 32768
    """Draws handed to the generator at a time."""


class Draws:
    """Draw number -> what the generator is given."""

    def __init__(self, template: ChatTemplate, config: PromptsConfig, end_id: int) -> None:
        self.config, self.end_id = config, end_id
        self.prompts = [template.user_ids(messages) for messages in config.openings]
        if any(config.systems) and not template.shows_system():
            raise DataError("the chat template shows no system message; leave --system and --topics out")

    def prompt(self, number: int) -> list[int]:
        """Ids up to where the user's text begins."""
        return self.prompts[number % len(self.prompts)]

    def params(self, number: int) -> SamplingParams:
        """Temperature and seed of a draw."""
        config, name = self.config, f"{self.config.seed}:draw:{number}"
        return SamplingParams(
            temperature=pick(config.temperatures, point_of(name)),
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            stop_token_ids=(self.end_id,),
            # 62 bits: of a million draws hardly two have one seed, and so one text.
            seed=key_of(name) >> 2,
        )

    def record(self, number: int, text: str) -> dict[str, Any]:
        """A line of prompts.jsonl."""
        config, own = self.config, dict[str, Any](prompt=text)
        opening = config.openings[number % len(self.prompts)]
        if config.keep_system and opening:
            own = {"messages": [*opening, {"role": "user", "content": text}]}
        name = f"{config.source}-{config.seed}-{number}"
        return {
            "id": name,
            "source": config.source,
            **own,
            "temperature": self.params(number).temperature,
        }


class _Judge:
    """Keeps texts that are new: "duplicate", "alike" and "excluded" are the faults that it finds."""

    def __init__(self, config: PromptsConfig, excluded: list[Prompt]) -> None:
        turns = [turn for prompt in excluded for turn in prompt.turns]
        self.known, self.share = Known(turns), config.known
        self.index, self.exact = AlikeIndex(config.alike), set[tuple[str, ...]]()
        for turn in turns:
            self._add(words_of(turn))
        self.num_excluded = len(self.index)

    def fault(self, text: str) -> str:
        """Why the text is not kept, or "", and then it is taken in."""
        words = words_of(text)
        if self.known.share(words) >= self.share:
            return "excluded"
        if words in self.exact:
            return "duplicate"
        number = self.index.find(words)
        if number is not None:
            return "excluded" if number < self.num_excluded else "alike"
        self._add(words)
        return ""

    def add(self, text: str) -> None:
        """Take in a text that an earlier run kept."""
        self._add(words_of(text))

    def _add(self, words: tuple[str, ...]) -> None:
        self.exact.add(words)
        self.index.add(words)


def write_prompts(
    count: int,
    template: ChatTemplate,
    generate: Generate,
    out: Path,
    config: PromptsConfig,
    pace: Pace,
    *,
    about: dict[str, Any],
    excluded: list[Prompt] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Draw until `count` prompts are kept; returns the manifest.

    `about` says where they come from; with `config` and the `excluded` prompts it decides whether a
    folder may be continued. Raises DataError if `out` holds another run.
    """
    settings = asdict(config) | {"temperatures": [list(pair) for pair in config.temperatures.items()]}
    barred = sha256_json([list(prompt.turns) for prompt in excluded or []])
    texts = UserTexts(template, min_tokens=config.min_tokens)
    draws = Draws(template, config, texts.end_id)
    folder = DrawsFolder(out, {"about": about, "settings": settings, "excluded": barred})
    judge = _Judge(config, excluded or [])
    for record in folder.records:
        judge.add(_text(record))
    tokens = 0
    try:
        while folder.num_kept < count and folder.next < pace.max_draws:
            numbers = range(folder.next, min(folder.next + pace.window, pace.max_draws))
            ended: dict[int, tuple[list[int], str]] = {}
            turn = numbers[0]
            sampled = generate([draws.prompt(n) for n in numbers], [draws.params(n) for n in numbers])
            for index, ids, reason in sampled:
                ended[numbers[index]] = ids, reason
                tokens += len(ids)
                while turn in ended and folder.num_kept < count:
                    written = texts.read(*ended[turn])
                    fault = written.fault or judge.fault(written.text)
                    kept = None if fault else draws.record(turn, written.text)
                    folder.add(kept, fault, num_tokens=len(ended.pop(turn)[0]))
                    turn += 1
                    if folder.num_judged >= pace.shard_size:
                        folder.flush()
                if progress is not None:
                    progress(min(folder.num_kept, count), count, tokens)
                if folder.num_kept >= count:
                    break  # what still runs is not needed
            folder.flush()
    finally:
        # Also when the user stops it: what was judged is kept.
        folder.flush()
        manifest = folder.close(count)
    return manifest


def _text(record: dict[str, Any]) -> str:
    text: str = record["prompt"] if "prompt" in record else record["messages"][-1]["content"]
    return text
