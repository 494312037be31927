"""As kernels/dispatch, for what stands between the forwards of a speculative step."""

from torch import Tensor

from eyas.kernels.dispatch import _twin
from eyas.kernels.reference import step_expand as _expand
from eyas.kernels.reference import step_force as _force
from eyas.kernels.reference import step_grow as _grow
from eyas.kernels.reference import step_markov as _markov
from eyas.kernels.reference import step_move as _move
from eyas.kernels.reference import step_settle as _settle
from eyas.kernels.reference import step_take as _take
from eyas.kernels.reference import step_tree as _tree
from eyas.kernels.reference.step_expand import MaskRow
from eyas.kernels.reference.step_grow import Frontier, Pool
from eyas.kernels.reference.step_settle import StateRows
from eyas.kernels.reference.step_take import Source, Taken


def take(slots: Tensor, source: Source, num_drafts: int, max_len: int | None = None) -> Taken:
    """See eyas.kernels.reference.step_take.take."""
    out: Taken = _twin(_take, slots).take(slots, source, num_drafts, max_len)
    return out


def force(
    choices: Tensor, drafts: Tensor, start: Tensor, slots: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_force.force."""
    out: tuple[Tensor, Tensor] = _twin(_force, choices).force(choices, drafts, start, slots, table)
    return out


def settle(
    tokens: Tensor,
    counts: Tensor | None,
    bad_rows: Tensor,
    drafts: Tensor,
    slots: Tensor,
    start: Tensor,
    rows: StateRows,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_settle.settle."""
    out: tuple[Tensor, Tensor] = _twin(_settle, tokens).settle(
        tokens, counts, bad_rows, drafts, slots, start, rows
    )
    return out


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
    """See eyas.kernels.reference.step_expand.expand."""
    out: tuple[Tensor, Tensor] = _twin(_expand, hidden).expand(
        tokens,
        counts,
        hidden,
        table,
        embed_norm,
        hidden_norm,
        eps,
        mask=mask,
        extra=extra,
        normed_residual=normed_residual,
        packed=packed,
    )
    return out


def pack(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_expand.pack."""
    out: tuple[Tensor, Tensor] = _twin(_expand, x).pack(x, counts)
    return out


def newest(x: Tensor, counts: Tensor, num_rows: int, q_start: Tensor | None = None) -> Tensor:
    """See eyas.kernels.reference.step_expand.newest."""
    out: Tensor = _twin(_expand, x).newest(x, counts, num_rows, q_start)
    return out


def move_nodes(
    keys: list[Tensor],
    values: list[Tensor],
    page_table: Tensor,
    start: Tensor,
    nodes: Tensor,
    counts: Tensor,
    max_position: int,
) -> None:
    """See eyas.kernels.reference.step_move.move_nodes."""
    _twin(_move, nodes).move_nodes(keys, values, page_table, start, nodes, counts, max_position)


def tree_shape(draft_parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See eyas.kernels.reference.step_tree.tree_shape."""
    out: tuple[Tensor, Tensor, Tensor] = _twin(_tree, draft_parents).tree_shape(draft_parents, max_depth)
    return out


def accept_path(
    choices: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, bits: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See eyas.kernels.reference.step_tree.accept_path."""
    out: tuple[Tensor, Tensor, Tensor] = _twin(_tree, choices).accept_path(
        choices, tokens, parents, depths, bits, max_depth
    )
    return out


def top_logprobs(logits: Tensor, top_k: int, index_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_grow.top_logprobs."""
    out: tuple[Tensor, Tensor] = _twin(_grow, logits).top_logprobs(logits, top_k, index_map)
    return out


def grow(
    pool: Pool,
    begin: int,
    frontier: Frontier | None,
    tokens: Tensor,
    log_q: Tensor,
    width: int,
    first_bit: int = 0,
    *,
    children: bool = True,
) -> Frontier:
    """See eyas.kernels.reference.step_grow.grow."""
    out: Frontier = _twin(_grow, tokens).grow(
        pool, begin, frontier, tokens, log_q, width, first_bit, children=children
    )
    return out


def best(pool: Pool, size: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_grow.best."""
    out: tuple[Tensor, Tensor] = _twin(_grow, pool.tokens).best(pool, size, num_draft_tokens)
    return out


def markov_guess(
    logits: Tensor,
    pre: Tensor | None,
    table: Tensor,
    out: Tensor,
    index_map: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """See eyas.kernels.reference.step_markov.markov_guess."""
    twin = _twin(_markov, logits)
    if twin is _markov and logits.device.type == "cpu":
        return _markov.guess_in_passes(logits, pre, table, out, index_map, silu=silu)
    guesses: Tensor = twin.markov_guess(logits, pre, table, out, index_map, silu=silu)
    return guesses
