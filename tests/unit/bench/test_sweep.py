"""Sweeps of a tiny target: real engines, real counters, a real server."""

import gzip
import json
from dataclasses import replace

import pytest
from fake_tokenizer import FakeTokenizer

from eyas.bench.cells import Load, Method, Settings, phase_cells, plan_cells
from eyas.bench.client import HTTPBackend, Stream, finish
from eyas.bench.conversations import encode_chat
from eyas.bench.datasets import Dataset
from eyas.bench.inprocess import run_closed, run_open, warm_up, warm_up_contexts, warm_up_lengths
from eyas.bench.offline import build_engine
from eyas.bench.sweep import LocalBackend, read_records, rounded, sweep
from eyas.bench.traffic import Trace
from eyas.bench.workload import Prompt
from eyas.core.errors import ConfigError, DataError
from eyas.core.sampling import SamplingParams
from served import Served, tiny_llm
from tiny import tiny_target

PROMPTS = (Prompt("1", "d", "", ("hello hello hello",)), Prompt("2", "d", "", ("abc abc abc abc",)))
DATA = Dataset("d", PROMPTS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS = Settings(
    target="tiny",
    target_fingerprint="f",
    machine="m",
    dtype="float32",
    max_tokens=12,
    ignore_eos=True,
    num_requests=3,
    waves=2,
)
PROVENANCE = {"time": "2026-01-01T00:00:00+00:00", "command": "eyas bench sweep"}


@pytest.fixture(scope="module")
def target():
    return replace(tiny_target(eos_token_ids=()), tokenizer=FakeTokenizer())


@pytest.fixture
def prompt_ids(target):
    return [encode_chat(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in PROMPTS]


def engine(target, spec=None, k=0, seqs=2):
    return build_engine(target, spec, k, max_model_len=80, max_num_seqs=seqs)


def test_a_closed_loop_keeps_every_place_filled(target, prompt_ids):
    run = run_closed(engine(target), prompt_ids, GREEDY, concurrency=2, num_requests=6)
    assert run.window.steady
    assert run.counters.row_steps == 2 * run.counters.steps
    # What the engine counted in the window is what was seen to arrive in it.
    assert run.counters.committed == run.window.tokens(run.traces)
    assert [trace.num_tokens for trace in run.traces] == [12] * 6
    assert all(trace.completed for trace in run.traces)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_answers_are_those_of_generate(target, prompt_ids, concurrency):
    own = engine(target, "prompt_lookup", 3)
    run = run_closed(own, prompt_ids, GREEDY, concurrency=concurrency, num_requests=4)
    expected = engine(target).generate_ids(prompt_ids, GREEDY)
    assert run.token_ids == expected * 2
    assert run.counters.committed == run.window.tokens(run.traces)
    assert run.counters.drafts > 0


def test_the_limit_ends_a_cell_and_leaves_nothing_behind(target, prompt_ids):
    own = engine(target)
    ticks = iter(range(10_000))
    run = run_closed(
        own,
        prompt_ids,
        GREEDY,
        concurrency=2,
        num_requests=1000,
        limit_seconds=30,
        clock=lambda: float(next(ticks)),
    )
    assert run.window.steady
    assert 30 <= run.window.seconds < 40
    assert len(run.traces) < 1000
    assert own.load().running == own.load().waiting == 0


def test_an_open_loop_sends_when_due(target, prompt_ids):
    own = engine(target)
    now = [0.0]

    def clock():
        now[0] += 0.25
        return now[0]

    def sleep(seconds):
        assert seconds > 0
        now[0] += seconds

    run = run_open(own, prompt_ids, GREEDY, starts=[1.0, 1.1, 100.0], clock=clock, sleep=sleep)
    assert [trace.num_tokens for trace in run.traces] == [12] * 3
    assert [round(trace.start - run.window.begin, 6) for trace in run.traces] == [1.0, 1.1, 100.0]
    assert run.stop > 100
    assert all(trace.deliveries[0][0] > trace.start for trace in run.traces)


def test_warm_up_thins_out_by_halves():
    assert warm_up_lengths(4) == [8, 8, 20, 32]
    assert len(warm_up_lengths(64)) == 64
    assert warm_up_lengths(1) == [8]


@pytest.mark.parametrize(
    ("shortest", "full", "expected"),
    [
        (40, 3000, [40, 1024, 2048, 3000]),
        (40, 700, [40, 700]),
        (40, 40, [40]),
        (40, 20, [40]),
        (1500, 5000, [1500, 3000, 5000]),
    ],
)
def test_warm_up_meets_every_bound_on_contexts(shortest, full, expected):
    assert warm_up_contexts(shortest, full) == expected


def test_warm_up_meets_every_batch_size(target, prompt_ids):
    own = engine(target, seqs=4)
    seen, contexts, step = set(), [], own.step

    def watched():
        seen.add(own.load().running)
        contexts.extend(r.num_cached for r in own._runner.scheduler.running)
        return step()

    own.step = watched
    warm_up(own, prompt_ids, GREEDY, 4, graphs=False)
    assert len(contexts) < 30
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    warm_up(own, prompt_ids, long, 4)
    assert {1, 2, 4} <= seen
    assert max(contexts) >= max(map(len, prompt_ids)) + 40 - 2
    assert own.load().running == 0


def test_no_cell_begins_after_the_limit(tmp_path):
    class Fake:
        def run(self, cell):
            return {"output_tokens_per_second": 1.0}

    ticks = iter(range(100))
    cells = plan_cells([Method("plain")], [DATA], [Load(c) for c in range(1, 6)], 1, SETTINGS)
    record = tmp_path / "r.jsonl"
    part = sweep(cells, record, lambda _: Fake(), PROVENANCE, until=3, clock=lambda: next(ticks))
    assert part == 3
    assert sweep(cells, record, lambda _: Fake(), PROVENANCE) == 2


def test_phases_only_where_wanted():
    methods = [Method("plain"), Method("eagle3", "x", 3)]

    def wanted(method, load):
        return method.name != "plain" or load.concurrency == 1

    found = phase_cells(methods, "d", [Load(1), Load(2)], SETTINGS, wanted)
    assert [(cell.method.label, str(cell.load)) for cell in found] == [
        ("plain", "c=1"),
        ("eagle3 K=3", "c=1"),
        ("eagle3 K=3", "c=2"),
    ]
    assert all(cell.phases for cell in found)


def test_a_sweep_is_recorded_and_goes_on_where_it_was(target, prompt_ids, tmp_path):
    built = []

    def build(method, time_phases):
        assert not time_phases
        built.append(method.label)
        return engine(target, method.spec, method.num_draft_tokens)

    methods = [Method("plain"), Method("prompt_lookup", "prompt_lookup", 2)]
    cells = plan_cells(methods, [DATA], [Load(1), Load(2)], 2, SETTINGS)
    record = tmp_path / "r.jsonl"

    def go(part):
        backend = LocalBackend(build, {"d": prompt_ids}, warm_up_concurrency=2)
        return sweep(part, record, lambda _: backend, PROVENANCE)

    assert go(cells[:3]) == 3
    assert go(cells) == len(cells) - 3
    assert go(cells) == 0
    assert built == ["plain", "prompt_lookup K=2"] * 2
    lines = read_records([record])
    assert [line["type"] for line in lines].count("run") == 2
    measured = [line for line in lines if line["type"] == "cell"]
    assert [line["id"] for line in measured] == [cell.id for cell in cells]
    result = measured[1]["result"]
    assert result["acceptance"]["acceptance_length"] >= 1
    assert result["num_completed"] == 3
    steps = result["steps"]
    speed = steps["rows_per_step"] * steps["tokens_per_forward"] / steps["step_ms"] * 1e3
    assert speed == pytest.approx(result["output_tokens_per_second"], rel=1e-3)


def test_one_engine_at_a_time(target, prompt_ids):
    backend = LocalBackend(
        lambda m, _: engine(target, m.spec), {"d": prompt_ids}, warm_up_concurrency=1, keep=False
    )
    for method in (Method("plain"), Method("other")):
        backend.run(plan_cells([method], [DATA], [Load(1)], 1, SETTINGS)[0])
        assert len(backend._engines) == 1


def test_phases_are_timed_by_engines_of_their_own(target, prompt_ids):
    built = []

    def build(method, time_phases):
        built.append((method.name, time_phases))
        return engine(target)

    backend = LocalBackend(build, {"d": prompt_ids}, warm_up_concurrency=1)
    methods = [Method("plain"), Method("other")]
    for cell in plan_cells(methods, [DATA], [Load(1)], 1, SETTINGS) + phase_cells(
        methods, "d", [Load(1)], SETTINGS
    ):
        backend.run(cell)
    assert built == [("plain", False), ("other", False), ("plain", True), ("other", True)]
    assert len(backend._engines) == 2


def test_records_of_something_else_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"schema": "eyas.sweep/1", "type": "run"}\n{"schema": "eyas.sw')
    assert len(read_records([path])) == 1
    path.write_text('not json\n{"schema": "eyas.sweep/1", "type": "run"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_records([path])
    path.write_text(json.dumps({"schema": "other"}) + "\n")
    with pytest.raises(DataError, match="eyas bench sweep"):
        read_records([path])
    with pytest.raises(DataError, match="cannot be read"):
        read_records([tmp_path / "none"])


def test_a_packed_record_is_read_as_it_is(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"schema": "eyas.sweep/1", "type": "run"}\n'))
    assert read_records([path]) == [{"schema": "eyas.sweep/1", "type": "run"}]
    whole = path.read_bytes()
    for broken in (whole[:-9], b"plain text"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="cannot be read"):
            read_records([path])


def test_numbers_are_short_and_right():
    assert rounded({"a": [1 / 3], "b": 123456789.0, "c": 7, "d": None}) == {
        "a": [0.333333],
        "b": 123457000.0,
        "c": 7,
        "d": None,
    }


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=50.0)], ids=str)
def test_an_endpoint(load):
    cell = plan_cells([Method("served", num_draft_tokens=3, url="x")], [DATA], [load], 1, SETTINGS)[0]
    with Served(tiny_llm()) as server:
        backend = HTTPBackend(server.url + "/v1", [DATA])
        result = backend.run(cell)
        again = backend.run(cell)
    assert result["num_completed"] == again["num_completed"] == 4 - (load.rate is not None)
    assert result["num_tokens"] == 12 * result["num_completed"]
    assert result["token_times"] == "exact"
    assert result["window"] == ("steady" if load.concurrency else "whole")
    part = result["acceptance"]
    assert len(part["acceptance_by_position"]) == 3
    assert part["num_drafts"] == again["acceptance"]["num_drafts"]
    assert part["acceptance_length"] == pytest.approx(1 + sum(part["acceptance_by_position"]))
    assert result["ttft_ms"]["p50"] > 0


