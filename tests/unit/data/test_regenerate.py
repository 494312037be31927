import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from toy_tokenizer import END, toy_tokenizer

from eyas.core.errors import DataError
from eyas.data.build import build_store
from eyas.data.endpoint import EndpointAnswerer, Pace
from eyas.data.regenerate import IdAnswerer, regenerate
from eyas.data.regenerate_dialog import RegenerateConfig
from eyas.data.sources import Prompt
from eyas.data.store import TokenStore
from eyas.data.template import ChatTemplate

PROMPTS = [
    Prompt(f"p{i}", (f"Say {i}",) if i % 3 else (f"Say {i}", "Again", "And again"), source="s")
    for i in range(12)
]


def echo(tokenizer, *, log=None, cut=()):
    """Answers with the prompt's length; request ids in `cut` end without their end token."""

    def generate(prompts, params):
        # Out of order, as a batch engine finishes.
        for index in reversed(range(len(prompts))):
            if log is not None:
                log.append((tuple(prompts[index]), params[index]))
            text = f"<{len(prompts[index])}>"
            ids = tokenizer.encode(text, add_special_tokens=False)
            yield index, ids if index in cut else [*ids, END], "length" if index in cut else "stop"

    return generate


def run(out, tokenizer, generate, prompts=PROMPTS, **config):
    template = ChatTemplate(tokenizer, (END,))
    settings = RegenerateConfig(**({"shard_size": 5, "window": 7} | config))
    return regenerate(prompts, IdAnswerer(template, generate), out, settings, about={"target": "toy"})


def records(out):
    return {
        r["id"]: r
        for shard in sorted(out.glob("shard-*.jsonl"))
        for r in map(json.loads, shard.read_text().splitlines())
    }


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def test_answers_keep_their_exact_ids(tmp_path, tokenizer):
    manifest = run(tmp_path, tokenizer, echo(tokenizer))
    got = records(tmp_path)
    assert set(got) == {prompt.id for prompt in PROMPTS}
    template = ChatTemplate(tokenizer, (END,))
    for prompt in PROMPTS:
        record = got[prompt.id]
        assert [m["content"] for m in record["messages"] if m["role"] == "user"] == list(prompt.turns)
        assert len(record["spans"]) == len(prompt.turns)
        # The toy tokenizer has one way to write a text, so rendering must give the same ids and spans.
        encoded = template.encode(record["messages"])
        assert encoded.ids[: len(record["token_ids"])] == record["token_ids"]
        assert [list(span) for span in encoded.spans] == record["spans"]
    assert manifest["num_conversations"] == 12
    assert manifest["num_answers"] == 20
    assert len(manifest["shards"]) == 3


def test_the_prompt_of_a_later_turn_continues_the_exact_ids(tmp_path, tokenizer):
    log = []
    run(tmp_path, tokenizer, echo(tokenizer, log=log), prompts=[PROMPTS[0]])
    prompts = [ids for ids, _ in log]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before


def test_answers_without_an_end_are_closed_by_the_template(tmp_path, tokenizer):
    run(tmp_path, tokenizer, echo(tokenizer, cut={0}), prompts=[PROMPTS[0]])
    record = records(tmp_path)["p0"]
    for begin, end in record["spans"][:-1]:
        # The target did not say the end of turn: it stands there, unsupervised.
        assert record["token_ids"][end] == END
        assert record["token_ids"][end - 1] != END
        assert begin < end
    assert record["finish_reasons"] == ["length"] * 3


def test_temperatures_mix_by_id_and_stay_the_same(tmp_path, tokenizer):
    prompts = [Prompt(f"q{i}", ("x",)) for i in range(400)]
    run(tmp_path, tokenizer, echo(tokenizer), prompts=prompts, shard_size=1000)
    hot = {r["id"] for r in records(tmp_path).values() if r["temperature"] == 0.7}
    # 30 % of 400 = 120, sigma 9: outside 80 .. 160 once in 100,000 choices of the hash.
    assert 80 < len(hot) < 160
    log = []
    run(tmp_path / "b", tokenizer, echo(tokenizer, log=log), prompts=prompts[:50])
    assert {r["id"] for r in records(tmp_path / "b").values() if r["temperature"] == 0.7} == {
        f"q{i}" for i in range(50)
    } & hot
    assert len({params.seed for _, params in log}) == 50


def test_finished_shards_are_skipped_and_other_runs_refused(tmp_path, tokenizer):
    def dies(prompts, params):
        yield from list(echo(tokenizer)(prompts, params))[:6]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tokenizer, dies)
    done = set(records(tmp_path))
    assert 0 < len(done) < 12
    asked = []
    run(tmp_path, tokenizer, echo(tokenizer, log=asked))
    assert set(records(tmp_path)) == {prompt.id for prompt in PROMPTS}
    template = ChatTemplate(tokenizer, (END,))
    again = {tuple(template.prompt_ids(p.opening)) for p in PROMPTS if p.id in done}
    assert not again & {ids for ids, _ in asked}
    with pytest.raises(DataError, match="another run"):
        run(tmp_path, tokenizer, echo(tokenizer), max_new_tokens=7)


