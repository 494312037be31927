"""What every test may use: the helpers beside this file, and real models where they can be had.

Under pytest-xdist (`-n auto`) each worker computes with one thread, as there is a worker a core. That is set
here, before anything imports torch, and in the environment, for processes that tests start.
"""

import contextlib
import os
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# pytest-xdist sets it: tables would be as wide as the terminal that the tests were started from.
os.environ.pop("COLUMNS", None)

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # How long an example takes says what else the machine does.
    settings.register_profile("eyas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("eyas")

GIB_PER_WORKER = 3
"""Memory that a worker takes at worst: the tests with a real model in float32 and a server beside it."""


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a worker a core, as many as the memory is for, at most eight."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_WORKER), 8))


def pytest_configure(config: pytest.Config) -> None:
    # Workers report to the process that started them, which tells.
    if config.getoption("--say") and not hasattr(config, "workerinput"):
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
