"""What xgrammar leaves out of a JSON schema without a word: such schemas are refused, by the keyword's path.

What it narrows is fine, for the answer still matches: objects without `additionalProperties` get no others,
and properties come in the schema's order. Unknown keywords say nothing, as the standard has it.

Example: {"type": "array", "items": {"type": "integer"}, "uniqueItems": true} would give [1, 1]; it is refused
with "$.uniqueItems is not served".
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from eyas.core.errors import RequestError
from eyas.engine import regex

MAX_DEPTH = 64
"""Schemas within schemas; compiling deeper ones takes minutes."""
MAX_COUNTED = 64
"""Properties of an object whose number is limited; compiling takes their square."""

CHOOSERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Each says what the value is; keywords beside them would be dropped."""
NEVER = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "additionalItems",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
WORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": NUMERIC,
    "number": NUMERIC,
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    ),
    "boolean": (),
    "null": (),
}  # fmt: skip
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
FORMATS = (
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
NAME_WORDS = ("type", "minLength", "maxLength", "pattern", "format", "const", "enum")


def check(text: str, source: str) -> None:
    """RequestError, beginning with `source`, if an answer might not match the schema; or if it is no JSON."""
    try:
        root = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{source}: the schema is not JSON: {error}") from error
    _Checker(root, source).schema(root, "$", 0)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


class _Checker:
    def __init__(self, root: Any, source: str) -> None:
        self._root, self._source = root, source
        self._seen: set[int] = set()
        self._disjoint: dict[tuple[int, int], bool] = {}

    def refuse(self, path: str, why: str) -> NoReturn:
        raise RequestError(f"{self._source}: {path} {why}")

    def schema(self, node: Any, path: str, depth: int) -> None:
        """Check one schema and those within it."""
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            self.refuse(path, "must be a schema: an object, true or false")
        if depth > MAX_DEPTH:
            self.refuse(path, f"is {depth} schemas deep; at most {MAX_DEPTH} are served")
        self._seen.add(id(node))
        for word in NEVER:
            if word in node and (word, node[word]) != ("uniqueItems", False):
                self.refuse(f"{path}.{word}", "is not served: leave it out")
        if "$id" in node and node is not self._root:
            self.refuse(f"{path}.$id", "is served at the root only")
        self._values(node, path)
        choosers = [word for word in CHOOSERS if word in node]
        if choosers:
            self._chooser(choosers[0], node, path, depth + 1)
            return
        for kind in self._kinds(node, path):
            if kind in _BY_KIND:
                _BY_KIND[kind](self, node, path, depth + 1)

    def _values(self, node: dict[str, Any], path: str) -> None:
        """Keywords that must hold numbers."""
        for word in NUMERIC:
            if word in node and (isinstance(node[word], bool) or not isinstance(node[word], int | float)):
                self.refuse(f"{path}.{word}", "must be a number")
        for word in COUNTS:
            if word in node and not (type(node[word]) is int and node[word] >= 0):
                self.refuse(f"{path}.{word}", "must be a whole number from 0")

    def _kinds(self, node: dict[str, Any], path: str) -> list[str]:
        """The types that a schema names, or that are meant without a name."""
        if "type" in node:
            given = node["type"]
            kinds = [given] if isinstance(given, str) else given
            if not isinstance(kinds, list) or not kinds or not all(kind in WORDS for kind in kinds):
                self.refuse(f"{path}.type", f"must be of {', '.join(WORDS)}, or a list of them")
            return kinds
        if "properties" in node:
            return ["object"]
        if "items" in node:
            return ["array"]
        for word in (word for words in WORDS.values() for word in words if word in node):
            self.refuse(f"{path}.{word}", "needs a type beside it")
        return []

    def _chooser(self, word: str, node: dict[str, Any], path: str, depth: int) -> None:
        beside = {other for words in (*WORDS.values(), CHOOSERS, ("type",)) for other in words}
        for other in node:
            typed = other == "type" and word in ("const", "enum")
            if other in beside and other != word and not typed:
                self.refuse(f"{path}.{other}", f"is not served beside {word}")
        if word == "$ref":
            self.schema(self.resolve(node, path), path, depth)
        elif word in ("const", "enum"):
            self._literals(node, path)
        else:
            branches = node[word]
            if not isinstance(branches, list) or not branches:
                self.refuse(f"{path}.{word}", "must be a list of schemas")
            if word == "allOf" and len(branches) > 1:
                self.refuse(f"{path}.allOf", "is served with one schema only: write them as one")
            for index, branch in enumerate(branches):
                self.schema(branch, f"{path}.{word}[{index}]", depth)
            if word == "oneOf":
                for index, branch in enumerate(branches):
                    if not all(self.disjoint(branch, other, depth) for other in branches[:index]):
                        why = "a value may match it and another branch: tell them apart, or write anyOf"
                        self.refuse(f"{path}.oneOf[{index}]", f"is not served: {why}")

    def _literals(self, node: dict[str, Any], path: str) -> None:
        values = _literal_values(node)
        if not isinstance(values, list) or not values:
            self.refuse(f"{path}.enum", "must be a list of values")
        if "type" not in node:
            return
        kinds = self._kinds(node, path)
        for value in values:
            own = _kinds_of(value)
            if not any(kind in own for kind in kinds):
                self.refuse(f"{path}.type", f"does not fit {json.dumps(value)[:50]}")

    def resolve(self, node: dict[str, Any], path: str) -> Any:
        """The schema that `$ref` names."""
        name = node["$ref"]
        if not isinstance(name, str) or not re.match(r"#(/|$)", name):
            self.refuse(f"{path}.$ref", "must be '#' or begin with '#/': nothing is read from elsewhere")
        found = self._root
        for part in unquote(name).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                self.refuse(f"{path}.$ref", f"{name!r} names nothing in the schema")
        return found

    # By type.

    def string(self, node: dict[str, Any], path: str, _depth: int) -> None:
        """At most one of pattern, format and a limited length."""
        given = [word for word in ("pattern", "format", "minLength", "maxLength") if word in node]
        if len(given) > 1 and given != ["minLength", "maxLength"]:
            self.refuse(f"{path}.{given[1]}", f"is not served beside {given[0]}")
        if "pattern" in node:
            self.pattern(node["pattern"], f"{path}.pattern")
        if "format" in node and node["format"] not in FORMATS:
            self.refuse(f"{path}.format", f"must be one of {', '.join(FORMATS)}; leave others out")

    def pattern(self, pattern: Any, path: str) -> None:
        """A regular expression."""
        if not isinstance(pattern, str):
            self.refuse(path, "must be a regular expression")
        if reason := regex.fault(pattern):
            self.refuse(path, f"{pattern!r}: {reason}")

    def integer(self, node: dict[str, Any], path: str, _depth: int) -> None:
        """Whole multiples only."""
        multiple = node.get("multipleOf", 1)
        if multiple != int(multiple) or multiple <= 0:
            self.refuse(f"{path}.multipleOf", "must be a whole number above 0")

    def number(self, node: dict[str, Any], path: str, _depth: int) -> None:
        """No multiples."""
        if "multipleOf" in node:
            self.refuse(f"{path}.multipleOf", "is not served for numbers, only for integers")

    def array(self, node: dict[str, Any], path: str, depth: int) -> None:
        """Items by position come from prefixItems."""
        if isinstance(node.get("items"), list):
            self.refuse(f"{path}.items", "must be a schema; prefixItems takes a list")
        prefix = node.get("prefixItems", [])
        if not isinstance(prefix, list):
            self.refuse(f"{path}.prefixItems", "must be a list of schemas")
        for index, item in enumerate(prefix):
            self.schema(item, f"{path}.prefixItems[{index}]", depth)
        for word in ("items", "unevaluatedItems"):
            if word in node:
                self.schema(node[word], f"{path}.{word}", depth)

    def object(self, node: dict[str, Any], path: str, depth: int) -> None:
        """Every name has one schema."""
        for word in ("properties", "patternProperties", "propertyNames"):
            if not isinstance(node.get(word, {}), dict):
                self.refuse(f"{path}.{word}", "must be an object")
        properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self.refuse(f"{path}.required", "must be a list of names")
        for name in required:
            if name not in properties:
                self.refuse(f"{path}.required", f"has {name!r}, which properties lacks: add it there")
        for name, value in properties.items():
            self.schema(value, f"{path}.properties.{name}", depth)
        if len(patterns) > 1:
            self.refuse(f"{path}.patternProperties", "is served with one pattern only")
        for pattern, value in patterns.items():
            where = f"{path}.patternProperties.{pattern}"
            self.pattern(pattern, where)
            self._apart(pattern, properties, where)
            self.schema(value, where, depth)
        for word in ("additionalProperties", "unevaluatedProperties"):
            if word in node:
                self.schema(node[word], f"{path}.{word}", depth)
        self._names(node, path)
        self._number(node, path)

    def _apart(self, pattern: str, properties: dict[str, Any], path: str) -> None:
        """No declared property matches the pattern."""
        try:
            both = next((name for name in properties if re.search(pattern, name)), None)
        except re.error as error:
            self.refuse(path, f"is no regular expression: {error}")
        if both is not None:
            self.refuse(path, f"also matches the property {both!r}")

    def _names(self, node: dict[str, Any], path: str) -> None:
        """propertyNames, which counts only where names are free."""
        if "propertyNames" not in node:
            return
        where = f"{path}.propertyNames"
        for word in ("properties", "patternProperties"):
            if node.get(word):
                self.refuse(where, f"is not served beside {word}")
        for word in ("additionalProperties", "unevaluatedProperties"):
            if node.get(word) is False:
                self.refuse(where, f"is not served beside {word}: false")
        names = node["propertyNames"]
        for word in names:
            if word not in NAME_WORDS and word in (*CHOOSERS, *WORDS["object"], *WORDS["array"], *NUMERIC):
                self.refuse(f"{where}.{word}", "is not served")
        if not {"const", "enum"} & set(names):
            names = {"type": "string"} | names
        self._values(names, where)
        if "type" in names and names["type"] != "string":
            self.refuse(f"{where}.type", "must be string")
        self.string(names, where, 0)

    def _number(self, node: dict[str, Any], path: str) -> None:
        """How many properties there may be."""
        limits = [word for word in ("minProperties", "maxProperties") if word in node]
        if not limits:
            return
        if len(node.get("properties", {})) > MAX_COUNTED:
            self.refuse(f"{path}.{limits[0]}", f"is served with at most {MAX_COUNTED} properties")
        # A free name may come twice, and is then one property.
        free: list[str] = [word for word in ("patternProperties", "propertyNames") if word in node]
        free += [word for word in WORDS["object"] if word.endswith("edProperties") and node.get(word)]
        free += ["additionalProperties"] if node.get("additionalProperties") else []
        if node.get("minProperties") and free:
            self.refuse(f"{path}.minProperties", f"is not served beside {free[0]}")

    # Whether two branches of oneOf share no value.

    def disjoint(self, one: Any, other: Any, depth: int) -> bool:
        """True if it is certain that no value matches both."""
        pair = (id(one), id(other))
        if pair not in self._disjoint:
            self._disjoint[pair] = False  # a pair that comes again within itself
            self._disjoint[pair] = depth <= MAX_DEPTH and self._apart_from(one, other, depth)
        return self._disjoint[pair]

    def _apart_from(self, one: Any, other: Any, depth: int) -> bool:
        for first, second in ((one, other), (other, one)):
            if first is False:
                return True
            branches = self._branches(first)
            if branches is not None:
                return all(self.disjoint(branch, second, depth + 1) for branch in branches)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        values, others = _literal_values(one), _literal_values(other)
        if values is not None and others is not None:
            return not {_key(value) for value in values} & {_key(value) for value in others}
        kinds = self._possible(one) & self._possible(other)
        if kinds != {"object"} or values is not None or others is not None:
            return not kinds
        shared = set(_names_of(one)) & set(_names_of(other))
        return any(
            self.disjoint(one["properties"][name], other["properties"][name], depth + 1) for name in shared
        )

    def _branches(self, node: Any) -> list[Any] | None:
        """Schemas of which a value matches one, where a schema says no more than that."""
        if not isinstance(node, dict):
            return None
        if "$ref" in node:
            return [self.resolve(node, "$")]
        return next((node[word] for word in ("anyOf", "oneOf", "allOf") if word in node), None)

    def _possible(self, node: dict[str, Any]) -> set[str]:
        """Types that values may have; a number that is no integer is a fraction."""
        values = _literal_values(node)
        if values is not None:
            kinds = {kind for value in values for kind in _kinds_of(value)}
            return kinds - {"number"} | ({"fraction"} if any(type(v) is float for v in values) else set())
        kinds = set(self._kinds(node, "$")) or set(WORDS)
        if "number" in kinds:
            kinds = kinds - {"number"} | {"integer", "fraction"}
        return kinds


_BY_KIND = {
    "string": _Checker.string,
    "integer": _Checker.integer,
    "number": _Checker.number,
    "array": _Checker.array,
    "object": _Checker.object,
}


def _literal_values(node: dict[str, Any]) -> Any:
    """Values that const or enum names; None without either."""
    return [node["const"]] if "const" in node else node.get("enum")


def _names_of(node: dict[str, Any]) -> Iterator[str]:
    """Properties that every value has."""
    return (name for name in node.get("required", []) if name in node.get("properties", {}))


def _kinds_of(value: Any) -> tuple[str, ...]:
    """Types of JSON that a value has.

    >>> _kinds_of(1), _kinds_of(True), _kinds_of(1.5)
    (('integer', 'number'), ('boolean',), ('number',))
    """
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number") if value == int(value) else ("number",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)


def _key(value: Any) -> str:
    """Equal for values that JSON takes as equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)