def test_long_prompts_are_left_out(tmp_path, tokenizer):
    manifest = run(tmp_path, tokenizer, echo(tokenizer), max_prompt_tokens=40)
    # The first turns fit, the second do not: those conversations end after one answer.
    assert all(len(r["spans"]) == 1 for r in records(tmp_path).values())
    assert all(r["messages"][-1]["role"] == "assistant" for r in records(tmp_path).values())
    assert manifest["num_skipped"] == 0
    assert run(tmp_path / "b", tokenizer, echo(tokenizer), max_prompt_tokens=3)["num_skipped"] == 12


CHILD = """
import sys, time
sys.path[:0] = {paths!r}
import test_regenerate as t
tokenizer = t.toy_tokenizer()
def slow(prompts, params):
    for item in t.echo(tokenizer)(prompts, params):
        time.sleep(0.02)
        yield item
prompts = [t.Prompt(f"k{{i}}", ("x",)) for i in range(400)]
t.run(t.Path({out!r}), tokenizer, slow, prompts=prompts, shard_size=3)
"""


@pytest.mark.slow
def test_kill_9_loses_no_finished_shard(tmp_path, tokenizer):
    here = Path(__file__).parent
    code = CHILD.format(paths=[str(here), str(here.parents[1])], out=str(tmp_path / "out"))
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((tmp_path / "out").glob("shard-*.jsonl"))) < 3:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = records(tmp_path / "out")
    assert len(before) >= 9
    prompts = [Prompt(f"k{i}", ("x",)) for i in range(400)]
    run(tmp_path / "out", tokenizer, echo(tokenizer), prompts=prompts, shard_size=100)
    after = records(tmp_path / "out")
    assert set(after) == {prompt.id for prompt in prompts}
    assert all(after[name] == record for name, record in before.items())


