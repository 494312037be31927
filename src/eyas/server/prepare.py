"""From a parsed body to groups that the engine can run, on a thread of its own.

Tokenizing a long prompt takes a while, and a tokenizer must not be used by two threads at once. So there is
one such thread, with its own copy of the tokenizer; the engine's thread keeps the original for decoding.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, TypeVar

from eyas.core.errors import RequestError
from eyas.core.grammar import Grammar
from eyas.core.sampling import SamplingParams
from eyas.engine.grammar import Grammars
from eyas.engine.intake import Group, Prompt
from eyas.engine.results import Decode
from eyas.server.errors import ApiError, of_request_error
from eyas.server.methods import Methods
from eyas.server.schema import ChatRequest, CompletionRequest, plain_messages

T = TypeVar("T")

COMPILE_SECONDS = 10.0
"""Longer a request does not wait for its grammar to be compiled."""

OURS = frozenset(
    {"tokenize", "add_generation_prompt", "chat_template", "conversation", "return_dict", "return_tensors"}
)
"""Arguments of a chat template's rendering that a request may not set."""

FIELDS = frozenset(ChatRequest.model_fields) | frozenset(CompletionRequest.model_fields)


class Preparer:
    """Tokenizes and checks."""

    def __init__(self, methods: Methods) -> None:
        self._intakes = {name: llm.new_intake() for name, llm in methods.llms.items()}
        self._reader = methods.llm.new_intake()
        self._reader.tokenizer = deepcopy(methods.llm.tokenizer)
        if self._reader.tokenizer is not None:
            # Too long a prompt is refused here, with the limit; the tokenizer need not warn of it.
            self._reader.tokenizer.model_max_length = sys.maxsize
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eyas-intake")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="eyas-grammar")

    def stop(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    async def groups(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        method: str,
        request_id: str,
        stream: bool,
        field: str,
    ) -> list[Group]:
        """A group for each prompt, for the engine of a method; ApiError naming the field that is wrong."""
        if params.grammar is not None:
            await self._compile(self._intakes[method].grammars, params.grammar)

        def make() -> list[Group]:
            ids = [self._reader.encode(prompt) for prompt in prompts]
            groups = self._intakes[method].groups(ids, params, text=stream)
            for index, group in enumerate(groups):
                group.request_id = f"{request_id}-{index}"
            return groups

        return await self._on_thread(make, field)

    def decoder(self, params: SamplingParams) -> Decode:
        """How the engine's thread turns tokens into text."""
        return next(iter(self._intakes.values())).decoder(params)

    async def encode(self, prompt: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with or without the special tokens that the tokenizer adds."""

        def encode() -> list[int]:
            if special or self._reader.tokenizer is None:
                return self._reader.encode(prompt)
            ids: list[int] = self._reader.tokenizer.encode(prompt, add_special_tokens=False)
            return ids

        return await self._on_thread(encode, "prompt")

    async def chat_ids(self, messages: list[dict[str, Any]], options: dict[str, Any] | None) -> list[int]:
        """Token ids of a conversation; ApiError if the template does not like it."""
        plain = plain_messages(messages)
        for name in options or {}:
            if name in OURS:
                raise ApiError(f"chat_template_kwargs: {name} may not be set", param="chat_template_kwargs")

        def render() -> list[int]:
            try:
                return self._reader.chat_ids(plain, template_options=options)
            except RequestError:
                raise
            except Exception as error:
                # Templates raise what they like; it is their way to refuse a conversation.
                raise ApiError(f"the chat template refused: {error}", param="messages") from error

        return await self._on_thread(render, "messages")

    async def _compile(self, grammars: Grammars, grammar: Grammar) -> None:
        """Compile into the engine's cache; ApiError if it is wrong or takes too long.

        On threads of its own: the worst grammars take minutes, and others must be served meanwhile.
        """
        work = self._on_thread(lambda: grammars.compile(grammar), grammar.source, self._compilers)
        try:
            await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            message = f"{grammar.source}: too complex: compiling takes more than {COMPILE_SECONDS} seconds"
            raise ApiError(message, param=grammar.source) from None

    async def _on_thread(
        self, work: Callable[[], T], field: str, threads: ThreadPoolExecutor | None = None
    ) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self._thread, work)
        except RequestError as error:
            raise of_request_error(error, FIELDS, field) from error
