"""Prompt lookup decoding: guess that the text goes on as it did after the same last tokens before.

For g = 3, 2, 1 (longest first) look for the most recent earlier occurrence of the last g tokens and
propose what followed it. Where what followed runs into the end of the text, it repeats: the copy reads
its own output, as a period of the text would.

Example, K 4:
    text      a b c d a b      last two tokens "a b" stood at 0..1, followed by c d a b
    guesses   c d a b
    text      x y y            last token "y" stood at 1, followed by "y" and the end
    guesses   y y y y

No model, no cache. Tokens of which no n-gram repeats get -1 (no proposal).
"""

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, KVCache, KVLayout
from eyas.core.errors import ConfigError
from eyas.core.tree import DraftTree


class PromptLookupDrafter:
    """Most recent n-gram match over everything that a request has committed."""

    name = "prompt_lookup"
    aux_layers: tuple[int, ...] = ()
    kv_layout: KVLayout | None = None

    def __init__(self, num_draft_tokens: int, *, max_ngram: int = 3) -> None:
        if num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens}: a drafter guesses at least 1 token")
        if max_ngram < 1:
            raise ConfigError(f"max_ngram={max_ngram}: at least one token must match")
        self.tree = DraftTree.chain(num_draft_tokens)
        self.max_ngram = max_ngram

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.tree.num_nodes - 1

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Nothing to keep."""

    def prefill(self, committed: Committed) -> None:
        """Nothing to extend: the text itself is the cache."""

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens; see eyas.drafters.base.Drafter."""
        newest = committed.start + committed.counts
        num_guesses = committed.wanted(self.num_draft_tokens)
        return Draft(lookup(committed.history, newest, num_guesses, self.max_ngram))


def lookup(history: Tensor, newest: Tensor, num_draft_tokens: int, max_ngram: int = 3) -> Tensor:
    """Continuations int64 [B, K] of history [B, max_len], whose newest token stands at newest [B].

    history [[5, 6, 7, 5, *]], newest [3], K 2 -> [[6, 7]]
    """
    index = torch.arange(history.shape[1], device=history.device)
    matched = torch.zeros_like(history)
    going = index < newest[:, None]
    for back in range(max_ngram):
        wanted = history.gather(1, (newest[:, None] - back).clamp_min(0))
        # history rolled right by `back`: column e holds the token at e - back.
        going = going & (history.roll(back, 1) == wanted) & (index >= back)
        matched += going
    # Longest match first, then the most recent: one argmax over (length, position).
    best = (matched * history.shape[1] + index).argmax(1, keepdim=True)
    found = matched.gather(1, best) > 0
    period = (newest[:, None] - best).clamp_min(1)
    step = torch.arange(num_draft_tokens, device=history.device)
    copied = history.gather(1, (best + 1 + step % period).clamp_max(history.shape[1] - 1))
    return torch.where(found, copied, -1)
