"""What is done to logits before a token is chosen: pure functions over B requests, R rows, V tokens.

Row r of a request chooses the token after its first r drafts, so wherever a processor depends on what was
generated, row r counts those drafts as generated. All shapes are static and nothing is read back to the host.
"""

import torch
from torch import Tensor


def token_counts(history: Tensor, start: Tensor, stop: Tensor, vocab_size: int) -> Tensor:
    """How often each token stands at history[b, start[b] : stop[b]], int32 [B, V].

    Example, V = 4: history [[2, 2, 3, 0]], start [0], stop [3] -> [[0, 0, 2, 1]].

    Args:
        history: int64 [B, max_len]; entries outside the range may be anything.
        start: int64 [B].
        stop: int64 [B].
        vocab_size: V.
    """
    index = torch.arange(history.shape[1], device=history.device)
    inside = (index >= start.unsqueeze(1)) & (index < stop.unsqueeze(1))
    counts = torch.zeros(history.shape[0], vocab_size, dtype=torch.int32, device=history.device)
    # Integers: the order in which CUDA adds them up cannot matter.
    return counts.scatter_add_(1, torch.where(inside, history, 0), inside.int())


def count_drafts(counts: Tensor, drafts: Tensor, ancestor_bits: Tensor | None = None) -> Tensor:
    """Add to the counts of row r the first r drafts, or those on its path: int32 [B, R, V] with R = K + 1.

    Example, V = 3, counts [[1, 0, 0]], drafts [[2, 0]] -> rows [1, 0, 0], [1, 0, 1], [2, 0, 1].

    Args:
        counts: int32 [B, V], before any draft.
        drafts: int64 [B, K]; -1 (no draft) counts nowhere.
        ancestor_bits: int64 [B, R], trees only: bit i + 1 of row r where draft i is on its path.
    """
    num_drafts = drafts.shape[1]
    num_rows = num_drafts + 1
    rows = counts.unsqueeze(1).repeat(1, num_rows, 1)
    if num_drafts == 0:
        return rows
    row = torch.arange(num_rows, device=drafts.device).unsqueeze(1)
    before = torch.arange(num_drafts, device=drafts.device) < row
    if ancestor_bits is not None:
        before = ((ancestor_bits.unsqueeze(2) >> row[1:, 0]) & 1).bool()
    ones = (before & (drafts >= 0).unsqueeze(1)).int()
    return rows.scatter_add_(2, drafts.clamp(min=0).unsqueeze(1).expand(-1, num_rows, -1), ones)


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add values [B, R or 1, N] to the logits [B, R, V] of token_ids int64 [B, N].

    Unused entries have value 0; ids may repeat then.
    """
    num_rows = logits.shape[1]
    index = token_ids.unsqueeze(1).expand(-1, num_rows, -1)
    return logits.scatter_add(2, index, values.expand(-1, num_rows, -1).contiguous())


def forbid_stops(logits: Tensor, stop_ids: Tensor, num_output: Tensor, min_tokens: Tensor) -> Tensor:
    """Set the logits of stop tokens to -inf in rows that have fewer than min_tokens output tokens.

    Args:
        logits: [B, R, V].
        stop_ids: int64 [B, N]; -1 for unused entries.
        num_output: int64 [B, R], output tokens before the one that the row chooses, drafts included.
        min_tokens: int64 [B].
    """
    early = (num_output < min_tokens.unsqueeze(1)).unsqueeze(-1) & (stop_ids >= 0).unsqueeze(1)
    values = torch.zeros_like(early, dtype=logits.dtype).masked_fill_(early, float("-inf"))
    return add_bias(logits, stop_ids.clamp(min=0), values)


def penalize(
    logits: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Repetition penalty over prompt and output, then frequency and presence over the output alone.

    Args:
        logits: [B, R, V].
        in_prompt: bool [B, V].
        output_counts: int32 [B, R, V].
        repetition: float32 [B]; positive logits of seen tokens are divided by it, others multiplied.
        presence: float32 [B]; subtracted once from tokens in the output.
        frequency: float32 [B]; subtracted for each time that a token stands in the output.
    """
    in_output = output_counts > 0
    seen = in_output | in_prompt.unsqueeze(1)
    rate = repetition[:, None, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / rate, logits * rate), logits)
    once = presence[:, None, None] * in_output
    return logits - frequency[:, None, None] * output_counts - once


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature, float32 [B], after moving each row's maximum to 0.

    The shift changes no probability and keeps tiny temperatures from overflowing. Temperature 0 counts as 1:
    such rows are chosen by argmax, which no filter below changes.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def filter_tokens(logits: Tensor, *, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep what min-p, then top-k, then top-p leave; other logits become -inf. One sort of the row.

    - min-p drops tokens whose probability is below min_p times the largest.
    - top-k keeps the k most likely, and whatever ties with the last of them.
    - top-p keeps, in descending order (lower ids first among equals), every token that has less than
      top_p of the remaining probability before it: the smallest set that reaches top_p.

    Example, probabilities [.4, .3, .2, .1]: top_p 0.69 keeps two tokens, top_p 0.71 three; top_k 2 first
    makes them [.57, .43], so that top_p 0.5 then keeps one.

    Args:
        logits: float32 [B, R, V], temperature applied.
        min_p: float32 [B]; 0 is off.
        top_k: int64 [B], 1 .. V; V is off.
        top_p: float32 [B]; 1 is off.
    """
    top = logits.amax(-1, keepdim=True)
    # p < min_p * p_max in logits; log(0) = -inf keeps all.
    lowest = top + min_p.log()[:, None, None]
    kept = None
    if logits.device.type == "cpu" and logits.shape[-1] > 2 * HEAD:
        kept = _keep_by_head(logits, top, lowest, top_k, top_p)
    if kept is None:
        kept = _keep_by_sort(logits, top, lowest, top_k, top_p)
    return logits.masked_fill(~kept, float("-inf"))


HEAD = 256
"""Likeliest tokens that the CPU looks at before it sorts whole rows; rows of real models rarely need more."""


def _keep_by_sort(logits: Tensor, top: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens stay, bool [B, R, V]; static shapes, nothing read back."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kth = ordered.gather(2, (top_k - 1)[:, None, None].expand(-1, logits.shape[1], 1))
    keep = (ordered >= lowest) & (ordered >= kth)
    weights = torch.where(keep, (ordered - top).exp(), 0.0).double()
    before = weights.cumsum(-1) - weights
    wanted = top_p[:, None, None]
    # 1 must keep the last token too, whose "before" may round to 1; the first token always stays.
    keep &= (before < wanted * weights.sum(-1, keepdim=True)) | (wanted >= 1.0)
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(2, order, keep)


def _keep_by_head(logits: Tensor, top: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor | None:
    """Decide as _keep_by_sort does, from the HEAD likeliest tokens; None if they do not suffice.

    Three to five times faster at a vocabulary of 49,152.

    They suffice where top-k and the end of the nucleus lie among them and the token after the nucleus is
    less likely than its last (a tie there is broken by id, which needs the sort). The answer depends on the
    data, so this is for the CPU alone: on CUDA it would make the host wait.
    """
    ordered, _ = logits.topk(HEAD, dim=-1)
    unlimited = (top_k >= logits.shape[-1])[:, None, None]
    kth = ordered.gather(2, (top_k.clamp(max=HEAD) - 1)[:, None, None].expand(-1, logits.shape[1], 1))
    lowest = torch.where(unlimited, lowest, torch.maximum(lowest, kth))
    total = torch.where(logits >= lowest, (logits - top).exp(), 0.0).sum(
        -1, keepdim=True, dtype=torch.float64
    )
    weights = torch.where(ordered >= lowest, (ordered - top).exp(), 0.0).double()
    wanted = top_p[:, None, None]
    inside = weights.cumsum(-1) - weights < wanted * total
    last = (inside.sum(-1, keepdim=True) - 1).clamp(min=0, max=HEAD - 2)
    end, after = ordered.gather(2, last), ordered.gather(2, last + 1)
    ends_here = (~inside[..., -1:] & (end > after)) | (wanted >= 1.0)
    suffices = ends_here & (unlimited | (top_k <= HEAD)[:, None, None])
    if not bool(suffices.all()):
        return None
    return logits >= torch.where(wanted >= 1.0, lowest, torch.maximum(lowest, end))
