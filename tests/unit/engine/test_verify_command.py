"""`eyas verify` on a tiny target: verdict, JSON, exit status."""

import json

import pytest
from typer.testing import CliRunner

from eyas.cli.main import load_verb
from eyas.kernels.reference import step_settle
from tiny import tiny_target


class Letters:
    """Tokenizer enough for the verb: one token a character."""

    chat_template = None
    eos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(letter) % 32 for letter in text][:12]}


@pytest.fixture
def verify(monkeypatch):
    target = tiny_target(vocab_size=32, num_layers=2)
    target.tokenizer = Letters()
    monkeypatch.setattr("eyas.targets.load.load_target", lambda *_, **__: target)

    def call(*words):
        arguments = ["--target", "tiny", "--drafter", "prompt_lookup", "-k", "2", "--samples", "100"]
        return CliRunner().invoke(_app(), [*arguments, "--max-tokens", "12", *words])

    return call


def _app():
    import typer

    from eyas.cli.verify import command

    app = typer.Typer()
    app.command()(command)
    return app


def test_verdict(verify):
    result = verify()

    assert result.exit_code == 0, result.output
    assert "Lossless: all 3 checks passed." in result.stdout


def test_json(verify):
    document = json.loads(verify("--json").stdout)

    assert document["passed"] is True
    assert [check["kind"] for check in document["checks"]] == ["greedy", "seeded", "distribution"]
    assert document["checks"][2]["p_value"] >= document["alpha"]


def test_a_broken_engine_ends_with_status_1(verify, monkeypatch):
    def accept_all(choices, drafts):
        return 1 + (drafts >= 0).long().cumprod(1).sum(1)

    monkeypatch.setattr(step_settle, "count_matches", accept_all)
    result = verify()

    assert result.exit_code == 1
    assert "Not lossless" in result.stdout


def test_bad_numbers_name_the_flag(verify):
    result = verify("--temperatures", "warm")

    assert "--temperatures" in str(result.exception)


def test_is_a_verb():
    assert load_verb("verify").name is not None
