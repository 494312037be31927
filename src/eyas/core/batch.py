"""What one forward needs to know about its rows, and what a drafter gets after a verification.

Legend: B requests, T rows of all requests together, R rows a request where all have as many, K drafts,
P pages a request, A captured layers, D hidden size, V / Vd vocabularies.

A request's cached tokens have KV indices 0, 1, 2, ... which equal their positions. KV index i lives in
page `page_table[b, i // page_size]` at offset `i % page_size`; `slot = page * page_size + offset`.
Page 0 is a scratch page that no request owns: rows with slot -1 are never read back.

Every row says itself how much it sees: row t attends to KV indices [visible[t] - window, visible[t]) of
its request. A token at position p therefore has visible = p + 1; a padding row has visible = 0.

Example, page_size 4, one request with 5 cached tokens in pages [7, 2], verifying 3 rows:
    positions [5, 6, 7]   visible [6, 7, 8]   slots [2*4+1, 2*4+2, 2*4+3] = [9, 10, 11]
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class KVLayout:
    """What a model needs cached per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class KVCache:
    """Keys and values of one model: per layer a tensor [num_pages, page_size, kv_heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    page_size: int


@dataclass(slots=True)
class ForwardBatch:
    """Rows of one forward, grouped by request: rows q_start[b] .. q_start[b+1]-1 belong to request b."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], RoPE positions"""
    slots: Tensor
    """int64 [T], where the row's K and V are written; -1 for nowhere"""
    visible: Tensor
    """int32 [T], how many leading KV indices the row sees; 0 for padding"""
    q_start: Tensor
    """int32 [B + 1]"""
    page_table: Tensor
    """int32 [B, P]"""
    max_rows: int
    """Largest number of rows that a request has here (a bound is enough)."""
    max_visible: int
    """Largest value in `visible` (a bound is enough); sizes loops, never results."""
    uniform_rows: int | None = None
    """R where every request has exactly R rows, else None."""
    packed: bool = False
    """Whether rows q_start[B] .. T - 1 are left over and belong to nobody."""
    tree_bits: Tensor | None = None
    """int64 [T]: for tree rows, which KV indices past `visible` are seen: bit j = index visible + j, j < 63.
    The row's `visible` then counts only the committed prefix (0 is possible); the nodes on its path, itself
    included, are bits. A window counts positions: the prefix starts at visible + number of bits - window."""


@dataclass(slots=True)
class Committed:
    """What a drafter sees after a verification: the rows that were accepted, shifted by one.

    Row j of a request carries the token AFTER position start + j and the target's features AT it (see
    core.capture). Rows j < counts are real; later rows are left over from rejected drafts: they hold
    valid ids but must be given slot -1 and visible 0.

    Example: last committed token t0 at position 5, drafts [d1, d2, d3], d1 accepted, then bonus b:
        start 5   counts 2   tokens [d1, b, *, *]   features of positions [5, 6, *, *]
    """

    tokens: Tensor
    """int64 [B, R]"""
    features: Tensor | None
    """[B, R, A * D], None where the drafter asked for none"""
    start: Tensor
    """int64 [B]"""
    counts: Tensor
    """int64 [B], 1 .. R; 0 in prefill, for a row of the batch that is padding"""
    page_table: Tensor
    """int32 [B, P]"""
    history: Tensor
    """int64 [B, max_len]: all committed tokens, the newest at index start + counts. Empty for a drafter whose
    `reads_history` is False."""
    max_position: int
    """Positions at or past this have no page: slot -1."""
    temperature: Tensor
    """float32 [B]; 0 for greedy rows. Only drafters that sample read it."""
    seeds: Tensor
    """int64 [B]"""
    num_guesses: int | None = None
    """How many guesses are wanted; None for as many as the drafter was built for. Trees keep their shape."""
    max_visible: int | None = None
    """Prefill alone: bound on what rows see, as in ForwardBatch; None for the engine's context limit."""

    def wanted(self, most: int) -> int:
        """Guesses to make, for a drafter built for `most`."""
        return most if self.num_guesses is None else min(most, self.num_guesses)


@dataclass(slots=True)
class Draft:
    """K proposals for each request, below the token at index start + counts of Committed."""

    tokens: Tensor
    """int64 [B, K], target ids; -1 for no proposal (never accepted)"""
    probs: Tensor | None = None
    """float32 [B, K, V]: the q each token was sampled from; None for point masses (argmax, lookups)"""
    parents: Tensor | None = None
    """int64 [B, K], trees only: the row above each node, 0 for the newest token, i + 1 for node i; parents
    before children, siblings distinct. None for chains."""
