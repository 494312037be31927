"""Read a recipe: YAML file, then dotted overrides, into a strict typed dataclass.

    config = load_config(TrainConfig, Path("recipes/train/eagle3.yaml"), ["optim.lr=1e-3", "aux=[2, 15]"])

Field types are the schema (see config.coerce). An unknown key, a missing one, or a value that does not
fit is a ConfigError that names the file (or the command line), the dotted key, and the nearest known name.
A value on the command line is YAML, except for fields of type `str`, which take the text as it is.

A class with PRESETS (name -> nested values) may be told `preset: name`: those values lie beneath the
recipe's.
"""

from pathlib import Path
from typing import Any, TypeVar

import yaml

from eyas.config.coerce import Text, coerce
from eyas.config.yaml_text import parse_yaml
from eyas.core.errors import ConfigError

T = TypeVar("T")


def load_config(
    cls: type[T], path: Path | str | None = None, overrides: list[str] | tuple[str, ...] = ()
) -> T:
    """Return a `cls` from the YAML file at `path` (None for defaults only) and overrides "a.b=c"."""
    values = _read_file(Path(path)) if path is not None else {}
    keys = [_apply(values, override) for override in overrides]
    presets: dict[str, Any] = getattr(cls, "PRESETS", {})
    if presets and values.get("preset") is not None:
        name = str(values["preset"])
        if name not in presets:
            raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(presets)}")
        values = _beneath(presets[name], values, f"preset {name}")

    def source(key: str) -> str:
        from_line = any(key == name or key.startswith((name + ".", name + "[")) for name in keys)
        return "command line" if from_line or path is None else str(path)

    result: T = coerce(cls, values, "", source)
    return result


def _beneath(below: dict[str, Any], above: dict[str, Any], where: str) -> dict[str, Any]:
    """What `above` says, and `below` where it says nothing.

    {a: {x: 1, y: 2}} beneath {a: {y: 3}, b: 4} -> {a: {x: 1, y: 3}, b: 4}.
    Sections of two kinds don't mix: their keys mean different things.
    """
    kinds = [str(values["kind"]) for values in (below, above) if values.get("kind") is not None]
    if len(set(kinds)) > 1:
        raise ConfigError(f"{where} is for kind {kinds[0]}, the recipe says kind {kinds[1]}")
    merged = dict(above)
    for key, value in below.items():
        there = merged.get(key)
        if isinstance(value, dict) and (there is None or isinstance(there, dict)):
            merged[key] = _beneath(value, there or {}, where)
        elif key not in merged:
            merged[key] = value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], override: str) -> str:
    """Put "a.b=c" into `values` in place; return the first key that it made ("a" where there was no a)."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"command line: {override!r} is not an override; write key=value, as in optim.lr=1e-3"
        )
    node, origin = values, ".".join(parts)
    for depth, part in enumerate(parts[:-1], start=1):
        if node.get(part) is None:
            node[part] = {}
            origin = min(origin, ".".join(parts[:depth]), key=len)
        if not isinstance(node[part], dict):
            raise ConfigError(
                f"command line: {'.'.join(parts[:depth])} is a single value, it has no key below it"
            )
        node = node[part]
    node[parts[-1]] = Text(text.strip())
    return origin
