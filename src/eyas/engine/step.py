"""The speculative step as five pure sentences: verify, accept, expand, draft, commit.

The same functions run eagerly and inside CUDA graphs: shapes depend on the number of rows and K alone, and
no value is read back to the host. Without a drafter K is 0 and the step is plain decoding.

    verified = verify(models, state, slots, max_visible)
    accepted = accept(state, slots, verified, needs)
    committed = expand(models, state, slots, verified, accepted)
    draft = models.drafter.propose(committed)
    commit(state, slots, verified, accepted, draft)

Legend: B requests in the step (graph padding included), S + 1 state rows, K drafts, R = K + 1 rows; of a tree
D is the largest depth, and D + 1 rows at most are accepted (K = D for a chain).

Example, K = 3, one request: length 5, last token t, drafts [d1, d2, d3], the target agrees with d1 only:
    verify   rows [t, d1, d2, d3] at positions 5..8
    accept   tokens [d1, b, *, *], counts 2
    expand   draft rows (d1, features at 5), (b, features at 6); the other two are padding
    commit   length 7, last token b, new drafts; history[6] = d1, history[7] = b

Trees go through the same sentences: rows then sit at their depths, acceptance names a path, and `expand`
moves the path's keys and values and gathers its features, so that what follows sees a chain (verify/tree,
nn/tree_paged).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, ForwardBatch, KVCache
from eyas.core.tree_rows import TreeRows
from eyas.drafters.base import Drafter
from eyas.engine.sampler import Needs, bad_requests, choose, row_positions, target_probs
from eyas.engine.state import EngineState
from eyas.kernels.reference.random import ACCEPT, uniform
from eyas.nn.paged import PagedContext, uniform_batch
from eyas.nn.tree_paged import move_rows, tree_batch
from eyas.targets.decoder import Decoder
from eyas.verify.accepted import Accepted
from eyas.verify.forced_lossy import force_lossy
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import reject_sampled
from eyas.verify.tree import AcceptedPath, accept_tree


@dataclass(slots=True)
class StepModels:
    """What a step computes with."""

    decoder: Decoder
    cache: KVCache
    drafter: Drafter | None


class Verified(NamedTuple):
    """Outcome of the target forward over the last tokens and the drafts."""

    logits: Tensor
    """[B, R, V]"""
    features: Tensor | None
    """[B, R, A * D]"""
    start: Tensor
    """int64 [B], position of row 0 (the length before this step)"""
    drafts: Tensor
    """int64 [B, K]"""
    page_table: Tensor
    """int32 [B, P]"""
    tree: TreeRows | None = None
    """Shapes [B, R]; None for chains"""


def verify(models: StepModels, state: EngineState, slots: Tensor, max_visible: int) -> Verified:
    """Run the target over [last token, drafts]: row r sits at position length + r (trees: + its depth).

    Missing drafts (-1) run as token 0: nothing accepts them.
    """
    drafts, start, page_table = state.drafts[slots], state.length[slots], state.page_table[slots]
    tree = None
    if state.tree is not None and state.draft_parents is not None:
        tree = TreeRows.from_parents(state.draft_parents[slots], state.tree.depth)
        # A row without a page sees nothing, so it must not be accepted.
        drafts = torch.where(row_positions(start + 1, drafts.shape[1]) < state.max_len, drafts, -1)
    rows = torch.cat((state.last_token[slots].unsqueeze(1), drafts.clamp_min(0)), dim=1)
    batch = _rows(state, rows, start, page_table, tree, max_visible)
    capture = models.drafter.aux_layers if models.drafter is not None else ()
    context = PagedContext(models.cache, batch)
    hidden, features = models.decoder(batch.token_ids, batch.positions, context, capture=capture)
    return Verified(
        logits=models.decoder.logits(hidden).view(*rows.shape, -1),
        features=None if features is None else features.view(*rows.shape, -1),
        start=start,
        drafts=drafts,
        page_table=page_table,
        tree=tree,
    )


def _rows(
    state: EngineState,
    token_ids: Tensor,
    start: Tensor,
    page_table: Tensor,
    tree: TreeRows | None,
    max_visible: int,
) -> ForwardBatch:
    """The forward's rows, a chain or a tree a request."""
    if tree is None:
        return uniform_batch(
            token_ids=token_ids,
            start=start,
            counts=torch.full_like(start, token_ids.shape[1]),
            page_table=page_table,
            page_size=state.page_size,
            max_position=state.max_len,
            max_visible=max_visible,
        )
    return tree_batch(
        token_ids=token_ids,
        depths=tree.depths,
        bits=tree.ancestor_bits,
        start=start,
        first=0,
        page_table=page_table,
        page_size=state.page_size,
        max_position=state.max_len,
        max_visible=max_visible,
    )


