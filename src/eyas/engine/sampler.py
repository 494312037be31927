"""From logits to chosen tokens, for B requests with R = K + 1 rows each (R = 1 without drafts).

    choices, bad = choose(logits, state, slots, drafts, position0, history, needs)
    accepted = accept_by_match(choices, drafts)                     point-mass drafts, or none

    p, bad = target_probs(logits, state, slots, drafts, position0, history, needs)
    accepted = reject_sampled(p, q, drafts, state.seeds[slots], row_positions(position0, R))

`position0` is the absolute position of the token that row 0 chooses, which is also the number of tokens that
the request has so far: history[slot, :position0]. Row r chooses position0 + r, having seen drafts[:r].

All functions are pure, have static shapes and never wait for the device. A bad row (NaN or +inf among its
logits, or nothing but -inf) harms no other row; its choice is some valid id, and the engine ends the request
with an error if it would commit it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.tree_rows import TreeRows
from eyas.engine.logits_processors import (
    add_bias,
    apply_temperature,
    count_drafts,
    filter_tokens,
    forbid_stops,
    penalize,
    token_counts,
)
from eyas.engine.sampler_state import (
    Needs,
    SamplingState,
    check_params,
    needs_of,
    stop_ids_of,
    wrap_seed,
)
from eyas.kernels.reference.random import TARGET, draw, uniform
from eyas.targets.decoder import Decoder

__all__ = [
    "Choices",
    "Logprobs",
    "Needs",
    "SamplingState",
    "TargetProbs",
    "check_params",
    "choose",
    "greedy_choices",
    "needs_of",
    "process_logits",
    "raw_logprobs",
    "row_positions",
    "stop_ids_of",
    "target_probs",
    "wrap_seed",
]


class Choices(NamedTuple):
    """One token a row, and which rows had no usable distribution."""

    tokens: Tensor
    """int64 [B, R]"""
    bad_rows: Tensor
    """bool [B, R]"""


class TargetProbs(NamedTuple):
    """The distribution p of every row after all processors; greedy rows have all mass on their argmax."""

    probs: Tensor
    """float32 [B, R, V]"""
    bad_rows: Tensor
    """bool [B, R]"""


class Logprobs(NamedTuple):
    """Log-probabilities under the unprocessed logits."""

    chosen: Tensor
    """float32 [B, R]"""
    ranks: Tensor
    """int64 [B, R], 1 for the most likely token"""
    top_ids: Tensor
    """int64 [B, R, n]"""
    top: Tensor
    """float32 [B, R, n]"""


def row_positions(position0: Tensor, num_rows: int, tree: TreeRows | None = None) -> Tensor:
    """Absolute position of the token that each row chooses, int64 [B, R].

    Example: position0 [5, 9], 3 rows -> [[5, 6, 7], [9, 10, 11]]; in a tree of depths [[0, 1, 1], [0, 1, 2]]
    [[5, 6, 6], [9, 10, 11]].
    """
    if tree is not None:
        return position0.unsqueeze(1) + tree.depths
    return position0.unsqueeze(1) + torch.arange(num_rows, device=position0.device)


def _shape(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    drafts: Tensor,
    position0: Tensor,
    history: Tensor,
    tree: TreeRows | None,
) -> Tensor:
    """Bias, min-tokens and penalties: everything that also changes the argmax."""
    num_rows = logits.shape[1]
    rows = history[slots]
    num_prompt = state.num_prompt_tokens[slots]
    num_output = row_positions(position0 - num_prompt, num_rows, tree)
    in_prompt = token_counts(rows, torch.zeros_like(num_prompt), num_prompt, state.vocab_size) > 0
    output_counts = count_drafts(
        token_counts(rows, num_prompt, position0, state.vocab_size),
        drafts,
        None if tree is None else tree.ancestor_bits,
    )
    logits = add_bias(logits, state.bias_ids[slots], state.bias_values[slots].unsqueeze(1))
    logits = forbid_stops(logits, state.stop_ids[slots], num_output, state.min_tokens[slots])
    return penalize(
        logits,
        in_prompt,
        output_counts,
        repetition=state.repetition_penalty[slots],
        presence=state.presence_penalty[slots],
        frequency=state.frequency_penalty[slots],
    )


def process_logits(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    drafts: Tensor,
    position0: Tensor,
    history: Tensor,
    needs: Needs,
    tree: TreeRows | None = None,
) -> Tensor:
    """Apply every processor that the batch needs, in the order of core/sampling.

    Args:
        logits: [B, R, V], any float type; not changed.
        state: parameters of all slots.
        slots: int64 [B], the request slot of each batch row.
        drafts: int64 [B, R - 1]; -1 for no draft.
        position0: int64 [B].
        history: int64 [S + 1, max_len], known tokens of every slot.
        needs: union of needs_of over the batch's requests.
        tree: shapes of the drafts where they are trees, of R rows.

    Returns:
        float32 [B, R, V]. Up to a constant a row, the log of p; rows with temperature 0 are as if it were 1.
    """
    logits = logits.float()
    if needs & Needs.SHAPE:
        logits = _shape(logits, state, slots, drafts, position0, history, tree)
    if needs & Needs.SAMPLE:
        logits = apply_temperature(logits, state.temperature[slots])
    if needs & Needs.FILTER:
        logits = filter_tokens(
            logits, min_p=state.min_p[slots], top_k=state.top_k[slots], top_p=state.top_p[slots]
        )
    return logits


def _argmax(logits: Tensor) -> Choices:
    """First most likely token. torch counts NaN as the largest value, so one look at the winner tells."""
    best = logits.argmax(-1)
    return Choices(best, ~logits.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite())


def greedy_choices(decoder: Decoder, hidden: Tensor) -> Choices:
    """The argmax at every row of hidden [B, R, D], for batches that need nothing else of the logits."""
    best, tokens = decoder.max_logits(hidden)
    # Infinities and NaN less themselves are NaN. Two launches; isfinite and its inverse are five.
    return Choices(tokens, best - best != 0)


def choose(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    drafts: Tensor,
    position0: Tensor,
    history: Tensor,
    needs: Needs,
    tree: TreeRows | None = None,
) -> Choices:
    """Choose a token at every row: the argmax, or one draw keyed by (seed, position).

    For greedy batches this is an argmax over the logits as they are. Arguments as in process_logits.
    """
    if needs == Needs.GREEDY:
        return _argmax(logits)
    processed = process_logits(logits, state, slots, drafts, position0, history, needs, tree)
    choices = _argmax(processed)
    if not needs & Needs.SAMPLE:
        return choices
    positions = row_positions(position0, logits.shape[1], tree)
    uniforms = uniform(state.seeds[slots].unsqueeze(1), positions, TARGET)
    drawn = draw(processed.softmax(-1), uniforms)
    sampled = (state.temperature[slots] > 0).unsqueeze(1)
    return Choices(torch.where(sampled, drawn, choices.tokens), choices.bad_rows)


def target_probs(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    drafts: Tensor,
    position0: Tensor,
    history: Tensor,
    needs: Needs,
) -> TargetProbs:
    """The target's distribution at every row, for verify.rejection. Arguments as in process_logits."""
    processed = process_logits(logits, state, slots, drafts, position0, history, needs)
    tokens, bad_rows = _argmax(processed)
    certain = torch.zeros_like(processed).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    if not needs & Needs.SAMPLE:
        return TargetProbs(certain, bad_rows)
    sampled = (state.temperature[slots] > 0)[:, None, None]
    return TargetProbs(torch.where(sampled, processed.softmax(-1), certain), bad_rows)


def raw_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of the committed tokens and of the top n, before any processing.

    Args:
        logits: [B, R, V] as the target gave them.
        tokens: int64 [B, R].
        num_top: n, the largest that a request of the batch asks for; 0 for the chosen token alone.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    top, top_ids = logprobs.topk(num_top, dim=-1)
    return Logprobs(chosen.squeeze(-1), ranks, top_ids, top)
