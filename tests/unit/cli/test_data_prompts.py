"""`eyas data prompts`, then `regenerate --follow-ups`: by the engine, and by a server over HTTP."""

import json

import pytest

from eyas.cli.main import main
from eyas.engine.llm import LLM
from eyas.targets.load import load_target
from served import Served
from tiny_files import write_target

# A random target rarely ends a text of letters: texts are short, and there are many.
SHORT = ["--max-tokens", 4, "--min-tokens", 1, "--max-draws", 1500, "--max-num-seqs", 64, "--alike", 1]
SHORT += ["--temperatures", "1.5:1", "--json"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("prompts") / "target")


def run(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["data", *map(str, args)])
    return int(end.value.code or 0), *capsys.readouterr()


def prompts(out):
    return [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]


def write(capsys, target, out, *args):
    status, text, err = run(
        capsys, "prompts", "--target", target, "--out", out, "--device", "cpu", *SHORT, *args
    )
    assert status == 0, err
    return json.loads(text), err


def test_the_target_writes_prompts_and_answers_them(target, tmp_path, capsys):
    manifest, err = write(capsys, target, tmp_path / "p", "--count", 2)
    assert manifest["num_prompts"] == len(prompts(tmp_path / "p")) == 2
    assert "2/2" in err
    options = ["--out", tmp_path / "a", "--target", target, "--device", "cpu", "--max-new-tokens", 6]
    options += ["--samples", 2, "--temperatures", "0:1,1:1", "--follow-ups", 1, "--json"]
    status, text, err = run(capsys, "regenerate", tmp_path / "p" / "prompts.jsonl", *options)
    assert status == 0, err
    result = json.loads(text)
    assert result["answers"]["num_conversations"] + result["answers"]["num_skipped"] == 4
    assert result["store"]["num_documents"] == result["answers"]["num_conversations"] > 0


def test_a_server_writes_what_the_engine_writes(target, tmp_path, capsys):
    write(capsys, target, tmp_path / "here", "--count", 2)
    llm = LLM(load_target(target), max_model_len=512, device="cpu")
    with Served(llm) as server:
        where = ["--endpoint", f"{server.url}/v1", "--model", llm.target.identity.name]
        write(capsys, target, tmp_path / "http", "--count", 2, "--shard-size", 999, *where)
    assert prompts(tmp_path / "http") == prompts(tmp_path / "here")


def test_a_server_writes_follow_ups(target, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    llm = LLM(load_target(target), max_model_len=512, device="cpu")
    options = ["--max-new-tokens", 200, "--temperatures", "2:1", "--follow-ups", 3, "--json"]
    options += ["--follow-up-temperature", 2, "--max-follow-up-tokens", 100]
    with Served(llm) as server:
        where = ["--endpoint", f"{server.url}/v1", "--model", llm.target.identity.name, "--target", target]
        status, _, err = run(
            capsys, "regenerate", tmp_path / "p.jsonl", "--out", tmp_path / "a", *options, *where
        )
        assert status == 0, err
        without = [*where[:4], "--out", tmp_path / "b"]
        status, _, err = run(capsys, "regenerate", tmp_path / "p.jsonl", *options, *without)
    assert status == 2
    assert "--follow-ups needs --target" in err


def test_topics_and_exclusions(target, tmp_path, capsys):
    (tmp_path / "topics.txt").write_text("birds\n\n the sea \n")
    options = ["--topics", tmp_path / "topics.txt", "--keep-system"]
    write(capsys, target, tmp_path / "p", "--count", 2, *options)
    systems = {record["messages"][0]["content"] for record in prompts(tmp_path / "p")}
    assert systems <= {
        f"You are a helpful assistant. The user's message is about {topic}." for topic in ("birds", "the sea")
    }
    first = prompts(tmp_path / "p")[0]
    (tmp_path / "bench.jsonl").write_text(json.dumps(first) + "\n")
    exclude = ["--exclude", tmp_path / "bench.jsonl"]
    manifest, _ = write(capsys, target, tmp_path / "q", "--count", 1, *options, *exclude)
    assert first["id"] not in [record["id"] for record in prompts(tmp_path / "q")]
    assert manifest["faults"]["excluded"] == 1


def test_what_is_wrong_is_said(target, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "topics.txt").write_text("birds\n")
    for options, said in (
        (["--topics", tmp_path / "none.txt"], "cannot be read"),
        (["--topics", tmp_path / "empty.txt"], "has no topic"),
        (["--topics", tmp_path / "topics.txt", "--system", "Hi"], "write {topic} where"),
        (["--alike", 0], "alike 0.0: must be more than 0"),
        (["--exclude", tmp_path / "none.jsonl"], "there is no such file"),
    ):
        status, _, err = run(capsys, "prompts", "--target", target, "--out", tmp_path / "p", *options)
        assert status == 2
        assert said in " ".join(err.split())
    few = ["--target", target, "--count", 50, "--max-tokens", 2, "--min-tokens", 1, "--device", "cpu"]
    status, _, err = run(capsys, "prompts", "--out", tmp_path / "p", *few, "--max-draws", 20)
    assert status == 2
    assert "none of 20 texts was kept (20 cut_off)" in " ".join(err.split())
    more = ["--temperatures", "1.5:1", "--max-draws", 1500, "--max-num-seqs", 64]
    status, out, err = run(capsys, "prompts", "--out", tmp_path / "q", *few, *more)
    assert status == 0
    assert " prompts from 1,500 texts" in out
    assert " fewer than asked for: --max-draws 1500 was reached" in err
