"""Bodies of requests: OpenAI's fields, and vLLM's for what OpenAI lacks.

Types are strict ("5" is no number). A field that nobody knows is refused, with the nearest known name, for a
misspelt one would silently change the answer. Fields that cannot change the answer (`user`, `metadata`, ...)
are taken and ignored; fields that would, and that are not served, are refused unless they ask for nothing.
"""

import difflib
import json
import re
from abc import abstractmethod
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eyas.core.errors import RequestError
from eyas.core.grammar import Grammar
from eyas.core.sampling import SamplingParams
from eyas.server.errors import ApiError

MAX_INT = 2**31 - 1
MAX_SEED = 2**62
MAX_STOPS = 16
MAX_LOGPROBS = 20

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
)
"""Taken and ignored: they cannot change the answer."""

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "best_of": (1,),
    "echo": (False,),
}
"""Not served: values that ask for nothing; null always does. Anything else is refused."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken and ignored: it pads chunks against onlookers of an encrypted line."""


class JsonSchema(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = ""
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Taken and ignored: the schema is always kept to."""


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """What the answer must match."""
        source = "response_format"
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError("response_format: json_schema goes with type json_schema", param=source)
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema.content), source)
        return Grammar("json_object", source=source) if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """`structured_outputs`, as vLLM has it: exactly one of these."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar_: str | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None

    def grammar(self) -> Grammar:
        """What the answer must match."""
        source = "structured_outputs"
        given: list[Grammar] = []
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            given.append(Grammar("json_schema", text, source))
        if self.regex is not None:
            given.append(Grammar("regex", self.regex, source))
        if self.choice is not None:
            given.append(Grammar.choice(self.choice, source))
        if self.grammar_ is not None:
            given.append(Grammar("ebnf", self.grammar_, source))
        if self.json_object:
            given.append(Grammar("json_object", source=source))
        if len(given) != 1:
            raise ApiError(
                "structured_outputs: give exactly one of json, regex, choice, grammar and json_object",
                param=source,
            )
        return given[0]


class EyasOptions(BaseModel):
    """`eyas`: what no other API has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_draft_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    """At most so many drafts a step (nodes of a tree); the server's own number is the most."""
    provenance: bool = False
    """Add `eyas` to chunks: the text token by token, with the depth of the draft that each was."""


class Sampling(BaseModel):
    """What both completion endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, le=MAX_INT)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Add `token_ids` and `origins` (draft depth, or 0 for the target's own) to choices."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    eyas: EyasOptions = Field(default_factory=EyasOptions)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in NOT_SERVED:
                if value is not None and value not in NOT_SERVED[name]:
                    raise _Refused(name, f"{name} is not served: leave it out")
            elif name not in IGNORED and (value is not None or name not in cls.model_fields):
                kept[name] = value  # null means the default
        return kept

    def limit(self) -> int | None:
        """Output tokens asked for."""
        return self.max_tokens

    def grammar(self) -> Grammar | None:
        """What the answer must match, by either name."""
        formatted = None if self.response_format is None else self.response_format.grammar()
        structured = None if self.structured_outputs is None else self.structured_outputs.grammar()
        if formatted is not None and structured is not None:
            raise ApiError("give either response_format or structured_outputs", param="structured_outputs")
        return formatted or structured

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Top tokens to report for each token; None for none at all."""

    def to_params(self, *, default_max_tokens: int) -> SamplingParams:
        """The engine's parameters; RequestError or ApiError if one is out of range."""
        given = {
            name: value
            for name in (
                "temperature", "top_p", "top_k", "min_p",
                "presence_penalty", "frequency_penalty", "repetition_penalty",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        max_tokens = self.limit()
        return SamplingParams(
            **given,
            n=self.n,
            logit_bias=_logit_bias(self.logit_bias or {}),
            seed=self.seed,
            stop=_stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            max_tokens=default_max_tokens if max_tokens is None else max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs(),
            grammar=self.grammar(),
            num_draft_tokens=self.eyas.num_draft_tokens,
        )


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> int | None:
        """max_completion_tokens is the newer name and wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """top_logprobs, where logprobs are on."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def num_logprobs(self) -> int | None:
        """As given."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each text or token ids."""
        value = self.prompt
        if isinstance(value, str) or _is_ids(value):
            return [value]
        if isinstance(value, list) and value and all(isinstance(one, str) or _is_ids(one) for one in value):
            return value
        raise ApiError("prompt must be text, token ids, or a list of either, and not empty", param="prompt")


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    """Of a prompt; a conversation's template writes its own."""
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Body = TypeVar("Body", bound=BaseModel)


class _Refused(ValueError):  # noqa: N818 - pydantic wraps it; nobody else sees it
    """A field that is not served; pydantic carries it to `parse`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def parse(kind: type[Body], body: Any) -> Body:
    """The body as `kind`; ApiError naming the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, _Refused):
            raise ApiError(str(cause), param=cause.param) from error
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(param, kind.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ApiError(f"unknown field {param!r}{hint}", param=param, code="unknown_parameter") from error
        if not param:
            raise ApiError("the body must be a JSON object") from error
        raise ApiError(f"{param}: {first['msg']}", param=param) from error


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOPS:
        raise ApiError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are served", param="stop")
    return tuple(stops)


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    for name, bias in value.items():
        if not re.fullmatch(r"\d{1,9}", name):
            raise RequestError(f"logit_bias: {name!r} is no token id")
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: {bias} for token {name} is not from -100 to 100")
    return {int(name): bias for name, bias in value.items()}


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Roles and texts of a conversation; ApiError naming what a text model cannot take."""
    if not messages:
        raise ApiError("messages is empty: at least one message is needed", param="messages")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ApiError(f"{where}.role must be a string", param=f"{where}.role")
        for name, value in message.items():
            if name not in {"role", "content", "name"} and value not in (None, [], {}):
                raise ApiError(f"{where}.{name} is not served: leave it out", param=f"{where}.{name}")
        plain.append({"role": role, "content": _text(message.get("content"), f"{where}.content")})
    return plain


def _text(content: Any, where: str) -> str:
    """A message's text, given whole or in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text is not None)
    raise ApiError(f"{where} must be text, or a list of parts of type 'text'", param=where)
