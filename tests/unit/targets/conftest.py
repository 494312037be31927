"""Tiny models on disk."""

import pytest

from model_files import random_state, write_folder
from tiny import tiny_config


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """Converted copies of test models go nowhere else."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_folder(tmp_path):
    config = tiny_config("llama")
    return write_folder(tmp_path / "model", config, random_state(config))
