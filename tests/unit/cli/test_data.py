"""`eyas data` from prompts to a store that is shown: answered by the engine, and by a server over HTTP."""

import json

import pytest

from eyas.cli.data import coloured
from eyas.cli.main import main
from eyas.data.store import TokenStore
from eyas.engine.llm import LLM
from eyas.targets.load import load_target
from fakes import full_forward
from served import Served
from tiny_files import write_target

PROMPTS = [{"id": f"p{i}", "turns": [f"say {i}", "and again"][: 1 + i % 2]} for i in range(4)]
END = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("data") / "target")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def run(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["data", *map(str, args)])
    return int(end.value.code or 0), *capsys.readouterr()


def regenerate(capsys, prompts, out, *args):
    common = ["--out", out, "--max-new-tokens", 6, "--temperatures", "0:1", "--device", "cpu", "--json"]
    status, text, err = run(capsys, "regenerate", prompts, *common, *args)
    assert status == 0, err
    return json.loads(text)


def records(out):
    lines = [line for shard in sorted(out.glob("shard-*.jsonl")) for line in shard.read_text().splitlines()]
    return {record["id"]: record for record in map(json.loads, lines)}


def greedy(target, prompt):
    """At most six tokens, by whole forwards."""
    ids = list(prompt)
    while len(ids) < len(prompt) + 6 and (len(ids) == len(prompt) or ids[-1] != END):
        ids.append(int(full_forward(target, ids)[0][-1].argmax()))
    return ids[len(prompt) :]


def test_the_engine_answers_every_turn_and_a_second_run_asks_nothing(target, prompts, tmp_path, capsys):
    result = regenerate(capsys, prompts, tmp_path / "out", "--target", target)
    loaded, got = load_target(target, pack=False), records(tmp_path / "out")
    assert set(got) == {prompt["id"] for prompt in PROMPTS}
    for prompt in PROMPTS:
        record = got[prompt["id"]]
        assert [m["content"] for m in record["messages"] if m["role"] == "user"] == prompt["turns"]
        assert len(record["spans"]) == len(prompt["turns"])
        for begin, end in record["spans"]:
            assert record["token_ids"][begin:end] == greedy(loaded, record["token_ids"][:begin])
    assert result["store"]["meta"]["conversations"]["num_exact"] == len(PROMPTS)
    again = regenerate(capsys, prompts, tmp_path / "out", "--target", target)
    assert again["answers"]["num_generated"] == result["answers"]["num_generated"] > 0
    assert records(tmp_path / "out") == got


def test_a_server_answers_as_the_engine_does(target, prompts, tmp_path, capsys):
    llm = LLM(load_target(target), max_model_len=512, device="cpu")
    with Served(llm) as server:
        where = ["--endpoint", f"{server.url}/v1", "--model", llm.target.identity.name]
        result = regenerate(capsys, prompts, tmp_path / "http", "--target", target, *where)
    regenerate(capsys, prompts, tmp_path / "here", "--target", target)
    here, there = records(tmp_path / "here"), records(tmp_path / "http")
    for prompt in PROMPTS:
        ours, theirs = here[prompt["id"]]["messages"], there[prompt["id"]]["messages"]
        assert len(ours) == len(theirs) == 2 * len(prompt["turns"])
        # Later turns follow text over HTTP and exact ids here, which need not tokenise alike.
        assert ours[:2] == theirs[:2]
    assert result["store"]["meta"]["conversations"]["num_templated"] == len(PROMPTS)


def test_what_an_endpoint_refuses_is_said(target, prompts, tmp_path, capsys):
    with Served(LLM(load_target(target), max_model_len=512, device="cpu")) as server:
        prompts.write_text(json.dumps({"id": "long", "prompt": "x" * 600}) + "\n")
        options = ["--out", tmp_path / "out", "--endpoint", f"{server.url}/v1", "--model", "target"]
        status, out, err = run(capsys, "regenerate", prompts, *options)
    assert (status, out) == (2, "")
    said = " ".join(err.split())
    assert "none of 1 prompts was answered" in said
    assert "the endpoint refused 1 requests, the last with: " in said
    assert "HTTP 400" in said


def test_show_marks_what_is_supervised(target, prompts, tmp_path, capsys):
    regenerate(capsys, prompts, tmp_path / "out", "--target", target)
    store = tmp_path / "out" / "store"
    number = max(range(4), key=lambda i: len(TokenStore.load(store).document(i)[1]))
    status, out, err = run(capsys, "show", store, "--target", target, "--index", number)
    assert status == 0
    assert out.count("⟨") == out.count("⟩") == 2
    assert "say" in out.partition("⟨")[0]
    assert f"document {number}: " in err
    assert run(capsys, "show", store, "--target", target, "--index", 4)[0] == 2


def test_supervised_text_is_green_where_there_are_colours():
    parts = [{"text": "a[b]", "supervised": False}, {"text": "c", "supervised": True}]
    text = coloured(parts, marks=False)
    assert text.plain == "a[b]c"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [
        (0, 4, "dim"),
        (4, 5, "bold green"),
    ]
    assert coloured(parts, marks=True).plain == "a[b]⟨c⟩"
