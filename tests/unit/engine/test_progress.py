"""Progress goes to stderr: stdout belongs to results."""

import io
import time

import pytest

from eyas.cli import console
from eyas.core.sampling import SamplingParams
from eyas.engine import progress
from eyas.engine.llm import LLM
from eyas.engine.progress import capture_bar, watching_captures
from replayed import with_graphs, with_prefill_graphs
from tiny import tiny_target

PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


def test_bars_leave_stdout_alone(capsys):
    llm = LLM(tiny_target(), max_model_len=64, page_size=4)
    llm.generate([[3, 4], [5]], PARAMS, progress=True)
    with capture_bar() as report:
        report(2, 7)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "generating" in shown.err
    assert "2/2" in shown.err
    assert "capturing graphs" in shown.err
    assert "2/7" in shown.err


def slow_llm(monkeypatch, *, slow=("graphs", "prefills"), fail=False):
    """Each graph of those takes 0.2 s to make, where 0.05 s are slow."""
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.05)
    llm = LLM(tiny_target(), max_model_len=64, page_size=4)
    with_graphs(llm)
    with_prefill_graphs(llm, rows=8)

    def late(_):
        time.sleep(0.2)
        if fail:
            raise RuntimeError("no memory")

    for name in slow:
        getattr(llm._runner, f"_{name}")._recorder.rehearse = late
    return llm


@pytest.mark.parametrize("slow", [(), ("graphs",), ("graphs", "prefills")])
def test_slow_captures_are_told_of_once_and_quick_ones_never(slow, monkeypatch, capsys):
    told = []
    llm = slow_llm(monkeypatch, slow=slow)
    with watching_captures(lambda: told.append("began") or told.append):
        for _ in range(2):
            llm.generate([[3, 4]], PARAMS)
        assert told[::2] == ["began"] * len(slow)
        assert all(0.2 <= seconds < 5 for seconds in told[1::2])
    llm.generate([[3, 4], [5]], PARAMS)  # another bucket, and nobody asks
    assert len(told) == 2 * len(slow)
    assert capsys.readouterr() == ("", "")


def test_a_capture_that_fails_ends_too(monkeypatch):
    told = []
    with watching_captures(lambda: told.append), pytest.raises(RuntimeError, match="no memory"):
        slow_llm(monkeypatch, fail=True).generate([[3, 4]], PARAMS)
    assert len(told) == 1


@pytest.mark.parametrize("disable", [False, True])
def test_a_verbs_bar_has_a_line_meanwhile(disable, monkeypatch, capsys):
    seen = []
    with console.progress(disable=disable, rate=True) as bar:
        bar.add_task("verifying", total=2, rate=0.0)
        add = bar.add_task
        monkeypatch.setattr(bar, "add_task", lambda what, **rest: seen.append(what) or add(what, **rest))
        slow_llm(monkeypatch).generate([[3, 4]], PARAMS)
        assert [task.description for task in bar.tasks] == ["verifying"]
    assert seen == ["capturing CUDA graphs"] * 2
    out, err = capsys.readouterr()
    assert (out, "verifying" in err, "capturing" in err) == ("", not disable, False)


@pytest.mark.parametrize("show", [True, False])
def test_a_line_of_its_own_on_a_terminal(show, monkeypatch):
    from rich.console import Console

    screen = io.StringIO()
    monkeypatch.setattr(console, "notes", lambda: Console(file=screen, force_terminal=True, width=80))
    with console.capture_status(lambda: show) as seconds:
        slow_llm(monkeypatch, slow=("graphs",)).generate([[3, 4]], PARAMS)
    assert len(seconds) == 1
    assert ("capturing CUDA graphs" in screen.getvalue()) == show
    if show:
        assert screen.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))
