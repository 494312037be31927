"""How prompts are answered, and a conversation while it is being answered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eyas.core.errors import ConfigError
from eyas.core.sampling import SamplingParams
from eyas.data.mix import Mix
from eyas.data.sources import Message, Prompt
from eyas.data.template import Span

Generate = Callable[[list[list[int]], list[SamplingParams]], Iterator[tuple[int, list[int], str]]]
"""Answers prompts of token ids: yields (index, ids, finish reason) in any order. The ids include the
end-of-text token that ended an answer (reason "stop")."""

Progress = Callable[[int, int, int], None]
"""Told (answered conversations, all conversations, generated tokens of this run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig:
    """How prompts are answered."""

    temperatures: Mix = field(default_factory=lambda: {0.0: 0.7, 0.7: 0.3})
    """Temperature -> share of prompts; which prompt gets which goes by the hash of its id."""
    samples: int = 1
    """Answers to each prompt, at temperatures spread by their shares; but never two at temperature 0."""
    follow_ups: int = 0
    """At most so many user turns behind a prompt's own are written by the target itself, and answered."""
    follow_up_temperature: float = 0.8
    follow_up_top_p: float = 1.0
    max_follow_up_tokens: int = 256
    max_new_tokens: int = 512
    max_prompt_tokens: int = 2048
    """Longer prompts are left out (first turn) or end their conversation (later turns)."""
    seed: int = 0
    shard_size: int = 2000
    window: int = 16384
    """Conversations handed to the generator at a time; the rest waits."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.follow_ups < 0:
            raise ConfigError(
                f"samples {self.samples}, follow_ups {self.follow_ups}: at least 1 sample and 0 follow-ups"
            )


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
    prompt_id: str = ""
    """The id of the prompt, of which this may be one sample among several."""

    def drop_turn(self) -> None:
        """Take back the last turn, which got no usable answer: what was said before it stays."""
        del self.messages[-2:], self.finish_reasons[-1:], self.spans[-1:]
        self.ids = self.ids[: self.spans[-1][1]] if self.spans else []
