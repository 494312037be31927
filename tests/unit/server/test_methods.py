"""Several ways of decoding one target: chosen by the model's name, sharing time, giving the same text."""

import threading
from types import SimpleNamespace

import pytest

from eyas.core.tree import TreeBudget
from eyas.server.methods import Methods, share_of_rest
from served import CHAT, NAME, TEXT, Served, tiny_llm, wait_for

ASKED = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


class Timed:
    """An LLM whose steps take as long as they are told, by a clock of their own, in a log of all steps."""

    max_num_seqs = 1
    now = 0.0

    def __init__(self, name, seconds, log, num_steps=10**9):
        self.name, self.seconds, self.log, self.left = name, seconds, log, num_steps
        self.drafter = SimpleNamespace(name=name)

    def step(self):
        Timed.now += self.seconds
        self.log.append(self.name)
        self.left -= 1
        return self.left > 0


@pytest.fixture
def _clock(monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: Timed.now)
    monkeypatch.setattr("eyas.server.methods.time", clock)


@pytest.mark.usefixtures("_clock")
def test_time_is_shared_not_steps():
    log = []
    methods = Methods.of([Timed("slow", 0.012, log), Timed("fast", 0.003, log), Timed("idle", 0, log)])
    methods.wake("slow")
    methods.wake("fast")
    for _ in range(50):
        assert methods.step()
    assert "idle" not in log
    assert (log.count("fast"), log.count("slow")) == (40, 10)


@pytest.mark.usefixtures("_clock")
def test_a_method_that_was_idle_is_owed_nothing():
    log = []
    methods = Methods.of([Timed("a", 0.002, log), Timed("b", 0.002, log)])
    methods.wake("a")
    for _ in range(20):
        methods.step()
    methods.wake("b")
    log.clear()
    for _ in range(10):
        methods.step()
    assert log.count("a") == 5


def test_ended_work_leaves_the_turn():
    log = []
    methods = Methods.of([Timed("a", 0, log, num_steps=2), Timed("b", 0, log, num_steps=3)])
    methods.wake("a")
    methods.wake("b")
    results = [methods.step() for _ in range(5)]
    assert results == [True, True, True, True, False]
    assert sorted(log) == ["a", "a", "b", "b", "b"]
    assert not methods.step(), "without work every engine is asked once"
    assert log[5:] == ["a", "b"]


def test_names():
    plain = SimpleNamespace(drafter=None)
    head = SimpleNamespace(drafter=SimpleNamespace(name="eagle3"))
    assert list(Methods.of([head, plain, head, head]).llms) == ["eagle3", "plain", "eagle3-2", "eagle3-3"]


@pytest.mark.parametrize("total", [1, 2, 3])
def test_memory_is_shared_equally(total):
    free, got = 1.0, []
    for number in range(total):
        got.append(free * share_of_rest(0.8, number, total))
        free -= got[-1]
    assert got == pytest.approx([0.8 / total] * total)


@pytest.fixture(scope="module")
def several():
    llms = [tiny_llm(drafter="eagle3"), tiny_llm(drafter="self", num_draft_tokens=4), tiny_llm(drafter=None)]
    with Served(llms) as served:
        yield served


def test_models_lists_every_method(several):
    models = several.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [
        NAME, f"{NAME}:eagle3", f"{NAME}:small_model", f"{NAME}:plain",
    ]  # fmt: skip
    assert [model["method"] for model in models] == ["eagle3", "eagle3", "small_model", "plain"]
    assert [model["num_draft_tokens"] for model in models] == [3, 3, 4, 0]
    assert all(model["tree"] is None for model in models)
    assert several.http.get(f"/v1/models/{NAME}:plain").json() == models[-1]


def test_the_name_chooses_and_the_text_is_the_same(several):
    answers = {}
    for name in (None, NAME, f"{NAME}:eagle3", f"{NAME}:small_model", f"{NAME}:plain"):
        body = several.post(TEXT, **ASKED, **({} if name is None else {"model": name})).json()
        answers[name] = body["choices"][0]["token_ids"]
        assert body["model"] == (NAME if name in (None, NAME, f"{NAME}:eagle3") else name)
        drafts = body["usage"]["speculation"]["draft_tokens"]
        assert (drafts == 0) == (name == f"{NAME}:plain")
    assert len({tuple(ids) for ids in answers.values()}) == 1
    assert several.post(TEXT, **ASKED, model=f"{NAME}:nobody").status_code == 404


def test_they_run_side_by_side_and_metrics_tell_them_apart(several):
    answers = []

    def ask(name):
        answers.append(several.post(TEXT, **{**ASKED, "max_tokens": 120}, model=f"{NAME}:{name}").json())

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("eagle3", "small_model", "plain") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    wait_for(several.idle)
    assert several.metric(f'vllm:spec_decode_num_drafts_total{{model_name="{NAME}:plain"}}') == 0
    assert several.metric(f'vllm:spec_decode_num_drafts_total{{model_name="{NAME}:eagle3"}}') > 0
    pages = [several.metric(f'eyas_kv_pages{{model_name="{NAME}:{name}"}}') for name in ("eagle3", "plain")]
    assert pages == [200, 200]


@pytest.mark.parametrize("limit", [0, 2, 99])
def test_a_request_may_limit_its_drafts(several, limit):
    asked = {**ASKED, "model": f"{NAME}:small_model", "eyas": {"num_draft_tokens": limit}}
    choice = several.post(TEXT, **asked).json()["choices"][0]
    assert max(choice["origins"]) == min(limit, 4)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_draft_tokens": -1}, "eyas.num_draft_tokens"),
        ({"provenance": 1}, "eyas.provenance"),
        ({"x": 1}, "eyas.x"),
        ("yes", "eyas"),
    ],
)
def test_bad_options_name_their_place(several, options, param):
    response = several.post(TEXT, prompt="a", eyas=options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_provenance_is_sent_only_when_asked_for(several, path):
    asked = dict(ASKED, model=f"{NAME}:small_model")
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    plain = several.events(path, **asked)
    assert not any("eyas" in choice for event in plain for choice in event["choices"])
    text, tokens, steps, seconds = "", 0, [0], [0.0]
    origins = []
    for event in several.events(path, **asked, eyas={"provenance": True}):
        (choice,) = event["choices"]
        piece = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        if "eyas" not in choice:
            assert not piece
            continue
        trace = choice["eyas"]
        assert "".join(part for part, _ in trace["parts"]) == piece
        text += piece
        origins += choice["origins"]
        tokens += trace["num_tokens"]
        steps.append(trace["num_steps"])
        seconds.append(trace["engine_seconds"])
    assert tokens == len(origins) == 40
    assert steps == sorted(steps)
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0
    whole = several.post(path, **asked).json()
    assert steps[-1] == whole["usage"]["speculation"]["steps"]
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if path == CHAT else choice["text"])


def test_a_tree_is_named():
    from eyas import LLM
    from served import PieceTokenizer
    from tiny import tiny_target
    from tree_fakes import tree_head

    target = tiny_target()
    target.tokenizer = PieceTokenizer()
    llm = LLM(target, tree_head(target, "eagle3", "3x2x6"), max_num_seqs=2)
    with Served(llm) as served:
        (model,) = served.http.get("/v1/models").json()["data"]
        assert TreeBudget.parse(model["tree"]).num_draft_tokens == model["num_draft_tokens"] == 6
