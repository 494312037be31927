"""A head's rows: next tokens beside the state that goes with them, as layer 0 reads them.

Legend: B requests, R committed rows each, E = extra rows of a parallel drafter, D hidden size, V vocabulary.

Row j of a request carries tokens[b, j] and hidden[b, j] for j < counts[b]. A parallel drafter (P-EAGLE) has E
more rows; every row from counts[b] on is then a mask row, all alike or by depth. Without a mask they hold
what is left over from rejected drafts; either way they are padding, or guesses, only by their slots and
visibility (kernels/*/rows).

Packed rows (kernels/reference/rows) begin with those that count, of all requests. What comes after them may
be anything, and nobody has to compute it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.reference.norm import rms_norm
from eyas.kernels.reference.rows import packed_order, packed_starts


class MaskRow(NamedTuple):
    """What P-EAGLE's mask rows carry."""

    token_id: int
    """Nobody's token; committed tokens with this id read `embedding` too"""
    embedding: Tensor
    """[D]"""
    hidden: Tensor
    """[D], fused already; or [E, D], one a depth from depth 1 (row counts[b]) on, the last for all beyond"""


def expand(
    tokens: Tensor,
    counts: Tensor,
    hidden: Tensor,
    table: Tensor,
    embed_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    *,
    mask: MaskRow | None = None,
    extra: int = 0,
    normed_residual: bool = False,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Layer 0's inputs [B * (R + E), 2D] = [norm(embedding), norm(hidden)], and residual [B * (R + E), D].

    The residual is hidden, or norm(hidden) with `normed_residual`.

    Example, R 3, E 1, counts [2]: rows (t0, h0), (t1, h1), mask, mask.

    Args:
        tokens: int64 [B, R].
        counts: int64 [B], 1 .. R; read only with a mask.
        hidden: [B * R, D], fused features or the head's own output.
        table: embeddings [V, D].
        embed_norm: weight [D] of the embeddings' norm.
        hidden_norm: weight [D] of the hidden state's norm.
        eps: of the norms.
        mask: see MaskRow; needed for extra > 0.
        extra: E.
        normed_residual: see above.
        packed: whether `hidden` is packed by counts, and the results are to be by counts + E.
    """
    if packed:
        order = packed_order(counts, tokens.shape[1])
        hidden = torch.empty_like(hidden).index_copy_(0, order, hidden)
        arguments = (tokens, counts, hidden, table, embed_norm, hidden_norm, eps)
        made = expand(*arguments, mask=mask, extra=extra, normed_residual=normed_residual)
        order = packed_order(counts + extra, tokens.shape[1] + extra)
        return made[0][order], made[1][order]
    embeddings = functional.embedding(tokens, table)
    if mask is not None:
        num_requests, rows = tokens.shape
        is_mask = (tokens == mask.token_id).unsqueeze(-1)
        embeddings = functional.pad(torch.where(is_mask, mask.embedding, embeddings), (0, 0, 0, extra))
        hidden = functional.pad(hidden.view(num_requests, rows, -1), (0, 0, 0, extra))
        depth = torch.arange(rows + extra, device=tokens.device) - counts.unsqueeze(
            1
        )  # from 0: the first mask row
        real = (depth < 0).unsqueeze(-1)
        embeddings = torch.where(real, embeddings, mask.embedding)
        masked = mask.hidden
        if masked.ndim == 2:
            masked = masked[depth.clamp(0, masked.shape[0] - 1)]
        hidden = torch.where(real, hidden, masked).flatten(0, 1)
    normed = rms_norm(embeddings.flatten(0, 1), embed_norm, eps), rms_norm(hidden, hidden_norm, eps)
    return torch.cat(normed, dim=-1), normed[1] if normed_residual else hidden


def pack(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [B * R, W] packed by counts int64 [B]: (them, q_start int32 [B + 1])."""
    return x[packed_order(counts, x.shape[0] // counts.shape[0])], packed_starts(counts)


def newest(x: Tensor, counts: Tensor, num_rows: int, q_start: Tensor | None = None) -> Tensor:
    """Each request's newest committed row and those after it, of x [B * n, D]: [B, num_rows, D].

    Example, n 4, counts [2], num_rows 3: rows 1, 2, 3. Of packed rows q_start says where requests begin.
    """
    each = x.shape[0] // counts.shape[0]
    begin = torch.arange(counts.shape[0], device=x.device) * each if q_start is None else q_start[:-1]
    first = begin + counts - 1
    return x[first.unsqueeze(1) + torch.arange(num_rows, device=x.device)]
