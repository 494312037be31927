"""Ctrl-C or SIGTERM while training: the first pauses with a checkpoint, the second stops at once."""

import signal

import pytest

from eyas.cli import train
from eyas.cli.main import main
from eyas.training.trainer import Paused


class Fake:
    deadline = None

    def __init__(self, presses, number=signal.SIGINT):
        self.presses, self.number = presses, number

    def train(self):
        for _ in range(self.presses):
            signal.raise_signal(self.number)
        assert self.deadline is not None
        raise Paused("out: paused at step 7")


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, before_term)


@pytest.mark.parametrize(
    ("presses", "number", "said"),
    [
        (1, signal.SIGINT, "paused at step 7"),
        (2, signal.SIGINT, "Ctrl-C again stops at once"),
        (1, signal.SIGTERM, "paused at step 7"),
    ],
)
def test_one_signal_pauses_and_two_stop(monkeypatch, tmp_path, capsys, presses, number, said):
    (tmp_path / "r.yaml").write_text(
        "target: {path: x}\ndata: {store: y}\nobjective: {kind: eagle3}\n"
        f"run: {{out: {tmp_path / 'out'}, max_steps: 9, checkpoint_every: 3}}\n"
    )
    monkeypatch.setattr(train, "open_trainer", lambda *_, **__: Fake(presses, number))
    with pytest.raises(SystemExit) as left:
        main(["train", str(tmp_path / "r.yaml"), "--quiet"])
    assert left.value.code == 130
    shown = capsys.readouterr().err
    assert said in shown
    assert ("paused at step 7" in shown) == (presses == 1)


def test_a_handler_that_is_not_pythons_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train.pause_when_interrupted(Fake(0))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_sigterm_ends_the_process():
    train.pause_when_interrupted(Fake(0))
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
