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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--say`: one line a test on stderr as it ends, for runs that a time limit may cut short."""
    parser.addoption("--say", action="store_true", help="tell of each test as it ends, with its seconds")


class Teller:
    """Says what each test came to at once, and where and why it failed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = "" if crash is None else f"\n    {crash.path}:{crash.lineno}: {crash.message}"
        print(f"{report.outcome} {report.duration:.1f} s {report.nodeid}{why}", file=sys.stderr, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--say"):
        config.pluginmanager.register(Teller())


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
