"""The speculative step as five pure sentences: verify, accept, expand, draft, commit.

The same functions run eagerly and inside one CUDA graph: shapes depend on the number of rows and K alone,
all state is on the device, and no value is read back to the host. Without drafts K is 0 and the step is plain
decoding.

    verified = verify(models, state, slots, variant)
    accepted, report = accept(models, state, slots, verified, variant)
    committed = expand(models, state, slots, verified, accepted, variant)
    draft = propose(models, committed)
    commit(state, slots, draft)

Legend: B requests in the step (graph padding included), S + 1 state rows, K drafts, R = K + 1 rows; of a tree
D is the largest depth, and D + 1 rows at most are accepted (K = D for a chain).

Example, K = 3, one request: length 5, last token t, drafts [d1, d2, d3], the target agrees with d1 only:
    verify   rows [t, d1, d2, d3] at positions 5..8
    accept   tokens [d1, b, *, *], counts 2: length 7, last token b, history[6] = d1, history[7] = b
    expand   draft rows (d1, features at 5), (b, features at 6); the other two are padding
    draft    guesses for positions 8, 9, 10
    commit   they are the request's drafts

Trees go through the same sentences: rows then sit at their depths, acceptance names a path, and `expand`
moves the path's keys and values and gathers its features, so that what follows sees a chain (verify/tree,
nn/tree_paged).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eyas.core.batch import Committed, Draft, ForwardBatch, KVCache
from eyas.core.tree import TreeBudget
from eyas.core.tree_rows import TreeRows
from eyas.drafters.base import Drafter, reads_history
from eyas.engine.sampler import (
    Logprobs,
    Needs,
    choose,
    greedy_choices,
    raw_logprobs,
    row_positions,
    target_probs,
)
from eyas.engine.sampler_state import SamplingState
from eyas.engine.state import EngineState
from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_take import Taken
from eyas.nn.paged import PagedContext, uniform_batch
from eyas.nn.tree_paged import move_rows, tree_batch
from eyas.targets.decoder import Decoder
from eyas.verify.accepted import Accepted
from eyas.verify.forced_lossy import force_lossy
from eyas.verify.rejection import reject_sampled
from eyas.verify.tree import AcceptedPath, accept_tree, tree_rows


@dataclass(slots=True)
class StepModels:
    """What a step computes with."""

    decoder: Decoder
    cache: KVCache
    drafter: Drafter | None


class Variant(NamedTuple):
    """What the host decides about a step before it runs; each combination is a CUDA graph of its own."""

    needs: Needs
    """Of all requests together; GREEDY is an argmax and pays for nothing else."""
    max_visible: int
    """Bound on the KV indices that a row sees."""
    num_drafts: int
    """K or nodes of this step, at most the state's; 0 decodes plainly. Of a larger tree, drafted when the
    batch was another, these are the first nodes, which is a tree too."""
    num_top: int = -1
    """Log-probabilities: of the chosen token and so many likeliest ones; -1 for none."""


class Verified(NamedTuple):
    """Outcome of the target forward over the last tokens and the drafts."""

    hidden: Tensor
    """[B, R, D] after the final norm"""
    features: Tensor | None
    """[B, R, A * D]"""
    taken: Taken
    """What the step started from: row 0 stood at position `taken.start`"""
    tree: TreeRows | None = None
    """Shapes [B, R]; None for chains"""


class Report(NamedTuple):
    """All that the host gets to know of a step."""

    rows: Tensor
    """int64 [B, D + 3]: the tokens, how many of them count, how many drafts there were (kernels' `settle`)"""
    logprobs: Logprobs | None = None
    """Of the tokens, where the variant asks for them"""


def verify(models: StepModels, state: EngineState, slots: Tensor, variant: Variant) -> Verified:
    """Run the target over [last token, drafts]: row r sits at position length + r (trees: + its depth).

    Missing drafts (-1) run as token 0: nothing accepts them. Rows of requests that are off see nothing.
    """
    tree = None
    if state.tree is not None and state.draft_parents is not None and variant.num_drafts:
        parents = state.draft_parents[slots, : variant.num_drafts]
        tree = tree_rows(parents, _deepest(state.tree, variant))
    # A tree's row without a page sees nothing, so it must not be accepted.
    max_len = None if tree is None else state.max_len
    taken = dispatch_step.take(slots, state.source, variant.num_drafts, max_len)
    batch = _rows(state, taken, tree, variant.max_visible)
    capture = models.drafter.aux_layers if models.drafter is not None else ()
    context = PagedContext(models.cache, batch)
    hidden, features = models.decoder(batch.token_ids, batch.positions, context, capture=capture)
    return Verified(
        hidden=hidden.view(*taken.token_ids.shape, -1),
        features=None if features is None else features.view(*taken.token_ids.shape, -1),
        taken=taken,
        tree=tree,
    )


def _deepest(budget: TreeBudget, variant: Variant) -> int:
    """Drafts that a step can accept at most: of few nodes no path is longer than they are many."""
    return min(budget.depth, variant.num_drafts)


def _rows(state: EngineState, taken: Taken, tree: TreeRows | None, max_visible: int) -> ForwardBatch:
    """The forward's rows, a chain or a tree a request."""
    if tree is None:
        return uniform_batch(
            token_ids=taken.token_ids,
            start=taken.start,
            counts=taken.counts,
            page_table=taken.page_table,
            page_size=state.page_size,
            max_position=state.max_len,
            max_visible=max_visible,
        )
    return tree_batch(
        token_ids=taken.token_ids,
        depths=tree.depths,
        bits=tree.ancestor_bits,
        start=taken.start,
        first=0,
        page_table=taken.page_table,
        page_size=state.page_size,
        max_position=state.max_len,
        max_visible=max_visible,
    )


def accept(
    models: StepModels,
    state: EngineState,
    slots: Tensor,
    verified: Verified,
    variant: Variant,
    allowed: Tensor | None = None,
) -> tuple[Accepted | AcceptedPath, Report]:
    """Choose at every row, keep the drafts that were right, and advance the state by them.

    `allowed`, bool [B, R, V], says which tokens a row may choose (engine/grammar); None for all.

    A request whose logits were no distribution (NaN, or nothing but -inf) is reported with count 0: the host
    ends it with an error.
    """
    needs, drafts = variant.needs, verified.taken.drafts
    plain = needs == Needs.GREEDY and variant.num_top < 0 and allowed is None
    raw_logits = None if plain else models.decoder.logits(verified.hidden)
    logits = raw_logits
    if raw_logits is not None and allowed is not None:
        logits = raw_logits.masked_fill(~allowed, -torch.inf)
    counts, nodes = None, None
    if needs & Needs.SAMPLE and state.draft_probs is not None and logits is not None:
        probs, bad_rows = target_probs(*_chosen_from(logits, state, slots, verified), needs)
        positions = row_positions(verified.taken.start + 1, probs.shape[1])
        # Greedy rows carry all mass on their argmax, and for them the rule accepts exactly the argmax.
        q = state.draft_probs[slots][:, : variant.num_drafts]
        tokens, counts = reject_sampled(probs, q, drafts, verified.taken.seeds, positions)
    else:
        if logits is None:
            tokens, bad_rows = greedy_choices(models.decoder, verified.hidden)
        else:
            tokens, bad_rows = choose(*_chosen_from(logits, state, slots, verified), needs, verified.tree)
        tokens, drafts = _forced(state, slots, verified, tokens)
        if verified.tree is not None and state.tree is not None:
            rows = torch.cat((tokens[:, :1], drafts), dim=1)
            tokens, counts, nodes = accept_tree(tokens, rows, verified.tree, _deepest(state.tree, variant))
            bad_rows = bad_rows.gather(1, nodes)
    counts, report = dispatch_step.settle(
        tokens, counts, bad_rows, drafts, slots, verified.taken.start, state.rows
    )
    logprobs = None
    if variant.num_top >= 0 and raw_logits is not None:
        rows = raw_logits if nodes is None else _at(raw_logits, nodes)
        logprobs = raw_logprobs(rows, tokens, variant.num_top)
    accepted = Accepted(tokens, counts) if nodes is None else AcceptedPath(tokens, counts, nodes)
    return accepted, Report(report, logprobs)


def _forced(state: EngineState, slots: Tensor, verified: Verified, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Choices and drafts as they are; in a timing run they agree as was drawn (verify/forced_lossy)."""
    if state.forced_lengths is None:
        return choices, verified.taken.drafts
    return force_lossy(
        choices, verified.taken.drafts, verified.taken.start, slots, state.forced_lengths, verified.tree
    )


def _chosen_from(
    logits: Tensor, state: EngineState, slots: Tensor, verified: Verified
) -> tuple[Tensor, SamplingState, Tensor, Tensor, Tensor, Tensor]:
    """What the sampler wants to know (engine/sampler.process_logits)."""
    return logits, state.sampling, slots, verified.taken.drafts, verified.taken.start + 1, state.history


def _at(values: Tensor, nodes: Tensor) -> Tensor:
    """Rows of values [B, R, n] on the accepted path, [B, D + 1, n]."""
    return values.gather(1, nodes.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def expand(
    models: StepModels,
    state: EngineState,
    slots: Tensor,
    verified: Verified,
    accepted: Accepted | AcceptedPath,
    variant: Variant,
) -> Committed:
    """Lay out the drafter's rows, shifted by one.

    An accepted path of a tree becomes a chain, in the target's cache and in the features.
    """
    features, taken = verified.features, verified.taken
    if isinstance(accepted, AcceptedPath):
        nodes, counts = accepted.nodes, accepted.counts
        move_rows(models.cache, taken.page_table, taken.start, nodes, counts, state.max_len)
        features = None if features is None else _at(features, accepted.nodes)
    return Committed(
        tokens=accepted.tokens,
        features=features,
        start=taken.start,
        counts=accepted.counts,
        page_table=taken.page_table,
        history=state.history[slots] if reads_history(models.drafter) else state.history[:0],
        max_position=state.max_len,
        temperature=taken.temperature,
        seeds=taken.seeds,
        num_guesses=variant.num_drafts,
    )


def propose(models: StepModels, committed: Committed) -> Draft | None:
    """The drafter's guesses; without any wanted, only its cache takes in the committed rows."""
    if models.drafter is None:
        return None
    if committed.num_guesses == 0:
        models.drafter.prefill(committed)
        return None
    return models.drafter.propose(committed)


def commit(state: EngineState, slots: Tensor, draft: Draft | None) -> None:
    """Keep the new drafts; places that have none hold -1."""
    if draft is None:
        if state.num_draft_tokens:
            # An assignment of a number would copy it from the host and wait (`test_step_is_static`).
            state.drafts.index_fill_(0, slots, -1)
        return
    missing = state.num_draft_tokens - draft.tokens.shape[1]
    tokens = functional.pad(draft.tokens, (0, missing), value=-1) if missing else draft.tokens
    state.drafts[slots] = tokens
    if draft.parents is not None:
        assert state.draft_parents is not None, "a drafter of trees says so before (TreeBudget)"
        state.draft_parents[slots] = draft.parents
    if draft.probs is not None:
        state.keep_draft_probs()[slots, : draft.probs.shape[1]] = draft.probs


class Halfway(NamedTuple):
    """What the second half of a step needs of the first."""

    slots: Tensor
    verified: Verified
    accepted: Accepted | AcceptedPath
    report: Report


def first_half(
    models: StepModels, state: EngineState, slots: Tensor, variant: Variant, allowed: Tensor | None = None
) -> Halfway:
    """Verify and accept."""
    verified = verify(models, state, slots, variant)
    accepted, report = accept(models, state, slots, verified, variant, allowed)
    return Halfway(slots, verified, accepted, report)


def second_half(models: StepModels, state: EngineState, first: Halfway, variant: Variant) -> Report:
    """Expand, draft and commit; returns the report of the whole step."""
    committed = expand(models, state, first.slots, first.verified, first.accepted, variant)
    commit(state, first.slots, propose(models, committed))
    return first.report


def whole(models: StepModels, state: EngineState, slots: Tensor, variant: Variant) -> Report:
    """All five sentences."""
    return second_half(models, state, first_half(models, state, slots, variant), variant)
