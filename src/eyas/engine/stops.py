"""Text from tokens while they come, and stop strings in it.

Tokens are bytes, so a character may be cut between two tokens; its bytes wait until it is complete. Text is
always a prefix of `decode(all tokens)`.

A stop string may span tokens and may end anywhere inside an accepted run. The first one to end wins, so a
run is cut exactly where decoding token by token would have stopped; text, token ids, log-probabilities
and origins then end together: the tokens kept are the shortest prefix whose text holds the returned text.

Example, stop "END", tokens " the| E|ND| of": text "the ", tokens " the| E" (the blank before END is text);
with include_stop_str_in_output: text "the END", tokens " the| E|ND".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders show for bytes that are no character (yet)."""

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class Detokenizer:
    """Incremental decoding over a window of tokens: constant cost a token, however long the output.

    Bytes that are no character yet wait, however many they are: some decoders (byte fallback) show even
    complete characters as broken until the last one of a row is complete.
    """

    decode: Decode
    text: str = ""
    """Complete characters so far."""
    _ids: list[int] = field(default_factory=list)
    _prefix: int = 0
    """Window start: decoders look at neighbours (leading blanks), so a few old tokens stay in it."""
    _read: int = 0
    """Tokens before it are in `_done`."""
    _done: str = ""
    _tail: str = ""

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._ids += token_ids
        before = self.decode(self._ids[self._prefix : self._read])
        self._tail = self.decode(self._ids[self._prefix :])[len(before) :]
        complete = self._tail.rstrip(REPLACEMENT)
        self.text = self._done + complete
        if complete == self._tail:
            self._done += self._tail
            self.text = self._done
            self._prefix, self._read, self._tail = self._read, len(self._ids), ""

    def finish(self) -> str:
        """All text, bytes that never became a character included."""
        self.text = self._done + self._tail
        return self.text


@dataclass(frozen=True, slots=True)
class StopHit:
    """Where an output ends because of a stop string."""

    stop: str
    text: str
    num_tokens: int
    """Tokens of the whole output that are kept."""
    num_decoded: int
    """Tokens up to the one that completed the stop string: what decoding token by token would have done."""


def find_stop(text: str, checked: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that ends first behind text[:checked], and where it begins; of two, the longer.

    >>> find_stop("a END b", 0, ("b", "END"))
    (2, 'END')
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, checked - len(stop) + 1))
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return None if best is None else (best[1], best[2])


class TextTracker:
    """Text of one running request, watched for its stop strings."""

    def __init__(
        self, decode: Decode, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._include, self._min_tokens = include_stop, min_tokens
        self._detokenizer = Detokenizer(decode)
        self._ids: list[int] = []
        self._checked = 0
        self.hit: StopHit | None = None

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        """Append an accepted run; returns where the output ends, if a stop string ended in it.

        Stop strings do not count among the first min_tokens tokens.
        """
        early = max(0, min(len(token_ids), self._min_tokens - len(self._ids)))
        if early:
            self._append(token_ids[:early])
            self._checked = len(self._detokenizer.text)
            token_ids = token_ids[early:]
        if token_ids:
            self._append(token_ids)
            self.hit = self._search()
        return self.hit

    def visible(self) -> str:
        """Text that no later token can take back: what might be the start of a stop string waits."""
        if self.hit is not None:
            return self.hit.text
        text = self._detokenizer.text
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return text[: len(text) - longest]

    def _append(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        self._detokenizer.push(token_ids)

    def _search(self) -> StopHit | None:
        text = self._detokenizer.text
        found = find_stop(text, self._checked, self._stops)
        self._checked = len(text)
        if found is None:
            return None
        begin, stop = found
        kept = text[: begin + len(stop)] if self._include else text[:begin]
        return StopHit(stop, kept, self._shortest(len(kept)), self._shortest(begin + len(stop)))

    def _shortest(self, length: int) -> int:
        """Number of tokens whose text holds `length` characters."""
        replay = Detokenizer(self._decode)
        for count, token_id in enumerate(self._ids):
            if len(replay.text) >= length:
                return count
            replay.push([token_id])
        return len(self._ids)
