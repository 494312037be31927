"""What all kernel tests share."""

import os

import pytest


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """The interpreter's time goes with the number of tiles."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from eyas.kernels.triton import paged_attention_plan

        monkeypatch.setattr(paged_attention_plan, "MOST_FOLDED", 4)
        monkeypatch.setattr(paged_attention_plan, "CHUNK", 64)
        monkeypatch.setattr(paged_attention_plan, "unit", lambda _: 32)
