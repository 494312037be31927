"""Stop strings over chunks, hang-ups, full queues, poisoned requests, a dying engine, and the command."""

import sys
import threading
import time

import httpx
import pytest

from eyas.core.sampling import SamplingParams
from eyas.engine import progress
from served import CHAT, LONG, TEXT, Served, tiny_llm, wait_for


class SlowSteps:
    """Makes every step of an LLM take a while, and counts them."""

    def __init__(self, llm, seconds=0.02):
        self.count, self._step, self.seconds = 0, llm.step, seconds
        llm.step = self

    def __call__(self):
        self.count += 1
        time.sleep(self.seconds)
        return self._step()


@pytest.fixture
def slow():
    llm = tiny_llm(max_num_seqs=2)
    steps = SlowSteps(llm)
    with Served(llm, max_queue=1) as running:
        running.steps = steps
        yield running
        wait_for(running.idle)


def test_a_stream_opens_with_its_first_token(slow):
    messages = [{"role": "user", "content": "hello"}]
    events = slow.events(CHAT, messages=messages, temperature=0, max_tokens=3, ignore_eos=True, n=2)
    seen = [event["choices"][0] for event in events if event["choices"]]
    for index in (0, 1):
        mine = [place for place, choice in enumerate(seen) if choice["index"] == index]
        assert seen[mine[0]]["delta"] == {"role": "assistant", "content": ""}
        # Nothing comes between the role and the first token: it would look like a token that came at once.
        assert mine[1] == mine[0] + 1
        assert seen[mine[1]]["delta"]["content"]


