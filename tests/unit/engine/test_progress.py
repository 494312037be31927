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


def slow_llm(monkeypatch, *, slow=("step", "prefill"), fail=False):
    """Graphs that are slow to make: 0.2 s each, where 0.05 s are slow."""
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.05)
    llm = LLM(tiny_target(), max_model_len=64, page_size=4)
    with_graphs(llm)
    with_prefill_graphs(llm, rows=8)
    for name, graphs in (("step", llm._runner._graphs), ("prefill", llm._runner._prefills)):
        rehearse = graphs._recorder.rehearse

        def late(function, rehearse=rehearse, name=name):
            if name in slow:
                time.sleep(0.2)
            if fail:
                raise RuntimeError("no memory")
            rehearse(function)

        graphs._recorder.rehearse = late
    return llm


@pytest.mark.parametrize("slow", [(), ("step",), ("step", "prefill")])
def test_slow_captures_are_told_of_once_and_quick_ones_never(slow, monkeypatch, capsys):
    told = []
    llm = slow_llm(monkeypatch, slow=slow)
    with watching_captures(lambda: told.append("began") or told.append):
        first = llm.generate([[3, 4]], PARAMS)
        again = llm.generate([[3, 4]], PARAMS)
        assert told[::2] == ["began"] * len(slow)
        assert all(0.2 <= seconds < 5 for seconds in told[1::2])
        assert len(told) == 2 * len(slow)
    llm.generate([[3, 4], [5]], PARAMS)  # another bucket, and nobody asks
    assert len(told) == 2 * len(slow)
    assert first[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    assert capsys.readouterr() == ("", "")


def test_a_capture_that_fails_ends_too(monkeypatch):
    told = []
    with watching_captures(lambda: told.append), pytest.raises(RuntimeError, match="no memory"):
        slow_llm(monkeypatch, fail=True).generate([[3, 4]], PARAMS)
    assert len(told) == 1
    assert not progress._watchers


@pytest.mark.parametrize("disable", [False, True])
def test_a_verbs_bar_has_a_line_meanwhile(disable, monkeypatch, capsys):
    seen = []
    with console.progress(disable=disable) as bar:
        bar.add_task("verifying", total=2)
        add = bar.add_task
        monkeypatch.setattr(bar, "add_task", lambda what, **rest: seen.append(what) or add(what, **rest))
        slow_llm(monkeypatch).generate([[3, 4]], PARAMS)
        assert [task.description for task in bar.tasks] == ["verifying"]
    assert seen == ["capturing CUDA graphs"] * 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("verifying" in shown.err) != disable
    assert "capturing" not in shown.err


@pytest.mark.parametrize("show", [True, False])
def test_a_line_of_its_own_on_a_terminal(show, monkeypatch):
    from rich.console import Console

    screen = io.StringIO()
    monkeypatch.setattr(console, "notes", lambda: Console(file=screen, force_terminal=True, width=80))
    with console.capture_status(lambda: show) as seconds:
        slow_llm(monkeypatch, slow=("step",)).generate([[3, 4]], PARAMS)
    assert len(seconds) == 1
    assert ("capturing CUDA graphs" in screen.getvalue()) == show
    if show:
        assert screen.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))
