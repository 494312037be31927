"""Load as `vllm bench serve` makes it: an open loop of streams, then the speculative counters of /metrics.

The client is plain httpx; its reading of streams and counters follows what that tool expects of a server.
"""

import asyncio
import json
import random
import re
import time

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from served import CHAT, NAME, TEXT, Served, tiny_llm, wait_for


def spec_counters(http):
    """(drafts, draft tokens, accepted tokens, accepted by position), summed over label sets."""
    counts = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    by_position = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("vllm:spec_decode_"):
            continue
        value = int(float(line.split()[-1]))
        position = re.search(r'position="(\d+)"', line)
        if position:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0) + value
        else:
            counts[re.match(r"vllm:spec_decode_(\w+?)_total", line)[1]] += value
    return *counts.values(), [by_position[position] for position in sorted(by_position)]


async def one(http, path, number, results):
    rng = random.Random(number)
    body = {
        "model": NAME,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    prompt = "abcdefgh" * 3 + "".join(rng.choices("abcdefgh", k=10))
    wanted = rng.choice([4, 16, 40])
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}]}
        body |= {"max_completion_tokens": wanted}
    else:
        body |= {"prompt": prompt, "max_tokens": wanted, "logprobs": None, "repetition_penalty": 1.0}
    begin, first, usage, chunks = time.perf_counter(), None, None, 0
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            event = json.loads(data)
            if event["choices"]:
                choice = event["choices"][0]
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - begin
                    chunks += 1
            usage = event.get("usage") or usage
    results.append((wanted, first, time.perf_counter() - begin, usage, chunks))


async def open_loop(url, path, num_requests, rate):
    results, tasks, rng = [], [], random.Random(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as http:
        for number in range(num_requests):
            tasks.append(asyncio.create_task(one(http, path, number, results)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)
    return results


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_open_loop_of_streams(path):
    llm = tiny_llm(drafter="self", max_num_seqs=8)
    with Served(llm) as served:
        before = spec_counters(served.http)
        results = asyncio.run(open_loop(served.url, path, 40, rate=100.0))
        wait_for(served.idle)
        assert len(results) == 40
        for wanted, first, whole, usage, chunks in results:
            assert usage["completion_tokens"] == wanted
            assert usage["total_tokens"] == usage["prompt_tokens"] + wanted
            assert 0 < first <= whole
            assert 0 < chunks <= wanted
        own = [usage["speculation"] for *_, usage, _ in results]
        drafts, tokens, accepted, by_position = spec_counters(served.http)
        assert before[:3] == (0, 0, 0)
        assert tokens == sum(one["draft_tokens"] for one in own)
        assert accepted == sum(one["accepted_tokens"] for one in own) > 0
        assert by_position == [
            sum(one["accepted_by_depth"][depth] for one in own) for depth in range(len(by_position))
        ]
        assert 0 < drafts <= sum(one["steps"] for one in own)
        assert served.metric("vllm:prefix_cache_hits_total") == llm.stats.prefix_hits > 0
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for *_, usage, _ in results)
        assert cached == llm.stats.prefix_hits
        assert served.metric("eyas_time_to_first_token_seconds_count") == 40
        rate = served.metric("eyas_prefix_cache_hit_rate")
        assert rate == pytest.approx(llm.stats.prefix_hits / llm.stats.prefix_tokens)
