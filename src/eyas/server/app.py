"""Routes. What they do is in `service.py`."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from eyas.engine.llm import LLM
from eyas.server.errors import ApiError
from eyas.server.http import ClientGoneError
from eyas.server.methods import Methods
from eyas.server.service import Service
from eyas.server.settings import ServerSettings

Handler = Callable[[Request], Awaitable[Response]]

PAGE = Path(__file__).parent / "page"
"""Plain files, sent as they are; no build step."""
PAGE_HEADERS = {
    # It loads nothing from elsewhere, and no other site may frame it.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
}


def build_app(llms: LLM | list[LLM] | Methods, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application around LLMs that nobody else uses; `app.state.service` is its Service.

    The engine's thread starts and ends with the application's lifespan.
    """
    settings = settings or ServerSettings()
    service = Service(Methods.of(llms), settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 - the framework's signature
        service.bridge.start()
        try:
            yield
        finally:
            await service.bridge.stop()
            service.preparer.stop()

    # Bodies are read by us, so that a description made from the routes would say nothing about them.
    app = FastAPI(title="Eyas", openapi_url=None, lifespan=lifespan)
    app.state.service = service
    _add_error_handlers(app)

    def check_key(request: Request) -> None:
        if settings.api_key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are read as Latin-1 whatever the client wrote; compare the bytes that it sent.
        same = secrets.compare_digest(given.strip().encode("latin-1"), settings.api_key.encode())
        if kind.lower() != "bearer" or not same:
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(
                "wrong or missing API key: send 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers=headers,
            )

    guarded = [Depends(check_key)]

    def counted(handler: Handler) -> Handler:
        """Count the request's outcome."""

        async def count(request: Request) -> Response:
            path, status = request.url.path, 500
            try:
                response = await handler(request)
                status = response.status_code
            except ApiError as error:
                status = error.status
                raise
            except ClientGoneError:
                status = 499
                raise
            else:
                return response
            finally:
                service.metrics.requests.labels(path, str(status)).inc()

        return count

    for path, handler in (
        ("/v1/chat/completions", service.chat),
        ("/v1/completions", service.completion),
        ("/tokenize", service.tokenize),
    ):
        app.add_api_route(path, counted(handler), methods=["POST"], dependencies=guarded, response_model=None)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> JSONResponse:
        return JSONResponse(service.models())

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> JSONResponse:
        return JSONResponse(service.model(name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        dead = service.bridge.dead
        if dead is not None:
            return JSONResponse({"status": "dead", "reason": dead}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # The page holds no secret: no key is asked for it, but it asks for one where the API does.
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as an OpenAI error object."""

    def reply(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    async def api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the framework's signature
        assert isinstance(error, ApiError)
        return reply(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return reply(ApiError(message, status=error.status_code, headers=dict(error.headers or {})))

    async def client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return Response(status_code=499)

    async def fault(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the log has it
        return reply(ApiError("the server failed; its log says why", status=500))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGoneError, client_gone)
    app.add_exception_handler(Exception, fault)
