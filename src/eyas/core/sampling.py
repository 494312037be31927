"""How the tokens of one request are chosen. Field names follow vLLM's, so that code carries over.

Order in which the engine applies them to a row of logits: logit bias and min-tokens, penalties,
temperature, min-p, top-k, top-p. Inside a speculative run each row sees the drafts before it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from eyas.core.errors import RequestError
from eyas.core.grammar import Grammar

MAX_N = 16384
"""Each completion is a request of its own."""
_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # An integer of more bits cannot become a float.
    return isinstance(value, float) or (_is_integer(value) and value.bit_length() < 1024)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; out-of-range values raise RequestError naming the field."""

    n: int = 1
    """Completions per prompt; completion i uses seed + i where a seed is given."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all (-1 too)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token stands in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    min_tokens: int = 0
    """No end-of-text or stop token before this many output tokens."""
    max_tokens: int = 256
    """End with reason "length" after this many output tokens."""
    stop: tuple[str, ...] = ()
    """End when one of these strings appears; it is cut from the text."""
    stop_token_ids: tuple[int, ...] = ()
    """End when one of these tokens is chosen."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """Random numbers are keyed by (seed, absolute position), so neighbours never matter."""
    logprobs: int | None = None
    """Return the log-probability of each token and of the top n (before any processing)."""
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """What the answer must match; needs xgrammar."""
    num_draft_tokens: int | None = None
    """At most so many drafts a step (nodes, where drafts are trees); None for as many as the drafter makes.
    The tokens are the same with any."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_types()
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            ("n", 1 <= self.n <= MAX_N, f"from 1 to {MAX_N}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", self.top_k >= -1, "-1, 0 (off) or a positive count"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "in [0.01, 100]"),
            ("presence_penalty", -100.0 <= self.presence_penalty <= 100.0, "in [-100, 100]"),
            ("frequency_penalty", -100.0 <= self.frequency_penalty <= 100.0, "in [-100, 100]"),
            ("min_tokens", 0 <= self.min_tokens < 2**31, "from 0 to 2^31 - 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "non-empty strings"),
            ("num_draft_tokens", (self.num_draft_tokens or 0) >= 0, "None, or 0 (no drafts) or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "None or 0 to 100"),
        )
        for name, good, rule in checks:
            if not good:
                raise RequestError(f"{name}={getattr(self, name)!r} is out of range: it must be {rule}")
        if self.grammar is not None:
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    raise RequestError(f"{name}: an answer ends where its grammar ends, so leave it out")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    def _check_types(self) -> None:
        """Refuse here what would otherwise fail in the middle of a step, and there for every request."""
        for name in _INTEGERS:
            if not _is_integer(getattr(self, name)):
                raise self._wrong_type(name, "an integer")
        for name in ("seed", "logprobs", "num_draft_tokens"):
            if getattr(self, name) is not None and not _is_integer(getattr(self, name)):
                raise self._wrong_type(name, "an integer or None")
        for name in _NUMBERS:
            if not _is_number(getattr(self, name)):
                raise self._wrong_type(name, "a number")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong_type(name, "True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise self._wrong_type("grammar", "a Grammar or None")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) for text in self.stop):
            raise self._wrong_type("stop", "a text or a list of texts")
        if not isinstance(self.stop_token_ids, Collection) or not all(map(_is_integer, self.stop_token_ids)):
            raise self._wrong_type("stop_token_ids", "a list of token ids")
        good = isinstance(self.logit_bias, Mapping) and all(
            _is_integer(token_id) and _is_number(bias) for token_id, bias in self.logit_bias.items()
        )
        if not good:
            raise self._wrong_type("logit_bias", "a mapping from token ids to numbers")

    def _wrong_type(self, name: str, wanted: str) -> RequestError:
        return RequestError(f"{name}={getattr(self, name)!r}: it must be {wanted}"[:300])

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the processed logits."""
        return self.temperature == 0.0
