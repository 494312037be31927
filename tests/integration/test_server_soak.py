"""Soak: many requests with random parameters at once, a third of them cancelled at random moments.

Afterwards no page is lost and nothing runs. Every answer that was read to its end equals its solo run
(greedy, or sampled with a seed: neighbours never matter); what a cancelled client had read is a prefix of it.
"""

import asyncio
import gc
import json
import random
from pathlib import Path

import httpx
import pytest

from eyas.core.sampling import SamplingParams

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from served import TEXT, Served, tiny_llm, wait_for


def random_request(rng):
    """A body."""
    prompt = [rng.randrange(2, 64) for _ in range(rng.choice([1, 3, 9, 30]))] if rng.random() < 0.5 else None
    body = {
        "prompt": prompt or "".join(rng.choices("abcdefgh", k=rng.choice([1, 4, 20]))),
        "max_tokens": rng.choice([1, 5, 20, 60]),
        "temperature": 0,
        "return_token_ids": True,
    }
    if rng.random() < 0.4:
        body |= {"temperature": rng.choice([0.7, 1.3]), "seed": rng.randrange(100)}
        body |= rng.choice([{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}])
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["a", "bc", " d", "zz"], k=2)
    if rng.random() < 0.2:
        body |= rng.choice(
            [{"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}]
        )
    if rng.random() < 0.2:
        body["logit_bias"] = {"30": 3, "9": -100}
    if rng.random() < 0.2:
        body |= {"min_tokens": min(3, body["max_tokens"])}
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.2:
        body["logprobs"] = 1
    if rng.random() < 0.2:
        body["n"] = 2
    return body


def solo(llm, body):
    """(text, token ids, finish reason) of each choice, from an engine that runs nothing else."""
    params = {name: value for name, value in body.items() if name not in ("prompt", "return_token_ids")}
    params["logit_bias"] = {int(key): value for key, value in params.get("logit_bias", {}).items()}
    (output,) = llm.generate([body["prompt"]], SamplingParams(**params))
    return [(one.text, one.token_ids, one.finish_reason) for one in output.outputs]


async def read_stream(http, body, patience):
    """Choices as they came, and whether the end was seen; hangs up after `patience` events."""
    choices = [["", [], None] for _ in range(body.get("n", 1))]
    async with http.stream("POST", TEXT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return choices, True
            if line:
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                mine = choices[choice["index"]]
                mine[0] += choice["text"]
                mine[1] += choice["token_ids"]
                mine[2] = choice["finish_reason"]
                if patience is not None:
                    patience -= 1
                    if patience < 0:
                        return choices, False
    raise AssertionError("the stream ended without its end mark")


async def read_whole(http, body, patience):
    """As read_stream; hangs up after `patience` hundredths of a second."""
    seconds = 60 if patience is None else 0.01 * patience
    try:
        response = await http.post(TEXT, json=body, timeout=httpx.Timeout(60, read=seconds))
    except httpx.ReadTimeout:
        assert patience is not None
        return None, False
    assert response.status_code == 200, response.text
    return [[c["text"], c["token_ids"], c["finish_reason"]] for c in response.json()["choices"]], True


async def client(served, jobs, done):
    async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as http:
        while jobs:
            body, stream, patience = jobs.pop()
            read = read_stream if stream else read_whole
            done.append((body, *await read(http, body, patience)))


async def run_all(served, jobs, concurrency, done):
    await asyncio.gather(*(client(served, jobs, done) for _ in range(concurrency)))


def soak(num_requests, num_bodies, concurrency):
    rng = random.Random(num_requests)
    bodies = [random_request(rng) for _ in range(num_bodies)]
    jobs = []
    for _ in range(num_requests):
        patience = rng.randrange(12) if rng.random() < 1 / 3 else None
        jobs.append((rng.choice(bodies), rng.random() < 0.6, patience))
    # A drafter that is right at temperature 0 makes long runs, to be cut by stops and lengths; pages for one
    # request of full length are too few for all that run, so that some are preempted.
    llm = tiny_llm(drafter="self", max_num_seqs=12, num_pages=33)
    done = []
    memory = []
    with Served(llm, max_queue=10_000) as served:
        while jobs:
            part, jobs = jobs[:500], jobs[500:]
            asyncio.run(run_all(served, part, concurrency, done))
            gc.collect()
            memory.append(resident_bytes())
        wait_for(served.idle)
        assert served.http.get("/health").json() == {"status": "ok"}
        assert not served.bridge._owners
        assert not served.bridge._feeds
        assert not llm._live
        assert served.bridge.num_live == 0
    llm._runner.scheduler.check_integrity()
    assert len(done) == num_requests
    assert llm.stats.prefix_hits > 0
    plain = tiny_llm(drafter=None, max_num_seqs=2, prefix_caching=False)
    known, complete = {}, 0
    for body, choices, ended in done:
        key = json.dumps(body, sort_keys=True)
        if key not in known:
            known[key] = solo(plain, body)
        if ended:
            complete += 1
            assert [tuple(choice) for choice in choices] == known[key], body
        elif choices is not None:
            for (text, ids, _), (whole_text, whole_ids, _) in zip(choices, known[key], strict=True):
                assert whole_text.startswith(text), body
                assert whole_ids[: len(ids)] == ids, body
    return llm, complete, memory


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_two_hundred_requests_sixteen_at_once():
    llm, complete, _ = soak(200, 60, 16)
    assert complete > 100
    assert llm.stats.preemptions > 0
    assert llm.stats.acceptance_length > 1.5


@pytest.mark.slow
@pytest.mark.soak
def test_five_thousand_requests_thirty_two_at_once():
    llm, complete, memory = soak(5000, 400, 32)
    assert complete > 2500
    assert llm.stats.preemptions > 0
    # The first parts warm caches up; after them memory stays where it is.
    assert memory[-1] - memory[2] < 32 << 20, [size >> 20 for size in memory]
