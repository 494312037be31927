"""What a step's report means for each request: tokens kept, and whether and why it ends.

One pass over the requests of a batch with a few Python operations each, none per token, unless stop
strings, streaming or log-probabilities were asked for.

Precedence inside an accepted run: whatever comes first, token by token; for the same token a stop string,
then a stop token, then the length.
"""

from eyas.core.outputs import TokenLogprob
from eyas.engine.request import Request
from eyas.engine.stats import EngineStats


def origins_table(num_draft_tokens: int) -> list[list[int]]:
    """Origins of a run of n tokens, n = 0 .. K + 1: accepted drafts by depth, then the target's own (0).

    K = 2: [[], [0], [1, 0], [1, 2, 0]]
    """
    return [[*range(1, count), 0] if count else [] for count in range(num_draft_tokens + 2)]


class Postprocessor:
    """Applies reports to requests and counts."""

    def __init__(self, num_draft_tokens: int, stats: EngineStats) -> None:
        self._origins = origins_table(num_draft_tokens)
        self._stats = stats
        stats.runs = [0] * (num_draft_tokens + 2)

    def apply(self, requests: list[Request], report: list[list[int]]) -> list[Request]:
        """Append each row's tokens to its request; returns the requests that ended.

        Args:
            requests: in batch order.
            report: rows [tokens (K + 1), count, drafted] of engine/step.accept.
        """
        ended = []
        stats = self._stats
        runs = stats.runs
        for request, row in zip(requests, report, strict=True):
            count = row[-2]
            if count == 0:
                request.finish_reason = "error"
                why = "the target gave no usable logits (NaN, or nothing but -inf)"
                if request.grammar is not None and request.grammar.error is not None:
                    why = request.grammar.error
                request.error = f"{why} after {request.num_tokens} tokens"
                ended.append(request)
                continue
            tokens = row[:count]
            kept = self._keep(request, tokens)
            if request.slot >= 0:  # else preempted meanwhile: its cache is gone, the tokens stay
                request.num_cached += kept
            request.output_ids += tokens[:kept]
            request.origins += self._origins[count][:kept]
            if request.text is not None:
                kept -= self._watch_text(request, tokens[:kept])
            own, drafted = request.stats, row[-1]
            accepted = min(kept, count - 1)  # a run that is cut may end with a draft
            own.steps += 1
            own.draft_steps += drafted > 0
            own.drafted += drafted
            own.accepted += accepted
            request.runs[accepted + 1] += 1
            runs[accepted + 1] += 1
            stats.drafted += drafted
            stats.drafted_row_steps += drafted > 0
            stats.accepted += accepted
            stats.committed += kept
            if request.finish_reason is not None:
                ended.append(request)
        stats.row_steps += len(requests)
        return ended

    @staticmethod
    def _keep(request: Request, tokens: list[int]) -> int:
        """How many tokens of a run stay, by stop tokens and length; sets the reason if it ends here."""
        kept = len(tokens)
        room = request.max_total - request.num_tokens
        if kept >= room:
            kept = room
            request.finish_reason = "length"
        if not request.stop_ids.isdisjoint(tokens):
            for place, token_id in enumerate(tokens[:kept]):
                if token_id in request.stop_ids:
                    request.finish_reason = "stop"
                    request.stop_reason = token_id if token_id in request.params.stop_token_ids else None
                    return place + 1
        return kept

    @staticmethod
    def _watch_text(request: Request, tokens: list[int]) -> int:
        """Extend the text; where a stop string ends it, cut everything to it.

        Returns how many tokens stand behind the stop string. Its own tokens were decoded as by plain
        decoding, so they count as committed although they are cut.
        """
        assert request.text is not None
        if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # a stop token's text is not shown
        hit = request.text.push(tokens)
        behind = 0
        if hit is not None:
            behind = len(request.output_ids) - hit.num_decoded
            del request.output_ids[hit.num_tokens :]
            del request.origins[hit.num_tokens :]
            request.finish_reason, request.stop_reason = "stop", hit.stop
        return behind


def attach_logprobs(
    request: Request, chosen: list[float], ranks: list[int], top_ids: list[list[int]], top: list[list[float]]
) -> None:
    """Append log-probabilities of a step's rows, after `apply`; cut to the tokens that were kept.

    A stop string may have taken back tokens of earlier steps too, so the list is cut as a whole.
    """
    wanted = request.params.logprobs
    assert wanted is not None
    if request.logprobs is None:
        request.logprobs = []
    for token, logprob in enumerate(chosen):
        index = len(request.logprobs)
        if index >= len(request.output_ids):
            break
        request.logprobs.append(
            [
                TokenLogprob(request.output_ids[index], logprob, ranks[token]),
                *(TokenLogprob(top_ids[token][i], top[token][i], i + 1) for i in range(wanted)),
            ]
        )
    del request.logprobs[len(request.output_ids) :]
