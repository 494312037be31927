"""From prompts and parameters to requests; everything wrong with them is found here, before anything runs."""

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.core.errors import ConfigError, RequestError
from eyas.core.sampling import SamplingParams
from eyas.core.text import is_unicode
from eyas.engine.grammar import Grammars
from eyas.engine.request import Request
from eyas.engine.sampler import check_params, needs_of, stop_ids_of
from eyas.engine.stops import TextTracker

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Group:
    """One prompt and its n completions."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    requests: list[Request] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(request.finish_reason is not None for request in self.requests)


class Intake:
    """Checks prompts and parameters against one target and makes requests of them."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        vocab_size: int,
        max_len: int,
        num_draft_tokens: int,
        eos_token_ids: Sequence[int],
        seed: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars = grammars or Grammars(tokenizer, vocab_size, eos_token_ids)
        self.tokenizer, self.vocab_size, self.max_len = tokenizer, vocab_size, max_len
        self.num_draft_tokens, self.eos_token_ids = num_draft_tokens, tuple(eos_token_ids)
        self._random = random.Random(seed)  # noqa: S311 - seeds of requests that have none, not secrets
        self._count = 0

    def group(self, prompt: Prompt, params: SamplingParams, *, text: bool = False) -> Group:
        """One prompt's requests; RequestError if they cannot be served.

        `text` asks for text while the request runs (streaming); stop strings ask for it themselves.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        ids = self.encode(prompt)
        self._check(ids, params)
        request_id = str(self._count)
        self._count += 1
        group = Group(request_id, prompt if isinstance(prompt, str) else None, ids, params)
        stop_ids = frozenset(stop_ids_of(params, self.eos_token_ids))
        needs = int(needs_of(params))
        for index in range(params.n):
            seed = self._random.getrandbits(62) if params.seed is None else params.seed + index
            request = Request(
                request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_ids=ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                max_total=min(len(ids) + params.max_tokens, self.max_len),
                needs=needs,
                logprobs=None if params.logprobs is None else [],
                runs=[0] * (self.num_draft_tokens + 2),
            )
            request.stats.prompt_tokens = len(ids)
            if params.grammar is not None:
                request.grammar = self.grammars.start(params.grammar)
            if (text and self.tokenizer is not None) or params.stop:
                request.text = TextTracker(
                    self.decoder(params),
                    params.stop,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            group.requests.append(request)
        return group

    def groups(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        text: bool = False,
    ) -> list[Group]:
        """All of them, or an error that says which prompt is wrong and why."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(params)} SamplingParams: give one, or one a prompt"
            )
        made = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                made.append(self.group(prompt, own, text=text))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {index}: {error}") from error
        return made

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes):
                raise RequestError(f"a prompt is a text, not bytes: {prompt!r}"[:200])
            try:
                # Integers of any kind (numpy's too), but neither numbers with a point nor text.
                return [operator.index(token) for token in prompt]
            except TypeError:
                raise RequestError(
                    f"a prompt is a text or a list of token ids (integers), got {prompt!r}"[:200]
                ) from None
        if self.tokenizer is None:
            raise RequestError("this target has no tokenizer: give token ids instead of text")
        _check_text(prompt)
        ids: list[int] = self.tokenizer.encode(prompt)
        return ids

    def decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        """How the request's tokens become text."""
        tokenizer, skip = self.tokenizer, params.skip_special_tokens

        def decode(token_ids: list[int]) -> str:
            text: str = tokenizer.decode(
                token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            return text

        return decode

    def chat_ids(
        self, messages: Sequence[dict[str, Any]], *, template_options: dict[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, rendered by the target's own chat template, ready for an answer."""
        if self.tokenizer is None:
            raise RequestError("this target has no tokenizer, and so no chat template")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestError("this target's tokenizer has no chat template: render the prompt yourself")
        good = isinstance(messages, Sequence) and all(
            isinstance(message, Mapping) and "role" in message for message in messages
        )
        if not messages or not good:
            raise RequestError('messages must be a list of {"role": ..., "content": ...} objects')
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **(template_options or {})
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of the model's makers
            raise RequestError(f"the chat template does not take these messages: {error}") from None
        _check_text(text)
        # The template has written the special tokens already.
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(ids) >= self.max_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; with max_model_len={self.max_len} "
                f"at most {self.max_len - 1} leave room for an answer"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"token ids must be integers from 0 to {self.vocab_size - 1}; this prompt has {low} to {high}"
            )
        check_params(params, self.vocab_size, self.eos_token_ids)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this target has not: use stop_token_ids")


def _check_text(text: str) -> None:
    if not is_unicode(text):
        raise RequestError("the prompt holds half of a surrogate pair, so it is no text in UTF-8")


def context_limit(asked: int | None, trained: int, *, default_cap: int = 8192) -> int:
    """max_model_len: what was asked for, at most what the target was trained for; else capped."""
    if asked is None:
        return min(trained, default_cap)
    if not 2 <= asked <= trained:
        raise ConfigError(
            f"max_model_len={asked} must be from 2 to {trained}, the positions that the target knows"
        )
    return asked
