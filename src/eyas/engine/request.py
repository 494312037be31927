"""One request as the host sees it; no tensors.

Life: waiting -> (admitted) prefilling -> decoding -> finished. `num_cached` says how many tokens have KV;
a request decodes once every token but the newest is cached. A preempted request loses slot and pages and
waits again; its prompt and output are then prefilled anew, and since randomness is keyed by position it
goes on exactly where it was.

Example, prompt of 5 tokens, 2 tokens out so far:
    num_tokens 7    num_cached 6 (decoding)    last token at position 6 = num_cached
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eyas.core.outputs import RequestStats, TokenLogprob
from eyas.core.sampling import SamplingParams
from eyas.engine.stops import TextTracker

if TYPE_CHECKING:
    from eyas.engine.grammar import Matching


@dataclass(slots=True, eq=False)
class Request:
    """Host record of one completion (a prompt with n > 1 becomes n of these)."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    """Token ids that end it: end of text (unless ignored) and stop_token_ids."""
    max_total: int
    """Prompt plus output may not get longer: min(prompt + max_tokens, context limit)."""
    needs: int = 0
    """What it asks of the sampler (engine/sampler_state.Needs); 0 is an argmax and nothing else."""
    output_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None
    text: TextTracker | None = None
    """Text while it runs; only where stop strings or streaming need it."""
    grammar: "Matching | None" = None
    """Where its answer stands in the grammar that it must match."""
    stats: RequestStats = field(default_factory=RequestStats)
    runs: list[int] = field(default_factory=list)
    """runs[n]: steps with n - 1 drafts that became output; makes stats.accepted_by_depth at the end."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    num_cached: int = 0
    """Tokens whose KV is in the cache."""
    ahead: int = 0
    """Tokens that a launched step whose report has not been read may add; more than 0 means at least 1."""
    slot: int = -1
    """Row of the state tensors; -1 while it waits."""
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Of the pages that its tokens fill (engine/prefix), as far as they have been needed."""
    num_kept: int = 0
    """Leading pages whose keys the block manager has been told."""

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest are cached."""
        return self.num_cached == self.num_tokens - 1

    @property
    def surely_ends(self) -> bool:
        """Whether the step in flight reaches max_total whatever it commits."""
        return self.num_tokens + (self.ahead > 0) >= self.max_total

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt_ids + self.output_ids
