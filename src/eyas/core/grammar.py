"""What an answer must look like: a JSON schema, any JSON object, a regular expression, or a grammar."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyas.core.errors import RequestError

MAX_CHARS = 1 << 18
"""Longer definitions are refused."""

Kind = Literal["json_schema", "json_object", "regex", "ebnf"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The whole answer must match; it ends where nothing can follow.

    RequestError, beginning with `source`, if the text is too long.
    """

    kind: Kind
    text: str = ""
    """A JSON schema, a regular expression, or a grammar in EBNF that starts at `root`; "" for json_object."""
    source: str = field(default="grammar", compare=False)
    """The field that it came from, for errors."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise RequestError(f"{self.source}: it has more than {MAX_CHARS} characters")

    @classmethod
    def choice(cls, answers: Sequence[str], source: str = "grammar") -> "Grammar":
        """One of these answers, to the letter.

        >>> Grammar.choice(["yes", "no"]).text
        'root ::= "yes" | "no"'
        """
        # A string of JSON in ASCII is one of EBNF.
        return cls("ebnf", "root ::= " + " | ".join(json.dumps(answer) for answer in answers), source)
