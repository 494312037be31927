"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Iterable
from typing import Any

from eyas.core.errors import RequestError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that ends with a status and an error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def of_request_error(error: RequestError, fields: Iterable[str], default: str) -> ApiError:
    """The engine's refusal, with the field that its message begins with, else `default`.

    Messages read "top_p=3 is out of range: ..." or "prompt 2: logit_bias: token id ...".
    """
    text = str(error)
    words = re.match(r"(?:prompt \d+: )?(\w+)", text)
    known = set(fields)
    param = words.group(1) if words and words.group(1) in known else default
    code = "context_length_exceeded" if "max_model_len=" in text else None
    return ApiError(text, param=param, code=code)
