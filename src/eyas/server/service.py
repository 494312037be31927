"""What the endpoints do, apart from HTTP routes: from a body to an answer or a stream of chunks."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eyas.core.errors import RequestError
from eyas.core.outputs import RequestStats
from eyas.core.sampling import SamplingParams
from eyas.engine.intake import Prompt
from eyas.engine.results import Decode
from eyas.server.bridge import Bridge, Ticket
from eyas.server.errors import ApiError, of_request_error
from eyas.server.http import EventStream, read_json, unless_hung_up
from eyas.server.methods import Methods, shape_of
from eyas.server.metrics import Metrics
from eyas.server.prepare import FIELDS, Preparer
from eyas.server.replies import DONE, ChatStyle, CompletionStyle, Style, Usage, event, gather
from eyas.server.schema import ChatRequest, CompletionRequest, Sampling, TokenizeRequest, parse
from eyas.server.settings import ServerSettings

COMPLETION_TOKENS = 16
"""OpenAI's default for max_tokens of /v1/completions; chat answers may fill the context."""


class Service:
    """One target behind the API; `NAME:METHOD` chooses the way of decoding, `NAME` the first."""

    def __init__(self, methods: Methods, settings: ServerSettings) -> None:
        self.methods, self.llm, self.settings = methods, methods.llm, settings
        self.model_name = settings.model_name or methods.llm.target.identity.name
        self.model_names = {self.model_name: methods.default}
        self.model_names |= {f"{self.model_name}:{name}": name for name in methods.llms}
        self.created = int(time.time())
        self.bridge = Bridge(methods, max_queue=settings.max_queue)
        self.preparer = Preparer(methods)
        self.metrics = Metrics(self.bridge, self.model_name)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        body = parse(ChatRequest, await read_json(request, self.settings.max_body_bytes))
        method = self.method(body.model)
        params = self._params(body, self.llm.max_model_len)
        self._check_choices(params.n, "n")
        with self.bridge.admit(params.n):
            ids = await self.preparer.chat_ids(body.messages, body.chat_template_kwargs)
            style = ChatStyle(self.token_text, body.return_token_ids)
            ticket = await self._submit(method, [ids], params, style, body, "messages")
        return await self._answer(request, ticket, style, body)

    async def completion(self, request: Request) -> Response:
        """/v1/completions."""
        body = parse(CompletionRequest, await read_json(request, self.settings.max_body_bytes))
        method = self.method(body.model)
        prompts = body.prompts()
        params = self._params(body, COMPLETION_TOKENS)
        size = len(prompts) * params.n
        self._check_choices(size, "prompt" if params.n == 1 else "n")
        with self.bridge.admit(size):
            style = CompletionStyle(self.token_text, body.return_token_ids)
            ticket = await self._submit(method, prompts, params, style, body, "prompt")
        return await self._answer(request, ticket, style, body)

    async def tokenize(self, request: Request) -> Response:
        """/tokenize: ids of a text, or of a conversation as the chat endpoint would render it."""
        body = parse(TokenizeRequest, await read_json(request, self.settings.max_body_bytes))
        self.method(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await self.preparer.chat_ids(body.messages, body.chat_template_kwargs)
        else:
            ids = await self.preparer.encode(body.prompt or "", special=body.add_special_tokens)
        return JSONResponse({"count": len(ids), "max_model_len": self.llm.max_model_len, "tokens": ids})

    def models(self) -> dict[str, Any]:
        """/v1/models: the target, and where there are several methods each of them."""
        names = list(self.model_names) if len(self.methods.llms) > 1 else [self.model_name]
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> dict[str, Any]:
        """One model; ApiError 404 if there is none of this name."""
        method = self.method(name)
        llm = self.methods.llms[method]
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "eyas",
            "max_model_len": llm.max_model_len,
            "method": method,
            "drafter": None if llm.drafter is None else llm.drafter.name,
            "num_draft_tokens": llm.num_draft_tokens,
            "tree": shape_of(llm),
        }

    def method(self, name: str | None) -> str:
        """The method that a model's name stands for; ApiError 404 if there is none of this name."""
        method = self.methods.default if name is None else self.model_names.get(name)
        if method is None:
            known = ", ".join(repr(one["id"]) for one in self.models()["data"])
            message = f"no model {name!r} here; this server has {known}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return method

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        if self.llm.tokenizer is None:
            return f"token_id:{token_id}"
        text: str = self.llm.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _check_choices(self, size: int, param: str) -> None:
        limit = self.settings.max_choices
        if size > limit:
            raise ApiError(f"prompts times n is {size}; at most {limit} are served at once", param=param)

    @staticmethod
    def _params(body: Sampling, default_max_tokens: int) -> SamplingParams:
        try:
            return body.to_params(default_max_tokens=default_max_tokens)
        except RequestError as error:
            raise of_request_error(error, FIELDS, "") from error

    async def _submit(
        self,
        method: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        style: Style,
        body: Sampling,
        field: str,
    ) -> Ticket:
        request_id = f"{style.id_prefix}-{secrets.token_hex(12)}"
        stream = bool(body.stream)
        groups = await self.preparer.groups(
            prompts, params, method=method, request_id=request_id, stream=stream, field=field
        )
        decode: Decode | None = None
        if self.llm.tokenizer is not None:
            decode = self.preparer.decoder(params)
        ticket = self.bridge.submit(
            groups,
            decode,
            method=method,
            request_id=request_id,
            stream=stream,
            provenance=stream and body.eyas.provenance,
        )
        self.metrics.began(ticket)
        return ticket

    def _close(self, ticket: Ticket, *, stream: bool) -> None:
        self.bridge.close(ticket)
        self.metrics.ended(ticket, stream=stream)

    async def _answer(self, request: Request, ticket: Ticket, style: Style, body: Sampling) -> Response:
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(ticket, style, include_usage=include_usage)
            return EventStream(events, lambda: self._close(ticket, stream=True))
        try:
            return await unless_hung_up(request.receive, self._whole(ticket, style))
        finally:
            self._close(ticket, stream=False)

    def _head(self, ticket: Ticket, kind: str) -> dict[str, Any]:
        created = int(ticket.created)
        name = self.model_name
        if ticket.method != self.methods.default:
            name = f"{name}:{ticket.method}"
        return {"id": ticket.request_id, "object": kind, "created": created, "model": name}

    async def _whole(self, ticket: Ticket, style: Style) -> Response:
        pieces = sorted([piece async for piece in ticket.pieces()], key=lambda piece: piece.index)
        outputs = [gather([piece]) for piece in pieces]
        tokens = sum(len(output.token_ids) for output in outputs)
        usage = Usage.of(ticket, tokens, [piece.stats for piece in pieces if piece.stats])
        return JSONResponse(
            {
                **self._head(ticket, style.whole_object),
                "choices": [style.choice(output) for output in outputs],
                "usage": usage.body(),
            }
        )

    async def _events(self, ticket: Ticket, style: Style, *, include_usage: bool) -> AsyncIterator[bytes]:
        """Chunks, then usage if asked for, then the end mark; an error takes the place of what is left."""
        head = self._head(ticket, style.chunk_object)
        # OpenAI's clients expect the field on every chunk once it is asked for.
        empty: dict[str, Any] = {"usage": None} if include_usage else {}
        num_chars = [0] * ticket.size
        tokens, stats = 0, list[RequestStats]()
        opened = set[int]()
        try:
            async for piece in ticket.pieces():
                # With the first piece, not before: clients take the first chunk for the first token.
                opening = style.opening(piece.index) if piece.index not in opened else None
                opened.add(piece.index)
                if opening is not None:
                    yield event({**head, "choices": [opening], **empty})
                yield event({**head, "choices": [style.chunk(piece, num_chars[piece.index])], **empty})
                num_chars[piece.index] += len(piece.text)
                tokens += len(piece.token_ids)
                if piece.stats is not None:
                    stats.append(piece.stats)
        except ApiError as error:
            yield event(error.body())
        else:
            if include_usage:
                usage = Usage.of(ticket, tokens, stats)
                yield event({**head, "choices": [], "usage": usage.body()})
        yield DONE
