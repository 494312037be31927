"""What is new in a running request since it was last looked at: pieces that a server can send on.

A piece is never taken back. Text waits while it might be the start of a stop string, and so do the tokens
that only such text belongs to: the pieces of a request, put together, are exactly its final text, tokens,
origins and log-probabilities.

Example, stop "END", tokens " the| E|ND": pieces (" the", [" the"]), ("", []) since " E" may begin with
the blank and E before the stop string, then at the end (" ", [" E"]).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.core.outputs import RequestStats, TokenLogprob
from eyas.engine.intake import Group
from eyas.engine.request import Request
from eyas.engine.results import Decode, text_of
from eyas.engine.stops import Detokenizer

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Trace:
    """How a piece came about."""

    parts: list[tuple[str, int]]
    """The piece's text cut at its tokens, each with the depth of the draft it was, or 0 for the target's own
    choice. A character that several tokens make up goes with the last of them; a token without text of its
    own has no part."""
    num_steps: int
    """Target forwards that the completion has taken so far."""
    num_draft_steps: int
    """Those that verified drafts."""
    num_drafted: int
    """Drafts verified for it so far."""
    num_accepted: int
    """Of these, how many became output."""
    seconds: float
    """Time that the engine has spent in steps since the request was queued."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of one completion."""

    index: int
    """Which of the prompt's n completions."""
    text: str
    token_ids: list[int]
    origins: list[int]
    logprobs: list[list[TokenLogprob]] | None
    finish_reason: str | None = None
    """Set on a completion's last piece, which may hold no token."""
    stop_reason: str | int | None = None
    error: str | None = None
    stats: RequestStats | None = field(default=None)
    """The completion's own counters, on its last piece."""
    trace: Trace | None = None
    """Where it was asked for."""


class Seams:
    """Cuts text at its tokens.

    Example, an emoji of tokens 2 3 4 5 at depths 1 2 3 0, then "a" (8) and "b" (9) at depths 1 2:
        add([2, 3, 4, 5, 8, 9], [1, 2, 3, 0, 1, 2]), cut("\U0001f600a") -> [("\U0001f600", 0), ("a", 1)]
        cut("b") -> [("b", 2)]
    """

    def __init__(self, decode: Decode) -> None:
        self._text = Detokenizer(decode)
        self._ends: deque[tuple[int, int]] = deque()
        """(Where a token's text ends, its depth), of tokens whose text has not been cut yet."""
        self._num_chars = self._depth = 0

    def add(self, token_ids: list[int], origins: list[int]) -> None:
        """Take note of tokens."""
        for token_id, origin in zip(token_ids, origins, strict=True):
            before = len(self._text.text)
            self._text.push([token_id])
            if len(self._text.text) > before:
                self._ends.append((len(self._text.text), origin))

    def cut(self, text: str) -> list[tuple[str, int]]:
        """The next part of the text, token by token."""
        parts = []
        while text:
            while self._ends and self._ends[0][0] <= self._num_chars:
                self._ends.popleft()
            size = len(text)
            if self._ends:
                end, self._depth = self._ends[0]
                size = min(size, end - self._num_chars)
            parts.append((text[:size], self._depth))
            self._num_chars += size
            text = text[size:]
        return parts


class RequestFeed:
    """Cuts one request into pieces; with a clock, and text, each has its trace."""

    def __init__(
        self, request: Request, index: int, decode: Decode | None, clock: Clock | None = None
    ) -> None:
        self.request, self.index, self._decode = request, index, decode
        self._num_chars = self._num_tokens = 0
        self._replay = Detokenizer(decode) if decode is not None and request.params.stop else None
        self._clock = clock
        self._seams = None if decode is None or clock is None else Seams(decode)
        self._done = False

    def take(self) -> Piece | None:
        """The part that came since the last call; None if there is none, or after the last."""
        request = self.request
        if self._done:
            return None
        self._done = request.finish_reason is not None
        num_tokens = len(request.output_ids)
        text = ""
        if self._decode is not None and (request.text is not None or self._done):
            whole = text_of(request, self._decode)
            if self._replay is not None and not self._done:
                num_tokens = self._settled(len(whole))
            text, self._num_chars = whole[self._num_chars :], max(self._num_chars, len(whole))
        if not (text or num_tokens > self._num_tokens or self._done):
            return None
        first, self._num_tokens = self._num_tokens, num_tokens
        token_ids, origins = request.output_ids[first:num_tokens], request.origins[first:num_tokens]
        return Piece(
            index=self.index,
            text=text,
            token_ids=token_ids,
            origins=origins,
            logprobs=None if request.logprobs is None else request.logprobs[first:num_tokens],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            stats=request.stats if self._done else None,
            trace=self._trace(text, token_ids, origins),
        )

    def _trace(self, text: str, token_ids: list[int], origins: list[int]) -> Trace | None:
        if self._clock is None:
            return None
        parts: list[tuple[str, int]] = []
        if self._seams is not None:
            self._seams.add(token_ids, origins)
            parts = self._seams.cut(text)
        own = self.request.stats
        return Trace(parts, own.steps, own.draft_steps, own.drafted, own.accepted, self._clock())

    def _settled(self, num_chars: int) -> int:
        """Tokens that no stop string can take back: the shortest prefix whose text has so many characters."""
        assert self._replay is not None
        read = self._num_tokens
        while read < len(self.request.output_ids) and len(self._replay.text) < num_chars:
            self._replay.push([self.request.output_ids[read]])
            read += 1
        return read


class GroupFeed:
    """Cuts a prompt's completions into pieces.

    Args:
        group: the completions.
        decode: tokens to text; None leaves the text empty.
        whole: one piece a completion, once it has ended, instead of one a step.
        clock: seconds that the engine has spent since the group was queued; asks for traces.
    """

    def __init__(
        self, group: Group, decode: Decode | None, *, whole: bool = False, clock: Clock | None = None
    ) -> None:
        self.group, self._whole = group, whole
        self._feeds = [
            RequestFeed(request, index, decode, clock) for index, request in enumerate(group.requests)
        ]

    def take(self) -> list[Piece]:
        """Pieces that came since the last call."""
        feeds = self._feeds
        if self._whole:
            feeds = [feed for feed in feeds if feed.request.finish_reason is not None]
        return [piece for feed in feeds if (piece := feed.take()) is not None]