def test_an_endpoint_that_is_not_there_or_fails():
    cell = plan_cells([Method("served", url="x")], [DATA], [Load(1)], 1, SETTINGS)[0]
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        HTTPBackend("http://127.0.0.1:9", [DATA]).run(cell)
    with Served(tiny_llm(), api_key="secret") as server:
        with pytest.raises(ConfigError, match="401"):
            HTTPBackend(server.url, [DATA]).run(cell)
        backend = HTTPBackend(server.url, [DATA], api_key="secret")
        assert backend.run(cell)["num_errors"] == 0


def test_fields_that_a_server_refuses_are_left_out():
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse

    seen = []
    app = FastAPI()

    @app.get("/v1/models")
    def models():
        return {"data": [{"id": "m"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        seen.append(sorted(body))
        for name in ("return_token_ids", "ignore_eos"):
            if name in body:
                return JSONResponse({"error": {"message": f"unknown field {name}"}}, status_code=400)
        events = [{"choices": [{"delta": {"content": text}}]} for text in ("a", "bcd", "ef")] + [
            {"choices": [], "usage": {"completion_tokens": 6}}
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return StreamingResponse(iter([text]), media_type="text/event-stream")

    cell = plan_cells([Method("served", url="x")], [DATA], [Load(1)], 1, SETTINGS)[0]
    with serve_app(app) as url:
        result = HTTPBackend(url, [DATA]).run(cell)
    assert len(seen) == 3 + 3
    assert "seed" in seen[-1]
    assert result["num_tokens"] == 18
    assert result["token_times"] == "spread"
    assert result["acceptance"] == {}


def serve_app(app):
    import contextlib
    import socket
    import threading

    import uvicorn

    from served import wait_for

    @contextlib.contextmanager
    def running():
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)

    return running()


def test_tokens_are_spread_by_characters_where_nobody_counts():
    whole = Stream(Trace(0.0), [(1.0, None, 1), (2.0, None, 3), (3.0, None, 2)], num_tokens=6)
    cut_off = Stream(Trace(0.0), [(1.0, None, 4)])
    told = Stream(Trace(0.0), [(1.0, 2, 9), (2.0, 0, 1)], num_tokens=2)
    finish([whole, cut_off])
    assert whole.trace.deliveries == [(1.0, 1), (2.0, 3), (3.0, 2)]
    assert cut_off.trace.deliveries == [(1.0, 4)]
    assert finish([told])[0].deliveries == [(1.0, 2)]
    assert finish([Stream(Trace(0.0), [(1.0, None, 4), (2.0, None, 4)])])[0].num_tokens == 2