def accept(
    state: EngineState, slots: Tensor, verified: Verified, needs: Needs
) -> tuple[Accepted | AcceptedPath, Tensor]:
    """Choose at every row and keep the drafts that were right.

    Returns (accepted, report int64 [B, D + 3]): the tokens, how many of them count, how many drafts there
    were. Count 0 says that the target's logits were no distribution (NaN, or nothing but -inf): the host
    ends that request with an error. Everything the host needs to know is in this one tensor.
    """
    accepted: Accepted | AcceptedPath
    arguments = (verified.logits, state.sampling, slots, verified.drafts, verified.start + 1, state.history)
    if needs & Needs.SAMPLE and state.draft_probs is not None:
        probs, bad_rows = target_probs(*arguments, needs)
        positions = row_positions(verified.start + 1, probs.shape[1])
        # Greedy rows carry all mass on their argmax, and for them the rule accepts exactly the argmax.
        accepted = reject_sampled(
            probs, state.draft_probs[slots], verified.drafts, state.sampling.seeds[slots], positions
        )
    elif state.tree is None or verified.tree is None:
        choices, bad_rows = choose(*arguments, needs)
        accepted = accept_by_match(*_forced(state, slots, verified, choices))
    else:
        choices, bad_rows = choose(*arguments, needs, verified.tree)
        choices, drafts = _forced(state, slots, verified, choices)
        tokens = torch.cat((choices[:, :1], drafts), dim=1)
        accepted = accept_tree(choices, tokens, verified.tree, state.tree.depth)
        bad_rows = bad_rows.gather(1, accepted.nodes)
    counts = torch.where(bad_requests(bad_rows, accepted.counts), 0, accepted.counts)
    drafted = (verified.drafts >= 0).sum(1)
    return accepted, torch.cat((accepted.tokens, counts.unsqueeze(1), drafted.unsqueeze(1)), dim=1)


def _forced(state: EngineState, slots: Tensor, verified: Verified, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Choices and drafts as they are; in a timing run they agree at forced rates (verify/forced_lossy)."""
    if state.forced_rates is None:
        return choices, verified.drafts
    # Greedy requests have no seed of their own: the slot tells them apart.
    seeds = (state.sampling.seeds[slots] + slots).unsqueeze(1)
    uniforms = uniform(seeds, row_positions(verified.start + 1, state.forced_rates.numel()), ACCEPT)
    return force_lossy(choices, verified.drafts, state.forced_rates, uniforms, verified.tree)


def expand(
    models: StepModels,
    state: EngineState,
    slots: Tensor,
    verified: Verified,
    accepted: Accepted | AcceptedPath,
) -> Committed:
    """Write the accepted tokens to the history and lay out the drafter's rows, shifted by one.

    All D + 1 tokens are written; those past the count are overwritten by the next step. An accepted path of
    a tree
    becomes a chain, in the target's cache and in the features.
    """
    features = verified.features
    if isinstance(accepted, AcceptedPath):
        page_table, start = verified.page_table, verified.start
        move_rows(models.cache, page_table, start, accepted.nodes, accepted.counts, state.max_len)
        features = None if features is None else _at_nodes(features, accepted)
    columns = row_positions(verified.start + 1, accepted.tokens.shape[1])
    state.history[slots.unsqueeze(1), columns] = accepted.tokens
    return Committed(
        tokens=accepted.tokens,
        features=features,
        start=verified.start,
        counts=accepted.counts,
        page_table=verified.page_table,
        history=state.history[slots],
        max_position=state.max_len,
        temperature=state.sampling.temperature[slots],
        seeds=state.sampling.seeds[slots],
    )


def _at_nodes(values: Tensor, accepted: AcceptedPath) -> Tensor:
    """Rows of values [B, R, n] on the accepted path, [B, D + 1, n]."""
    return values.gather(1, accepted.nodes.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def committed_logits(verified: Verified, accepted: Accepted | AcceptedPath) -> Tensor:
    """The logits that accepted.tokens were chosen from, [B, D + 1, V]."""
    return verified.logits if isinstance(accepted, Accepted) else _at_nodes(verified.logits, accepted)


def commit(
    state: EngineState,
    slots: Tensor,
    verified: Verified,
    accepted: Accepted | AcceptedPath,
    draft: Draft | None,
) -> None:
    """Advance lengths and last tokens, and keep the new drafts. The trash row stays at length 0."""
    newest = accepted.tokens.gather(1, accepted.counts.unsqueeze(1) - 1).squeeze(1)
    state.last_token[slots] = newest
    state.length[slots] = torch.where(slots < state.num_slots, verified.start + accepted.counts, 0)
    if draft is not None:
        state.drafts[slots] = state.limited(slots, draft.tokens)
        if draft.parents is not None:
            assert state.draft_parents is not None, "a drafter of trees says so before (TreeBudget)"
            state.draft_parents[slots] = draft.parents
        if draft.probs is not None:
            state.keep_draft_probs()[slots] = draft.probs
