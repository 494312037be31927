"""Recipes as strict typed dataclasses: `load_config(cls, path, overrides)` and `dump_config(obj)`."""

from eyas.config.dump import dump_config
from eyas.config.load import load_config

__all__ = ["dump_config", "load_config"]
