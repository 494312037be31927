"""What is new in a running request since it was last looked at: pieces that a server can send on.

A piece is never taken back. Text waits while it might be the start of a stop string, and so do the tokens
that only such text belongs to: the pieces of a request, put together, are exactly its final text, tokens,
origins and log-probabilities.

Example, stop "END", tokens " the| E|ND": pieces (" the", [" the"]), ("", []) since " E" may begin with
the blank and E before the stop string, then at the end (" ", [" E"]).
"""

from dataclasses import dataclass, field

from eyas.core.outputs import RequestStats, TokenLogprob
from eyas.engine.intake import Group
from eyas.engine.request import Request
from eyas.engine.results import Decode, text_of
from eyas.engine.stops import Detokenizer


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


class RequestFeed:
    """Cuts one request into pieces."""

    def __init__(self, request: Request, index: int, decode: Decode | None) -> None:
        self.request, self.index, self._decode = request, index, decode
        self._num_chars = self._num_tokens = 0
        self._replay = Detokenizer(decode) if decode is not None and request.params.stop else None
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
        return Piece(
            index=self.index,
            text=text,
            token_ids=request.output_ids[first:num_tokens],
            origins=request.origins[first:num_tokens],
            logprobs=None if request.logprobs is None else request.logprobs[first:num_tokens],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            stats=request.stats if self._done else None,
        )

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
    """

    def __init__(self, group: Group, decode: Decode | None, *, whole: bool = False) -> None:
        self.group, self._whole = group, whole
        self._feeds = [RequestFeed(request, index, decode) for index, request in enumerate(group.requests)]

    def take(self) -> list[Piece]:
        """Pieces that came since the last call."""
        feeds = self._feeds
        if self._whole:
            feeds = [feed for feed in feeds if feed.request.finish_reason is not None]
        return [piece for feed in feeds if (piece := feed.take()) is not None]
