"""How a verb plugs in: a module with `command` or with `app`."""

import sys
import types
import warnings
from typing import Annotated

import pytest
import typer

from eyas.cli import main as cli


def plug(monkeypatch, **names):
    module = types.ModuleType("eyas_test_verb")
    for name, value in names.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "eyas_test_verb", module)
    monkeypatch.setitem(cli.VERBS, "probe", cli.Verb("eyas_test_verb", "A probe."))


def call(*args):
    with pytest.raises(SystemExit) as leave:
        cli.main(["probe", *args])
    return leave.value.code or 0


def test_a_function(monkeypatch, capsys):
    def command(word: str, *, k: Annotated[int, typer.Option("--k", "-k")] = 7) -> None:
        """Say it."""
        print(word, k)

    plug(monkeypatch, command=command)
    assert call("hi", "-k", "3") == 0
    assert capsys.readouterr().out == "hi 3\n"
    assert call("--help") == 0
    assert "Say it." in capsys.readouterr().out


def test_an_app_with_two_commands(monkeypatch, capsys):
    app = typer.Typer()
    app.command("one")(lambda: print("1"))
    app.command("two")(lambda: print("2"))
    plug(monkeypatch, app=app)
    assert call("two") == 0
    assert capsys.readouterr().out == "2\n"


def test_an_error_of_the_program_is_not_hidden(monkeypatch):
    def command() -> None:
        raise ZeroDivisionError

    plug(monkeypatch, command=command)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_warnings_are_one_line_without_source(monkeypatch, capsys):
    before = warnings.formatwarning

    def command() -> None:
        """Warn."""
        print(warnings.formatwarning(UserWarning("look out"), UserWarning, "file.py", 3), end="")

    plug(monkeypatch, command=command)
    assert call() == 0
    assert capsys.readouterr().out == "warning: look out\n"
    assert warnings.formatwarning is before


def test_ctrl_c_ends_without_a_traceback(monkeypatch, capsys):
    def command() -> None:
        """Be stopped."""
        raise KeyboardInterrupt

    plug(monkeypatch, command=command)
    assert call() == 130
    assert "Traceback" not in capsys.readouterr().err
