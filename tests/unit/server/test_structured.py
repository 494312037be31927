"""`response_format` and `structured_outputs` over HTTP."""

import json
import re
import threading
import time

import pytest

pytest.importorskip("xgrammar")

from eyas import LLM
from eyas.server import prepare
from fakes import make_drafter
from json_tokenizer import VOCAB_SIZE, json_tokenizer
from served import CHAT, TEXT, Served, wait_for
from tiny import tiny_target

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["abc", "ab"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def served():
    target = tiny_target(vocab_size=VOCAB_SIZE)
    target.tokenizer = json_tokenizer()
    llm = LLM(target, make_drafter("self", target, 4, []), max_num_seqs=4, page_size=8, num_pages=200)
    with Served(llm) as running:
        yield running
        wait_for(running.idle)


def content(response):
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_schema_is_kept_to(served, path, temperature):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    body |= {"temperature": temperature, "seed": 3, "max_tokens": 100}
    value = json.loads(content(served.post(path, **body, response_format=FORMAT)))
    assert 0 <= value["a"] <= 99
    assert value["b"] in ("abc", "ab")
    same = served.post(path, **body, structured_outputs={"json": SCHEMA})
    assert json.loads(content(same)) == value


def test_a_stream_is_the_same(served):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 100, "response_format": FORMAT}
    parts = [event["choices"][0]["delta"].get("content", "") for event in served.events(CHAT, **body)]
    assert "".join(parts) == content(served.post(CHAT, **body))
    assert len(parts) > 3


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "(ab|12){2,4}"}, "(ab|12){2,4}"),
        ({"choice": ["true", "false"]}, "true|false"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ],
)
def test_other_shapes(served, asked, pattern):
    text = content(served.post(TEXT, prompt="a", temperature=0, max_tokens=50, structured_outputs=asked))
    assert re.fullmatch(pattern, text)


def test_any_object(served):
    body = {"messages": HELLO, "temperature": 1, "seed": 1, "max_tokens": 200}
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        choice = served.post(CHAT, **body, **asked).json()["choices"][0]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_text_asks_for_nothing(served):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 5}
    plain = served.post(CHAT, **body).json()["choices"]
    assert served.post(CHAT, **body, response_format={"type": "text"}).json()["choices"] == plain


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_by_name(served, body, param):
    response = served.post(CHAT, messages=HELLO, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_what_a_grammar_would_leave_out_of_a_schema_is_named(served):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = served.post(CHAT, messages=HELLO, response_format=form).json()["error"]
    assert error["param"] == "response_format"
    assert "$.properties.a.uniqueItems is not served" in error["message"]


def test_a_grammar_that_takes_too_long_holds_up_nobody(served, monkeypatch):
    monkeypatch.setattr(prepare, "COMPILE_SECONDS", 0.3)
    grammars = next(iter(served.service.preparer._intakes.values())).grammars
    compile_one, slow = grammars.compile, threading.Event()

    def compiling(grammar):
        if grammar.text == "slow":
            slow.wait(20)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "compile", compiling)
    answers = []

    def ask():
        answers.append(served.post(TEXT, prompt="a", structured_outputs={"regex": "slow"}))

    thread = threading.Thread(target=ask)
    thread.start()
    begin = time.monotonic()
    assert served.post(TEXT, prompt="hello", max_tokens=3, temperature=0).status_code == 200
    thread.join()
    assert time.monotonic() - begin < 10
    slow.set()
    assert answers[0].status_code == 400
    assert "too complex" in answers[0].json()["error"]["message"]


def test_without_xgrammar_it_says_what_to_install(served, monkeypatch):
    import sys

    grammars = next(iter(served.service.preparer._intakes.values())).grammars
    monkeypatch.setattr(grammars, "_compiler", None)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    error = served.post(TEXT, prompt="a", structured_outputs={"regex": "a"}).json()["error"]
    assert "eyas[serve]" in error["message"]
    assert error["param"] == "structured_outputs"


def test_a_grammar_without_any_answer_is_the_requests_fault(served):
    answer = served.post(TEXT, prompt="hello", structured_outputs={"grammar": "root ::= root"})
    assert answer.status_code == 400
    assert "no answer can match it" in answer.json()["error"]["message"]
