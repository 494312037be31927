"""From requests to what callers get."""

from collections.abc import Callable

from eyas.core.outputs import CompletionOutput, RequestOutput, RequestStats
from eyas.engine.intake import Group
from eyas.engine.request import Request

Decode = Callable[[list[int]], str]


def completion(request: Request, index: int, decode: Decode | None) -> CompletionOutput:
    """The state of one completion; `decode` None leaves the text empty."""
    return CompletionOutput(
        index=index,
        text="" if decode is None else text_of(request, decode),
        token_ids=list(request.output_ids),
        logprobs=None if request.logprobs is None else list(request.logprobs),
        origins=list(request.origins),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def text_of(request: Request, decode: Decode) -> str:
    """Text so far: while it runs only what nothing can take back, at the end everything."""
    tracker = request.text
    if tracker is not None and (tracker.hit is not None or request.finish_reason is None):
        return tracker.visible()
    ids = request.output_ids
    if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
        ids = ids[:-1]  # the stop token is kept in token_ids, where it says why; its text is not shown
    return decode(ids)


def request_output(group: Group, decode: Decode | None) -> RequestOutput:
    """The state of a prompt's completions."""
    errors = [request.error for request in group.requests if request.error is not None]
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=list(group.prompt_ids),
        outputs=[completion(request, index, decode) for index, request in enumerate(group.requests)],
        finished=group.finished,
        stats=merged_stats([request.stats for request in group.requests]),
        error=errors[0] if errors else None,
    )


def merged_stats(parts: list[RequestStats]) -> RequestStats:
    """Sums over completions; the prompt counts once."""
    if len(parts) == 1:
        return parts[0]
    depths = max(len(part.accepted_by_depth) for part in parts)
    return RequestStats(
        steps=sum(part.steps for part in parts),
        draft_steps=sum(part.draft_steps for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        accepted_by_depth=[
            sum(part.accepted_by_depth[depth] for part in parts if depth < len(part.accepted_by_depth))
            for depth in range(depths)
        ],
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        preemptions=sum(part.preemptions for part in parts),
    )
