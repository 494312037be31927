"""`eyas compare` and `eyas generate` from the command line to the output, on a tiny target."""

import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.cli.main import main
from eyas.engine import progress
from eyas.engine.llm import LLM
from tiny import tiny_target

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from fake_tokenizer import FakeTokenizer


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    target = replace(tiny_target(eos_token_ids=()), tokenizer=FakeTokenizer())
    monkeypatch.setattr("eyas.targets.load.load_target", lambda *_, **__: target)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "turns": ["so so so so"]}\n{"id": "b", "turns": ["one two one two"]}\n')
    return str(path)


COMMON = ["--also", "prompt_lookup", "-k", "2,3", "--max-tokens", "8", "--rounds", "1", "--device", "cpu"]


def test_compare_prints_texts_table_and_verdict(capsys, prompts):
    main_ok("compare", "--target", "tiny", "--prompts", prompts, *COMMON)
    out = capsys.readouterr().out
    assert "so so so so" in out
    assert "prompt_lookup K=2" in out
    assert "prompt_lookup K=3" in out
    assert "the same tokens as plain decoding" in out
    assert "accepted at depth" in out


def test_compare_json_is_all_of_stdout_and_is_recorded(capsys, prompts, tmp_path):
    record = tmp_path / "records.jsonl"
    for _ in range(2):
        main_ok(
            "compare", "--target", "tiny", "--prompts", prompts, *COMMON, "--json", "--record", str(record)
        )
        out = capsys.readouterr().out
        document = json.loads(out)
    assert document["setup"]["target"] == "tiny-llama"
    assert [m["name"] for m in document["methods"]] == ["plain", "prompt_lookup K=2", "prompt_lookup K=3"]
    lines = record.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1]) == document


def test_every_field_of_the_json_is_documented(capsys, prompts):
    main_ok("compare", "--target", "tiny", "--prompts", prompts, *COMMON, "--json")
    document = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[3] / "docs/benchmarks/compare-json.md").read_text(encoding="utf-8")
    example, facts = document["example"], document["provenance"]
    objects = [document, document["setup"], example, example["answers"]["plain"], facts, facts["machine"]]
    objects += [document[name][-1] for name in ("methods", "best", "samples")]
    fields = {name for one in objects for name in one}
    assert len(fields) > 40
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
    assert f'"{document["schema"]}"' in page


def test_several_words_after_an_option(capsys, prompts):
    status = main_status(
        "compare", "--target", "t", "--heads", "x/one", "y/two", "--prompts", prompts, "-k", "2"
    )
    assert status == 2
    assert "x/one" in capsys.readouterr().err  # the first of both is the one that isn't there


def test_generate_streams_what_json_holds(capsys, monkeypatch):
    arguments = ["generate", "--target", "t", "--drafter", "prompt_lookup", "-k", "3", "--max-tokens", "12"]
    main_ok(*arguments, "so so so")
    streamed = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("so so so"))
    main_ok(*arguments, "-", "--json")
    document = json.loads(capsys.readouterr().out)
    assert streamed.out == document["text"] + "\n"
    assert "per target forward" in streamed.err
    assert len(document["token_ids"]) == len(document["origins"]) == 12
    assert document["finish_reason"] == "length"
    assert document["stats"]["committed"] == 12


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_generate_says_what_slow_captures_took(extra, capsys, monkeypatch):
    stream = LLM.stream

    def late(self, *args):
        with progress.capturing():
            time.sleep(0.1)
        yield from stream(self, *args)

    monkeypatch.setattr(LLM, "stream", late)
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.02)
    main_ok("generate", "--target", "t", "--max-tokens", "2", "so", *extra)
    said = capsys.readouterr().err
    assert ("0.1 s of it capturing CUDA graphs" in " ".join(said.split())) == (not extra)
    assert said == "" if extra else "tok/s" in said


def main_status(*args):
    with pytest.raises(SystemExit) as leave:
        main(list(args))
    return leave.value.code or 0


def main_ok(*args):
    assert main_status(*args) == 0


def test_a_target_of_nan_ends_with_an_error(capsys, monkeypatch):
    target = replace(tiny_target(eos_token_ids=()), tokenizer=FakeTokenizer())
    with torch.no_grad():
        target.decoder.norm.weight.fill_(float("nan"))
    monkeypatch.setattr("eyas.targets.load.load_target", lambda *_, **__: target)
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as leave:
            main(["generate", "so so", "--target", "tiny", "--device", "cpu", *extra])
        assert leave.value.code == 2
        assert "error: the request ended early: the target gave no usable logits" in capsys.readouterr().err


def test_a_prompt_of_raw_bytes_is_refused(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["generate", "\udcff\udcfe", "--target", "tiny", "--device", "cpu"])
    assert leave.value.code == 2
    assert "error: the prompt is no text in UTF-8" in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_named_before_measuring(capsys, prompts, tmp_path):
    with pytest.raises(SystemExit):
        main(["compare", "--target", "tiny", "--prompts", prompts, *COMMON, "--record", str(tmp_path)])
    captured = capsys.readouterr()
    assert "the record cannot be written there" in captured.err
    assert captured.out == ""
