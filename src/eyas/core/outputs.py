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


def acceptance_length(steps: int, draft_steps: int, accepted: int) -> float:
    """AL = 1 + accepted / draft_steps, the one definition; 1 where nothing was drafted, 0 without steps.

    Steps without drafts do not count: 3 steps, the first without drafts, 4 accepted -> 1 + 4 / 2 = 3.
    """
    if not draft_steps:
        return 1.0 if steps else 0.0
    return 1.0 + accepted / draft_steps


@dataclass(slots=True)
class RequestStats:
    """Speculation counters of one request."""

    steps: int = 0
    """Target forwards."""
    draft_steps: int = 0
    """Those that verified at least one draft."""
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
        """Mean tokens per verification of drafts, the target's own included; 1 without drafts, 0 at first."""
        return acceptance_length(self.steps, self.draft_steps, self.accepted)


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
