"""HTTP matters that the framework leaves to us: limits on bodies, clients that hang up, event streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eyas.server.errors import ApiError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has hung up; nobody reads the answer."""


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body as JSON; ApiError 413 as soon as it is too long, 415 or 400 if it is something else.

    ClientGoneError if the client hangs up before its end.

    Asking for the JSON content type keeps other sites' pages from posting to a server on loopback: a browser
    asks before it sends that type across origins, and is refused.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("send the header 'Content-Type: application/json'", status=415)
    too_long = ApiError(f"the body is longer than {max_bytes} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise too_long
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def hung_up(receive: Receive) -> None:
    """Return when the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client hangs up first, the work is cancelled and ClientGoneError raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. `close` is called when they end or the client hangs up, exactly once.

    The line is watched even while there is nothing to send, so that a request that waits in the queue ends
    at once when its client goes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the events."""

        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_hung_up(receive, pump())
        except (ClientGoneError, OSError):
            pass
        finally:
            self._close()
