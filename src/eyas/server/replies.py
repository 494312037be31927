"""What is sent back: whole answers and stream chunks in the two shapes of OpenAI's API.

Both shapes carry the same things; a Style says how. Beyond OpenAI's fields, choices have vLLM's `stop_reason`
(and `token_ids`, `origins` where asked for), and `usage` has `speculation`: how many drafts were verified and
accepted.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.core.outputs import CompletionOutput, RequestStats, TokenLogprob
from eyas.engine.feed import Piece
from eyas.engine.results import merged_stats
from eyas.server.bridge import Ticket

TokenText = Callable[[int], str]
Logprobs = list[list[TokenLogprob]] | None


@dataclass(slots=True)
class Style(ABC):
    """One endpoint's shape.

    Args:
        token_text: text of one token id, for log-probabilities.
        with_ids: add `token_ids` and `origins` to choices.
    """

    token_text: TokenText
    with_ids: bool
    whole_object = ""
    chunk_object = ""
    id_prefix = ""

    @abstractmethod
    def content(self, output: CompletionOutput) -> dict[str, Any]:
        """A whole answer's text and log-probabilities."""

    @abstractmethod
    def delta(self, piece: Piece, num_chars: int) -> dict[str, Any]:
        """A chunk's text and log-probabilities; `num_chars` of the choice were sent before."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice, if this shape has one."""

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """A whole answer."""
        return {
            "index": output.index,
            **self.content(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._ids(output),
        }

    def chunk(self, piece: Piece, num_chars: int) -> dict[str, Any]:
        """A piece of an answer."""
        return {
            "index": piece.index,
            **self.delta(piece, num_chars),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **self._ids(piece),
            **_provenance(piece),
        }

    def _ids(self, part: CompletionOutput | Piece) -> dict[str, Any]:
        return {"token_ids": part.token_ids, "origins": part.origins} if self.with_ids else {}


def _provenance(piece: Piece) -> dict[str, Any]:
    trace = piece.trace
    if trace is None:
        return {}
    return {
        "eyas": {
            "parts": trace.parts,
            "num_tokens": len(piece.token_ids),
            "num_steps": trace.num_steps,
            "num_draft_steps": trace.num_draft_steps,
            "num_drafted": trace.num_drafted,
            "num_accepted": trace.num_accepted,
            "engine_seconds": round(trace.seconds, 6),
        }
    }


class ChatStyle(Style):
    """/v1/chat/completions."""

    whole_object, chunk_object, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def content(self, output: CompletionOutput) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(output.logprobs)}

    def delta(self, piece: Piece, num_chars: int) -> dict[str, Any]:  # noqa: ARG002 - offsets are the other shape's
        """A part of a message."""
        content = {"content": piece.text} if piece.text or piece.token_ids else {}
        return {"delta": content, "logprobs": self._logprobs(piece.logprobs)}

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, logprobs: Logprobs) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {**self._entry(chosen), "top_logprobs": [self._entry(entry) for entry in top]}
            for chosen, *top in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        text = self.token_text(entry.token_id)
        # A part of a character has no text; what its bytes are, the tokenizer does not say.
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {
            "token": text,
            "logprob": finite(entry.logprob),
            "bytes": list(text.encode()) if whole else None,
        }


class CompletionStyle(Style):
    """/v1/completions."""

    whole_object, chunk_object, id_prefix = "text_completion", "text_completion", "cmpl"

    def content(self, output: CompletionOutput) -> dict[str, Any]:
        """Text."""
        return {"text": output.text, "logprobs": self._logprobs(output.logprobs, 0)}

    def delta(self, piece: Piece, num_chars: int) -> dict[str, Any]:
        """Text."""
        return {"text": piece.text, "logprobs": self._logprobs(piece.logprobs, num_chars)}

    def opening(self, index: int) -> None:
        """None."""

    def _logprobs(self, logprobs: Logprobs, offset: int) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tokens = [self.token_text(entries[0].token_id) for entries in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entries[0].logprob) for entries in logprobs],
            "top_logprobs": [
                {self.token_text(entry.token_id): finite(entry.logprob) for entry in entries[1:]}
                for entries in logprobs
            ],
            "text_offset": offsets,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot be."""
    return max(logprob, -9999.0)


@dataclass(slots=True)
class Usage:
    """Tokens of an answer, and its speculation counters."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stats: RequestStats

    @classmethod
    def of(cls, ticket: Ticket, completion_tokens: int, parts: Sequence[RequestStats]) -> "Usage":
        """Sums over completions."""
        prompt, cached = ticket.prompt_tokens, ticket.cached_tokens
        return cls(prompt, cached, completion_tokens, merged_stats(list(parts)))

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`, and ours."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "speculation": {
                "steps": self.stats.steps,
                "draft_steps": self.stats.draft_steps,
                "draft_tokens": self.stats.drafted,
                "accepted_tokens": self.stats.accepted,
                "accepted_by_depth": self.stats.accepted_by_depth,
                "acceptance_length": round(self.stats.acceptance_length, 4),
            },
        }


def gather(pieces: Iterable[Piece]) -> CompletionOutput:
    """Put the pieces of one completion together."""
    parts = list(pieces)
    logprobs: Logprobs = None
    if parts[0].logprobs is not None:
        logprobs = [entry for piece in parts for entry in piece.logprobs or []]
    return CompletionOutput(
        index=parts[0].index,
        text="".join(piece.text for piece in parts),
        token_ids=[token for piece in parts for token in piece.token_ids],
        logprobs=logprobs,
        origins=[origin for piece in parts for origin in piece.origins],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
