"""Run the server until a signal: SIGTERM or Ctrl-C lets running requests end, and takes no new ones."""

import signal
import socket
from collections.abc import Callable

import uvicorn

from eyas.core.errors import ConfigError
from eyas.engine.llm import LLM
from eyas.server.app import build_app
from eyas.server.settings import ServerSettings


def serve(
    llms: LLM | list[LLM], settings: ServerSettings, *, on_ready: Callable[[str], None] | None = None
) -> bool:
    """Serve until told to stop; False if the engine died. Must run in the main thread.

    `on_ready` is called with the server's address once connections are taken.
    """
    app = build_app(llms, settings)
    listener = listen(settings.host, settings.port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    server = uvicorn.Server(config)
    bridge = app.state.service.bridge

    def leave() -> None:
        server.should_exit = True

    bridge.on_death = leave
    if on_ready is not None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        on_ready(f"http://{host}:{listener.getsockname()[1]}")
    # uvicorn drains, then raises the signal again for whoever had it before: ending well is not dying by it.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()
    return bridge.dead is None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or ConfigError saying what is in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error


def _ignore(number: int, frame: object) -> None:
    """Do nothing."""