def test_stop_strings_end_streams_where_they_end_whole_answers(served):
    plain = tiny_llm(drafter=None)
    text = plain.generate(["hello"], SamplingParams(temperature=0.0, max_tokens=60))[0].outputs[0].text
    stops = {text[start : start + size] for size in (1, 2, 4) for start in range(4, 40, 9)}
    assert len(stops) > 6
    asked = {"prompt": "hello", "temperature": 0, "max_tokens": 60, "return_token_ids": True, "logprobs": 0}
    for stop in sorted(stops):
        params = SamplingParams(temperature=0.0, max_tokens=60, stop=(stop,))
        want = plain.generate(["hello"], params)[0].outputs[0]
        assert want.text == text[: text.index(stop)]
        whole = served.post(TEXT, **asked, stop=stop).json()["choices"][0]
        assert (whole["text"], whole["token_ids"], whole["stop_reason"]) == (want.text, want.token_ids, stop)
        sent, ids, tokens = "", [], []
        for event in served.events(TEXT, **asked, stop=[stop, "no such text"]):
            choice = event["choices"][0]
            sent += choice["text"]
            ids += choice["token_ids"]
            tokens += choice["logprobs"]["tokens"]
            assert want.text.startswith(sent), "text was sent that a stop string takes back"
        assert (sent, ids) == (want.text, want.token_ids)
        assert tokens == whole["logprobs"]["tokens"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages_within_a_step(slow, stream):
    closed_at = []
    close = slow.bridge.close

    def closing(ticket):
        closed_at.append(slow.steps.count)
        close(ticket)

    slow.bridge.close = closing
    if stream:
        with slow.http.stream("POST", TEXT, json={**LONG, "stream": True}) as response:
            next(response.iter_lines())
            wait_for(lambda: slow.bridge.load.running == 1)
    else:
        with pytest.raises(httpx.ReadTimeout):
            slow.http.post(TEXT, json=LONG, timeout=1.0)
    wait_for(lambda: closed_at)
    wait_for(slow.idle)
    assert len(closed_at) == 1
    assert slow.steps.count <= closed_at[0] + 2, "one step may run while the client goes, one more reports"
    wait_for(lambda: slow.metric('eyas_completions_finished_total{reason="abort"}') == 1)


def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(slow):
    with slow.http.stream("POST", TEXT, json={**LONG, "stream": True, "n": 2}) as first:
        lines = first.iter_lines()  # kept: httpx hangs up when it is dropped
        next(lines)
        with httpx.Client(base_url=slow.url, trust_env=False) as other, pytest.raises(httpx.ReadTimeout):
            other.post(TEXT, json=LONG, timeout=0.2)
        assert slow.steps.count < 50, "the first request is to run still"
        wait_for(lambda: slow.bridge.load.waiting == 0)
        assert slow.bridge.load.running == 2
    wait_for(slow.idle)


def test_a_full_queue_answers_429(slow):
    with slow.http.stream("POST", TEXT, json={**LONG, "stream": True, "n": 3}) as response:
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=slow.url, trust_env=False) as other:
            refused = other.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert other.get("/health").status_code == 200
            never = other.post(TEXT, json={**LONG, "n": 4})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    wait_for(slow.idle)
    assert slow.post(TEXT, **{**LONG, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("drafter", [None, "eagle3", "peagle"])
def test_a_poisoned_request_ends_alone(drafter):
    bad = 41  # never drafted by the heads, which know even ids only
    llm = tiny_llm(drafter=drafter, num_pages=40)
    with Served(llm) as served:
        asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        asked["logit_bias"] = {str(bad): -100}
        good = served.post(TEXT, prompt=[1, 20, 30], **asked).json()["choices"][0]
        llm.target.decoder.embed_tokens.weight.data[bad] = float("nan")
        llm.target.decoder.lm_head_weight.data[bad] = 0.0
        answers = []

        def ask(prompt, stream=False):
            if stream:
                answers.append((prompt, served.events(TEXT, prompt=prompt, **asked)))
            else:
                answers.append((prompt, served.post(TEXT, prompt=prompt, **asked)))

        for _ in range(3):  # again and again, so that pages which held NaN are used by the others
            answers.clear()
            jobs = [([1, 20, 30],), ([1, bad, 30],), ([1, 20, 30],), ([1, 30, bad] * 20, True)]
            threads = [threading.Thread(target=ask, args=job) for job in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(answers) == 4
            for prompt, answer in answers:
                if isinstance(answer, list):
                    assert answer[-1]["error"]["type"] == "server_error"
                    assert "no usable logits" in answer[-1]["error"]["message"]
                elif bad in prompt:
                    assert answer.status_code == 500
                    assert "no usable logits" in answer.json()["error"]["message"]
                else:
                    assert answer.json()["choices"][0]["token_ids"] == good["token_ids"]
        wait_for(served.idle)
        assert served.http.get("/health").status_code == 200


def broken(llm):
    """A step that fails while there is work."""
    real = llm.step

    def step():
        load = llm.load()
        return 1 / 0 if load.running + load.waiting else real()

    return step


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(caplog):
    llm = tiny_llm()
    with Served(llm) as served:
        step, llm.step = llm.step, broken(llm)
        for _ in range(2):
            answer = served.post(TEXT, **LONG)
            assert answer.status_code == 500
            assert "division by zero" in answer.json()["error"]["message"]
        llm.step = step
        assert served.post(TEXT, **LONG).status_code == 200
        assert served.http.get("/health").status_code == 200
        wait_for(served.idle)
    assert "a step failed" in caplog.text


def test_a_slow_capture_is_logged_with_its_seconds(caplog, monkeypatch):
    llm, others = tiny_llm(), [*progress._watchers]
    step = llm.step

    def slow():
        with progress.capturing():
            time.sleep(0.1)
        return step()

    with Served(llm) as served:
        llm.step = slow
        for limit in (0.02, 60.0):
            monkeypatch.setattr(progress, "SLOW_SECONDS", limit)
            served.post(TEXT, prompt="hello", max_tokens=1)
            wait_for(served.idle)
            if limit < 1:
                lines = caplog.text.count("first use took 0.1 s (--warm-graphs")
        assert caplog.text.count("first use took") == lines > 0
    assert progress._watchers == others


@pytest.mark.parametrize("num_failures", [1, 3])
def test_an_engine_that_fails_for_good_is_dead_and_says_so(caplog, num_failures):
    llm = tiny_llm()
    with Served(llm) as served:
        died = threading.Event()
        served.bridge.on_death = died.set
        # Either not even a step of nothing works, or every step of something fails.
        llm.step = (lambda: 1 / 0) if num_failures == 1 else broken(llm)
        for _ in range(num_failures):
            assert not died.is_set()
            assert served.post(TEXT, **LONG).status_code == 500
        assert died.wait(5)
        assert served.post(TEXT, **LONG).status_code == 503
        assert served.http.get("/health").status_code == 503
        assert served.metric("eyas_engine_up") == 0
    assert "the engine has stopped" in caplog.text


def test_a_port_in_use_is_an_error_of_the_user(capsys):
    from eyas.core.errors import ConfigError
    from eyas.server.run import listen

    first = listen("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match="--port"):
            listen("127.0.0.1", first.getsockname()[1])
    finally:
        first.close()
    with pytest.raises(ConfigError, match="--host"):
        listen("no.such.host.invalid", 0)


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    from eyas.cli.main import main

    monkeypatch.delitem(sys.modules, "eyas.server.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as left:
        main(["serve", "some/model"])
    assert left.value.code == 2
    assert "uvicorn is not installed: pip install 'eyas[serve]'" in capsys.readouterr().err


WORDS = (
    "serve some/model --head prompt_lookup -k 4 --port 1234 --api-key abc --max-num-seqs 3 "
    "--max-queue 5 --num-pages 50 --device cpu"
)


def test_the_command_passes_its_options(monkeypatch):
    from eyas.cli.main import main

    seen = {}

    def load(name, **options):
        seen["target"] = name
        return tiny_llm().target

    def serve(llms, settings, *, on_ready):
        seen.update(llms=llms, settings=settings)
        on_ready("http://x")
        return True

    monkeypatch.setattr("eyas.targets.load.load_target", load)
    monkeypatch.setattr("eyas.server.run.serve", serve)
    with pytest.raises(SystemExit) as left:
        main(WORDS.split())
    assert left.value.code in (0, None)
    assert seen["target"] == "some/model"
    assert (seen["llms"][0].num_draft_tokens, seen["llms"][0].max_num_seqs) == (4, 3)
    settings = seen["settings"]
    assert (settings.port, settings.api_key, settings.max_queue, settings.host) == (
        1234,
        "abc",
        5,
        "127.0.0.1",
    )
