"""Answers from any OpenAI-compatible endpoint (over HTTP), several requests at a time.

The endpoint returns text, so its conversations carry no token ids; packing tokenises them with the chat
template. Requests that fail for a passing reason (connection, 429, 5xx) are tried again, later each time and
at the next endpoint of the list. One that the endpoint refuses (too long for its context, say) is left out,
and the others go on. An endpoint gets no more requests a minute than it may, and none while it asks to wait
(Retry-After).
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from eyas.core.errors import DataError
from eyas.core.sampling import SamplingParams
from eyas.data.regenerate_dialog import Dialog, Generate

REFUSED = (400, 413, 422)
"""HTTP codes that speak of one request, not of the endpoint."""


class _RefusedError(DataError):
    """The endpoint does not take this request."""


class Pace:
    """When an endpoint may be asked next, for all threads that ask it."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 0.0 if per_minute is None else 60.0 / per_minute
        self._next, self._lock = 0.0, threading.Lock()

    def wait(self) -> None:
        """Sleep until it is this caller's turn: turns come evenly, 60 / per_minute seconds apart."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._gap
        time.sleep(turn - now)

    def hold(self, seconds: float) -> None:
        """Give no turn for so long."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


@dataclass(slots=True, kw_only=True)
class EndpointAnswerer:
    """Round robin over `urls`, each like "http://host:8000/v1"."""

    urls: tuple[str, ...]
    model: str
    api_key: str | None = None
    concurrency: int = 32
    template_options: dict[str, Any] = field(default_factory=dict)
    """For the endpoint's chat template; sent as chat_template_kwargs, as vLLM and SGLang read them."""
    timeout: float = 600.0
    retries: int = 4
    backoff: float = 1.0
    """Seconds before the first retry; doubles each time."""
    requests_per_minute: float | None = None
    """To each endpoint at most, evenly; None for no limit."""
    num_refused: int = 0
    refusal: str = ""
    """What the endpoint said to the last request that it refused."""

    _paces: dict[str, Pace] = field(init=False)

    def __post_init__(self) -> None:
        rate = self.requests_per_minute
        if rate is not None and not rate > 0:
            raise DataError(f"requests_per_minute={rate}: it must be positive, or left out")
        self._paces = {url: Pace(rate) for url in self.urls}
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise DataError(f"endpoint {url!r}: must start with http:// or https://")

    def open(self, dialog: Dialog) -> int:
        """Nothing to prepare; the prompt's length in tokens is not known here."""
        del dialog
        return 0

    def answer(
        self, dialogs: list[Dialog], params: list[SamplingParams]
    ) -> Iterator[tuple[int, str, str, int]]:
        """Yield answers as they arrive; a request that is refused has no text and the reason "error"."""
        pairs = zip(dialogs, params, strict=True)
        return self._each([partial(self._ask, dialog=dialog, params=param) for dialog, param in pairs])

    def continuing(self, tokenizer: Any, end_id: int) -> Generate:
        """Continues token ids through /completions. What comes back is text, so its ids are the tokenizer's.

        `end_id` is put behind a text that ended by itself, as the engine does.
        """

        def generate(
            prompts: list[list[int]], params: list[SamplingParams]
        ) -> Iterator[tuple[int, list[int], str]]:
            pairs = zip(prompts, params, strict=True)
            calls = [partial(self._complete, ids=ids, params=param) for ids, param in pairs]
            for index, text, reason, _ in self._each(calls):
                ids = tokenizer.encode(text, add_special_tokens=False) if text else []
                yield index, [*ids, end_id] if reason == "stop" else ids, reason

        return generate

    def _each(
        self, calls: Sequence[Callable[[int], tuple[str, str, int]]]
    ) -> Iterator[tuple[int, str, str, int]]:
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            jobs = {pool.submit(call, i): i for i, call in enumerate(calls)}
            for job in as_completed(jobs):
                try:
                    text, reason, count = job.result()
                except _RefusedError as error:
                    self.num_refused, self.refusal = self.num_refused + 1, str(error)
                    text, reason, count = "", "error", 0
                yield jobs[job], text, reason, count
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, first: int, *, dialog: Dialog, params: SamplingParams) -> tuple[str, str, int]:
        body: dict[str, Any] = {"messages": dialog.messages}
        if self.template_options:
            body["chat_template_kwargs"] = self.template_options
        return self._choice(
            first, "/chat/completions", body, params, lambda choice: choice["message"]["content"]
        )

    def _complete(self, first: int, *, ids: list[int], params: SamplingParams) -> tuple[str, str, int]:
        # The stop ids are vLLM's and SGLang's extension; a model stops at its own end of text without it.
        body = {"prompt": ids, "stop_token_ids": list(params.stop_token_ids)}
        return self._choice(first, "/completions", body, params, lambda choice: choice["text"])

    def _choice(
        self,
        first: int,
        path: str,
        body: dict[str, Any],
        params: SamplingParams,
        text_of: Callable[[Any], Any],
    ) -> tuple[str, str, int]:
        """Text, finish reason and tokens of the first choice that the endpoint gives."""
        url, reply = self._post(
            first,
            path,
            body
            | {
                "model": self.model,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "max_tokens": params.max_tokens,
                "seed": params.seed,
            },
        )
        try:
            choice = reply["choices"][0]
            text = text_of(choice) or ""
            count = int((reply.get("usage") or {}).get("completion_tokens", 0))
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(f"{url}: not a completion: {json.dumps(reply)[:300]}") from error
        if not isinstance(text, str):
            raise DataError(f"{url}: the answer is no text: {json.dumps(reply)[:300]}")
        return text, choice.get("finish_reason") or "stop", count or len(text.split())

    def _post(self, first: int, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The URL that answered, and its reply; the tries go round the endpoints from number `first` on."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode()
        problem = url = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            base = self.urls[(first + attempt) % len(self.urls)]
            url = base.rstrip("/") + path
            self._paces[base].wait()
            request = urllib.request.Request(url, data=data, headers=headers, method="POST")  # noqa: S310 - checked above
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:  # noqa: S310
                    value: dict[str, Any] = json.loads(response.read())
                    return url, value
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
                if error.code in REFUSED:
                    raise _RefusedError(f"{url}: {problem}") from None
                if error.code != 429 and error.code < 500:
                    break
                wanted = error.headers.get("Retry-After", "")
                if wanted.isdigit():  # seconds; a date is not honoured
                    self._paces[base].hold(min(float(wanted), self.timeout))
            except (OSError, ValueError) as error:
                problem = str(error)
        raise DataError(f"{url}: {problem} (gave up after {attempt + 1} tries; finished shards are kept)")
