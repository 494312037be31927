"""What a caller of the engine gets back."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the target, before any sampling processor."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `token_ids`, `logprobs` and `origins` always have the same length."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None
    """For each token: the chosen token first, then the top n."""
    origins: list[int] = field(default_factory=list)
    """For each token: the draft depth (1..K) it was accepted at, or 0 where the target chose it."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while the request runs."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, if one did."""


@dataclass(slots=True)
class RequestStats:
    """Speculation counters of one request; AL = committed / steps, bonus token included."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    """How many steps accepted a draft at depth i (0-based), unconditional."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, how many were found in the prefix cache."""
    preemptions: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target forward, including the bonus token."""
        return 1.0 + self.accepted / self.steps if self.steps else 0.0


@dataclass(slots=True)
class RequestOutput:
    """State of a request: final from `generate`, cumulative from `stream`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: RequestStats
    error: str | None = None
