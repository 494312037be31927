"""What every test may use: the helpers beside this file, and real models where they can be had."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@cache
def _model(name: str) -> Path | str:
    """Path of a real model, fetched once, or why it cannot be had."""
    from eyas.core.errors import EyasError
    from eyas.targets.fetch import get_model

    try:
        return get_model(name)
    except EyasError as error:
        return str(error)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fetch what a test marked `model` (or `model("name", ...)`) needs, or skip it with the reason."""
    marker = item.get_closest_marker("model")
    if marker is None:
        return
    for name in marker.args or ("smollm2-135m",):
        found = _model(name)
        if isinstance(found, str):
            pytest.skip(found)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    found = _model("smollm2-135m")
    if isinstance(found, str):
        pytest.skip(found)
    return found
