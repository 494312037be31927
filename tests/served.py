"""A real server on a loopback port, in a thread, around a tiny target."""

import asyncio
import json
import socket
import threading
import time
from typing import Any, Self

import httpx
import uvicorn

from eyas.engine.llm import LLM
from eyas.server.app import build_app
from eyas.server.settings import ServerSettings
from fakes import PieceTokenizer, make_drafter
from tiny import tiny_target

NAME = "tiny-llama"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
"""A request that takes its time, if steps do."""


def tiny_llm(
    *, drafter: str | None = "small_model", num_draft_tokens: int = 3, tokenizer: bool = True, **options: Any
) -> LLM:
    """An LLM of a tiny target with a byte-level tokenizer; the same each time."""
    target = tiny_target()
    if tokenizer:
        target.tokenizer = PieceTokenizer()
    made = None if drafter is None else make_drafter(drafter, target, num_draft_tokens, [])
    usual = {"max_num_seqs": 4, "page_size": 8, "num_pages": 200, "prefill_chunk": 16, "prefix_caching": True}
    return LLM(target, made, **{**usual, **options})


class Served:
    """Context manager: the server runs inside, and has given everything back after."""

    def __init__(self, llm: LLM | list[LLM] | None = None, **settings: Any) -> None:
        self.llm = llm or tiny_llm()
        self.app = build_app(self.llm, ServerSettings(**settings))
        self.service = self.app.state.service
        self.bridge = self.service.bridge

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[listener])))
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream, without the end mark, which must be there."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metric(self, name: str) -> float:
        """The sum over the label sets of a metric, or one sample if its labels are given."""
        lines = self.http.get("/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{"))]
        assert values, name
        return sum(values)

    def idle(self) -> bool:
        """Whether nothing runs or waits and every page is free."""
        load = self.bridge.load
        return not self.bridge.live and load.running == load.waiting == 0 and load.free_pages == load.pages


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
