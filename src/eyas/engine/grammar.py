"""Answers that must match a grammar: which tokens each row of a verification may choose.

The matcher (xgrammar) runs on the host and knows what the answer holds so far. Before a step it is led along
the request's drafts, row by row, and says at each what may come next; then it is taken back to where it
was. A draft that the grammar forbids leads nowhere: the row above cannot choose it, so it is not
accepted, and what the rows below it would choose does not matter. So the answer is the one that decoding
token by token under the same grammar gives.

Example, regex "ab|ac", answer so far "a", drafts [b, x]:
    row 0   after a       b or c
    row 1   after a b     the end of text only
    row 2   x is forbidden after b: anything, nothing reaches it

The host must know the drafts before the step is launched, so a batch with such a request does without overlap
and graphs (engine/flight); others pay nothing.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.core.errors import RequestError
from eyas.core.grammar import Grammar
from eyas.engine import json_schema, regex
from eyas.engine.request import Request

CACHE_BYTES = 64 << 20
"""Compiled grammars that are kept."""
MAX_BLANKS = 8
"""Blanks in a row between the tokens of JSON; without a bound small models write nothing else."""
WORD_BITS = 32


class Grammars:
    """Compiles grammars for one vocabulary; may be used by several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._compiler: Any = None

    def compile(self, grammar: Grammar) -> Any:
        """The compiled grammar, from the cache if it was compiled before.

        RequestError that begins with the grammar's source: it is wrong, asks for what would not be kept to,
        xgrammar is not installed, or the target has no tokenizer or no end of text.
        """
        if self._compiler is None:
            self._compiler = self._new_compiler(grammar.source)
        compiler = self._compiler
        # What xgrammar would leave out with no more than a line on stderr.
        if grammar.kind == "json_schema":
            json_schema.check(grammar.text, grammar.source)
        elif grammar.kind == "regex" and (fault := regex.fault(grammar.text)):
            raise RequestError(f"{grammar.source}: {fault} in a regular expression")
        try:
            if grammar.kind == "json_schema":
                return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_BLANKS)
            if grammar.kind == "json_object":
                return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_BLANKS)
            if grammar.kind == "regex":
                return compiler.compile_regex(grammar.text)
            return compiler.compile_grammar(grammar.text)
        except Exception as error:
            raise RequestError(f"{grammar.source}: {_reason(error)}") from error

    def start(self, grammar: Grammar) -> "Matching":
        """A new answer's state; RequestError as `compile`."""
        compiled = self.compile(grammar)
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(compiled)
        first = torch.full((1, -(-self._vocab_size // WORD_BITS)), -1, dtype=torch.int32)
        # False: nothing is masked.
        if matcher.fill_next_token_bitmask(first) and not first.any():
            raise RequestError(f"{grammar.source}: no answer can match it")
        return Matching(matcher)

    def _new_compiler(self, source: str) -> Any:
        try:
            import xgrammar
        except ModuleNotFoundError as error:
            raise RequestError(
                f"{source}: {error.name} is not installed, which grammars need: pip install 'eyas[serve]'"
            ) from error
        if self._tokenizer is None or not self._eos:
            raise RequestError(
                f"{source}: a grammar needs a tokenizer and an end of text; this target lacks one"
            )
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos
            )
        except Exception as error:
            raise RequestError(
                f"{source}: xgrammar cannot use this target's tokenizer: {_reason(error)}"
            ) from error
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


class Matching:
    """One answer and its grammar. Used by the engine's thread alone."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._num_taken = matcher, 0
        self.error: str | None = None
        """Why it cannot go on, if it cannot; the request then ends."""

    def fill(
        self, output_ids: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: Tensor
    ) -> None:
        """Write what each row may choose.

        Args:
            output_ids: the answer so far.
            drafts: -1 for none.
            parents: row above each draft, 0 for the newest token and i + 1 for draft i.
            out: int32 [R, W], all ones: bit t % 32 of word t // 32 says whether token t may come.
        """
        try:
            self._take(output_ids)
            self._fill(drafts, parents, out)
        except Exception as error:  # noqa: BLE001 - whatever the matcher raises is this request's end, not others'
            self.error = f"the grammar failed: {_reason(error)}"
            out.zero_()

    def _take(self, output_ids: Sequence[int]) -> None:
        """Follow the answer to where it is now."""
        for token in output_ids[self._num_taken :]:
            if not self._matcher.accept_token(token):
                raise RuntimeError(f"token {token} was chosen, and the grammar forbids it")
            self._num_taken += 1

    def _fill(self, drafts: Sequence[int], parents: Sequence[int], out: Tensor) -> None:
        below: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        for child, parent in enumerate(parents, start=1):
            below[parent].append(child)
        self._matcher.fill_next_token_bitmask(out, 0)
        path = [(0, iter(below[0]))]  # of the rows that the matcher has been led to
        while path:
            above, rest = path[-1]
            row = next(rest, None)
            if row is None:
                path.pop()
                if path:
                    self._matcher.rollback(1)
            elif _allows(out[above], drafts[row - 1]) and self._matcher.accept_token(drafts[row - 1]):
                if self._matcher.is_terminated():  # by an end of text: the request ends there
                    self._matcher.rollback(1)
                    continue
                self._matcher.fill_next_token_bitmask(out, row)
                path.append((row, iter(below[row])))


def masks(requests: Sequence[Request], drafts: Tensor, parents: Tensor | None, vocab_size: int) -> Tensor:
    """Which tokens each row may choose: bool [B, R, V] on the drafts' device.

    Args:
        requests: of the batch; those without a grammar may choose anything.
        drafts: int64 [B, K].
        parents: int64 [B, K] of trees; None for chains.
        vocab_size: V.
    """
    num_rows = drafts.shape[1] + 1
    words = torch.full((len(requests), num_rows, -(-vocab_size // WORD_BITS)), -1, dtype=torch.int32)
    draft_lists = drafts.tolist()
    parent_lists = [range(num_rows - 1)] * len(requests) if parents is None else parents.tolist()
    for row, request in enumerate(requests):
        if request.grammar is not None:
            request.grammar.fill(request.output_ids, draft_lists[row], parent_lists[row], words[row])
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=drafts.device)
    bits = (words.to(drafts.device).unsqueeze(-1) >> shifts) & 1
    return bits.flatten(2)[..., :vocab_size].bool()


def _allows(words: Tensor, token: int) -> bool:
    """Whether a row's mask has the token, which is -1 for none."""
    return token >= 0 and bool(int(words[token // WORD_BITS]) >> (token % WORD_BITS) & 1)


def _reason(error: Exception) -> str:
    """An error's text without the place in xgrammar's source that it begins with, in one line."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?", "", str(error).strip())
    return " ".join(text.split())[:300]
