"""Turn plain YAML values into the types that a dataclass declares; say exactly what does not fit.

Handled: bool, int, float, str, Path, None, Literal, X | Y, list[X], tuple[X, ...], tuple[X, Y],
dict[str, X] and dataclasses, nested in any way. `int` takes 1e6 (a whole number), `float` takes 1.
`bool` is never a number and a number is never text. A union of dataclasses is decided
by their field `kind: Literal[...]`.
"""

import dataclasses
import types
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from eyas.config.yaml_text import parse_yaml
from eyas.core.errors import ConfigError, EyasError


class Text(str):
    """A value from the command line: text as it is for `str`, a YAML value for everything else."""

    __slots__ = ()


Source = Callable[[str], str]
"""From a dotted key to where its value came from: a file name or the command line."""


def coerce(kind: Any, value: Any, key: str, source: Source) -> Any:
    """Return `value` as a `kind`, or raise ConfigError "source: key: what is wrong"."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(args, value, key, source)
    if origin is Literal:
        return _literal(args, value, key, source)
    if kind is str and isinstance(value, Text):
        return str(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, Text):
        value = _read(value, key, source)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, key, source)
    if origin in (list, tuple):
        return _sequence(origin, args, value, key, source)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong("a mapping", value, key, source)
        return {
            coerce(args[0], k, _join(key, k), source): coerce(args[1], v, _join(key, k), source)
            for k, v in value.items()
        }
    if kind is Any:
        return value
    return _scalar(kind, value, key, source)


def _scalar(kind: Any, value: Any, key: str, source: Source) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is type(None):
        good = value is None
    elif kind is float:
        good, value = is_number, float(value) if is_number else value
    elif kind is int:
        good = is_number and value == value // 1
        value = int(value) if good else value
    else:
        good = type(value) is kind
    if not good:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text (in quotes)"}
        raise _wrong(names.get(kind, getattr(kind, "__name__", str(kind))), value, key, source)
    return value


def _dataclass(cls: Any, value: Any, key: str, source: Source) -> Any:
    if isinstance(value, cls):
        return value
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise _wrong(f"a mapping with the keys of {cls.__name__}", value, key, source)
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in value:
        if name not in fields:
            where = _join(key, name)
            near = get_close_matches(str(name), fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(fields)}"
            raise ConfigError(f"{source(where)}: {where}: unknown key; {hint}")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in value:
            raise ConfigError(f"{source(key)}: {_join(key, name)}: this key is required and missing")
    values = {name: coerce(hints[name], item, _join(key, name), source) for name, item in value.items()}
    try:
        return cls(**values)
    except EyasError as error:
        raise ConfigError(f"{source(key)}: {key}: {error}" if key else f"{source(key)}: {error}") from error


def _sequence(origin: Any, args: tuple[Any, ...], value: Any, key: str, source: Source) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong("a list, as in [1, 2]", value, key, source)
    if origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            raise _wrong(f"a list of {len(args)}", value, key, source)
        kinds = args
    else:
        kinds = (args[0],) * len(value)
    items = [coerce(k, v, f"{key}[{i}]", source) for i, (k, v) in enumerate(zip(kinds, value, strict=True))]
    return tuple(items) if origin is tuple else items


def _literal(args: tuple[Any, ...], value: Any, key: str, source: Source) -> Any:
    candidates = [value] if not isinstance(value, Text) else [str(value), _read(value, key, source)]
    for choice in args:
        if any(type(choice) is type(candidate) and choice == candidate for candidate in candidates):
            return choice
    near = get_close_matches(str(value), [str(choice) for choice in args], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise _wrong("one of " + ", ".join(map(repr, args)), value, key, source, hint)


def _union(arms: tuple[Any, ...], value: Any, key: str, source: Source) -> Any:
    if type(None) in arms and (
        value is None or (isinstance(value, Text) and value.lower() in ("null", "none"))
    ):
        return None
    arms = tuple(arm for arm in arms if arm is not type(None))
    if len(arms) == 1:
        return coerce(arms[0], value, key, source)
    if isinstance(value, Text) and str not in arms:
        value = _read(value, key, source)
    if isinstance(value, dict) and "kind" in value:
        for arm in arms:
            if dataclasses.is_dataclass(arm) and value["kind"] in get_args(get_type_hints(arm).get("kind")):
                return coerce(arm, value, key, source)
    problems = []
    # Exact types first, so that `int | float` keeps 1 an int and 1.5 a float.
    for arm in sorted(arms, key=lambda arm: (arm is not type(value), arm is str)):
        try:
            return coerce(arm, value, key, source)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; or: ".join(problems))


def _read(text: Text, key: str, source: Source) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{source(key)}: {key}: {str(text)!r} is not a YAML value: {' '.join(str(error).split())}"
        ) from error


def _wrong(expected: str, value: Any, key: str, source: Source, hint: str = "") -> ConfigError:
    got = str(value) if isinstance(value, Text) else value
    return ConfigError(f"{source(key)}: {key or 'top level'}: expected {expected}, got {got!r}{hint}")


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)
