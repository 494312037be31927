"""`eyas verify` on a tiny target: verdict, JSON, exit status."""

import json

import pytest
import torch
from typer.testing import CliRunner

from eyas.cli.main import load_verb
from eyas.engine.exact import next_logits
from eyas.engine.llm import LLM
from eyas.kernels.reference import step_settle
from tiny import tiny_target


class Letters:
    """Tokenizer enough for the verb: one token a character."""

    chat_template = None
    eos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(letter) % 32 for letter in text][:12]}


@pytest.fixture
def target():
    target = tiny_target(vocab_size=32, num_layers=2)
    target.tokenizer = Letters()
    return target


@pytest.fixture
def verify(monkeypatch, target):
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


def test_several_engines_and_plain_decoding(verify):
    result = verify("--engines", "2", "--plain", "--batches", "1,2,16", "--json")

    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    plain, *others = document["checks"]
    assert (plain["kind"], plain["num_draft_tokens"], plain["outputs"], plain["passed"]) == (
        "greedy",
        0,
        9,
        True,
    )
    assert [check["kind"] for check in others] == ["greedy", "seeded", "distribution"]


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


def part(monkeypatch, target, place_of_logit):
    """Answers of engines with a drafter end in the token whose logit has this place, best first."""
    target.decoder.to(torch.bfloat16)
    with torch.no_grad():  # the best token has a twin
        target.decoder.lm_head_weight[1::2] = target.decoder.lm_head_weight[::2]
    whole = LLM.generate_ids

    def parted(self, prompts, params, progress=None):
        outputs = whole(self, prompts, params, progress)
        for prompt, output in zip(prompts, outputs, strict=True):
            if self.drafter is not None and params[0].temperature == 0:
                logits = next_logits(target, [[*prompt, *output[:-1]]])[0]
                logits[output[-1]] = logits.max() + 1
                output[-1] = int(logits.argsort(descending=True)[place_of_logit])
        return outputs

    monkeypatch.setattr(LLM, "generate_ids", parted)


def test_ties_of_bfloat16_are_shown_and_pass(verify, monkeypatch, target):
    part(monkeypatch, target, 1)
    result = verify("--samples", "0", "--temperatures", "", "--batches", "1,64", "--num-prompts", "4")

    words = " ".join(result.stdout.replace("│", " ").split())
    assert result.exit_code == 0, result.output
    assert "differs in 8 of 8" in words
    assert "spacing" in words
    assert "8 answers part at ties within rounding." in words


def test_large_gaps_of_bfloat16_fail_and_are_in_the_json(verify, monkeypatch, target):
    part(monkeypatch, target, -1)
    result = verify("--json", "--samples", "0", "--temperatures", "", "--num-prompts", "2", "--batches", "2")

    assert result.exit_code == 1
    document = json.loads(result.stdout)
    (check,) = document["checks"]
    assert document["passed"] is False
    assert (check["outputs"], check["near_ties"], check["different"]) == (2, 0, 2)
    for index, one in enumerate(check["differences"]):
        assert (one["prompt"], one["batch_size"], one["place"]) == (index, 2, 11)
        assert one["gap"] > 4 * one["spacing"] > 0
        assert one["within_rounding"] is False
        assert one["plain_token"] != one["token"]


def test_bad_numbers_name_the_flag(verify):
    result = verify("--temperatures", "warm")

    assert "--temperatures" in str(result.exception)


def test_is_a_verb():
    assert load_verb("verify").name is not None
