"""Write a config back as YAML: every field, defaults included, so that a run folder says what was run."""

import dataclasses
from pathlib import Path
from typing import Any

from eyas.config.yaml_text import write_yaml


def dump_config(config: Any) -> str:
    """Return YAML text; `load_config` of its file gives an equal config."""
    return write_yaml(to_plain(config))


def to_plain(value: Any) -> Any:
    """Return dataclasses as dicts, tuples as lists, paths as text; other values as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