class Handler(BaseHTTPRequestHandler):
    fail = 2
    seen = None
    refuses = staticmethod(lambda body: False)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.seen is not None:
            self.seen.append(body)
        if self.refuses(body):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"too long")
            return
        if Handler.fail > 0:
            Handler.fail -= 1
            self.send_response(503)
            self.end_headers()
            return
        answer = f"{len(body['messages'])} messages, T {body['temperature']}"
        reply = {
            "choices": [{"message": {"content": answer}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 5},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args):
        pass


def test_endpoint_answers_are_packed_through_the_template(tmp_path, tokenizer):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        answerer = EndpointAnswerer(urls=(url, url), model="m", concurrency=3, backoff=0.01)
        config = RegenerateConfig(temperatures={0.0: 1.0})
        manifest = regenerate(PROMPTS, answerer, tmp_path / "out", config, about={"endpoint": url})
    finally:
        server.shutdown()
        server.server_close()
    assert manifest["num_answers"] == 20
    got = records(tmp_path / "out")
    assert got["p0"]["messages"][-1]["content"] == "5 messages, T 0.0"
    assert "token_ids" not in got["p0"]
    template = ChatTemplate(tokenizer, (END,))
    built = build_store(
        tmp_path / "out", tmp_path / "store", vocab_size=len(tokenizer), template=template, meta={}
    )
    assert built["meta"]["conversations"] == {"num_exact": 0, "num_templated": 12, "num_dropped": 0}
    with pytest.raises(DataError, match="gave up after 1 tries"):
        list(
            EndpointAnswerer(urls=("http://127.0.0.1:9",), model="m", retries=0).answer(
                [type("D", (), {"messages": []})()], [config_params()]
            )
        )


def test_refused_requests_are_left_out_and_earlier_turns_stay(tmp_path):
    """p0, p3, p6, p9 have three turns, the others one: the last turn of p0 is refused, and all of p1."""

    def refuses(body):
        users = [m["content"] for m in body["messages"] if m["role"] == "user"]
        return users == ["Say 0", "Again", "And again"] or users[0] == "Say 1"

    bodies = []
    handler = type("This", (Handler,), {"fail": 0, "seen": bodies, "refuses": staticmethod(refuses)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        answerer = EndpointAnswerer(
            urls=(f"http://127.0.0.1:{server.server_port}/v1",),
            model="m",
            template_options={"enable_thinking": False},
        )
        manifest = regenerate(PROMPTS, answerer, tmp_path, RegenerateConfig(), about={})
    finally:
        server.shutdown()
        server.server_close()
    got = records(tmp_path)
    assert set(got) == {prompt.id for prompt in PROMPTS} - {"p1"}
    assert [m["role"] for m in got["p0"]["messages"]] == ["user", "assistant"] * 2
    assert got["p0"]["finish_reasons"] == ["stop", "stop"]
    assert len(got["p3"]["finish_reasons"]) == 3
    assert (manifest["num_skipped"], manifest["num_answers"]) == (1, 18)
    assert answerer.num_refused == 2
    assert "HTTP 400: too long" in answerer.refusal
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_endpoints_that_fail_hand_their_requests_to_the_others(tmp_path):
    """One is gone, one is busy for long and says so; the third answers everything, at its own pace."""
    busy, times = [], []

    class Busy(Handler):
        def do_POST(self):
            busy.append(time.monotonic())
            self.send_response(503)
            self.send_header("Retry-After", "600")
            self.end_headers()

    class Paced(Handler):
        fail, seen, refuses = 0, [], staticmethod(lambda _body: False)

        def do_POST(self):
            times.append(time.monotonic())
            super().do_POST()

    with serving(Busy) as one, serving(Paced) as other:
        answerer = EndpointAnswerer(
            urls=("http://127.0.0.1:9/v1", one, other), model="m", backoff=0.0, requests_per_minute=1200
        )
        answerer._paces[one].wait = lambda: None  # nobody sits the 600 seconds out
        manifest = regenerate(PROMPTS, answerer, tmp_path, RegenerateConfig(), about={})
    assert manifest["num_answers"] == 20
    assert busy
    assert answerer._paces[one]._next > time.monotonic() + 500
    assert len(times) == 20
    assert times[-1] - times[0] >= 0.9 * 19 * 60 / 1200  # sleep may end a little early
    with pytest.raises(DataError, match="requests_per_minute=0: it must be positive"):
        EndpointAnswerer(urls=(), model="m", requests_per_minute=0)


def test_turns_come_evenly_and_wait_for_who_asks_to():
    clock, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.data.endpoint.time.monotonic", lambda: clock[0])
        patch.setattr("eyas.data.endpoint.time.sleep", sleep)
        pace = Pace(30)
        pace.wait()
        pace.wait()
        clock[0] += 1.5
        pace.wait()
        pace.hold(7)
        pace.wait()
    assert slept == [0.0, 2.0, 0.5, 7.0]


def config_params():
    from eyas.core.sampling import SamplingParams

    return SamplingParams()


def test_a_store_of_regenerated_answers_has_the_exact_ids(tmp_path, tokenizer):
    run(tmp_path / "out", tokenizer, echo(tokenizer))
    build_store(tmp_path / "out", tmp_path / "store", vocab_size=len(tokenizer), template=None, meta={})
    store = TokenStore.load(tmp_path / "store")
    wanted = {
        tuple(r["token_ids"]): [tuple(s) for s in r["spans"]] for r in records(tmp_path / "out").values()
    }
    for index in range(store.num_documents):
        ids, spans = store.document(index)
        assert wanted[tuple(ids)] == spans


def test_requests_that_fail_give_no_training_data(tmp_path, tokenizer):
    def generate(prompts, params):
        for index, ids, reason in echo(tokenizer)(prompts, params):
            yield index, ids, "error" if index == 1 else reason

    manifest = run(tmp_path, tokenizer, generate, window=99)
    assert manifest["num_skipped"] >= 1
    assert "p1" not in records(tmp_path)
    assert all("error" not in record["finish_reasons"] for record in records(tmp_path).values())


@pytest.mark.parametrize("reason", ["error", "stop"])
def test_a_later_turn_that_fails_leaves_the_earlier_ones(reason, tmp_path, tokenizer):
    """The second turn of p0 ends in an error, or with nothing but its end token."""
    log = []

    def generate(prompts, params):
        for index, ids, usual in echo(tokenizer, log=log)(prompts, params):
            fails = len(log) == 2
            yield index, [END] if fails else ids, reason if fails else usual

    run(tmp_path, tokenizer, generate, prompts=[PROMPTS[0]])
    record = records(tmp_path)["p0"]
    assert [m["content"] for m in record["messages"]][:1] == ["Say 0"]
    assert len(record["messages"]) == 2
    assert record["finish_reasons"] == ["stop"]
    ((begin, end),) = record["spans"]
    assert record["token_ids"][:begin] == list(log[0][0])
    assert len(record["token_ids"]) == end


def test_shards_and_folders_that_are_none(tmp_path, tokenizer):
    run(tmp_path / "a", tokenizer, echo(tokenizer))
    (tmp_path / "a" / "shard-00001.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(DataError, match=r"shard-00001\.jsonl:1: no record of this run"):
        run(tmp_path / "a", tokenizer, echo(tokenizer))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made a folder"):
        run(tmp_path / "file", tokenizer, echo(tokenizer))
