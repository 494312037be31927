"""SIGTERM in a process of its own: running requests end, new ones are not taken, and not for ever."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from eyas.core.sampling import SamplingParams

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from served import LONG, TEXT, tiny_llm, wait_for

TESTS = Path(__file__).parents[1]

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from eyas.server.run import serve
from eyas.server.settings import ServerSettings
from served import tiny_llm
llm = tiny_llm()
step = llm.step
def slowly():
    time.sleep({pause})
    return step()
llm.step = slowly
settings = ServerSettings(port=0, drain_seconds={drain})
sys.exit(not serve(llm, settings, on_ready=lambda url: print(url, flush=True)))
"""


def start(drain, pause):
    code = textwrap.dedent(PROGRAM.format(tests=str(TESTS), drain=drain, pause=pause))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones():
    process, url = start(30, 0.02)
    try:
        text, last = "", None
        with httpx.stream(
            "POST", url + TEXT, json={**LONG, "stream": True}, timeout=30, trust_env=False
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))["choices"][0]
                    if not text:
                        process.send_signal(signal.SIGTERM)
                        wait_for(lambda: refuses(url))
                    text += last["text"]
        assert last["finish_reason"] == "length"
        want = tiny_llm(drafter=None).generate(
            ["hello"], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        )
        assert text == want[0].outputs[0].text
        assert process.wait(20) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_draining_ends_after_its_time():
    process, url = start(0.1, 0.3)
    try:
        with httpx.stream(
            "POST", url + TEXT, json={**LONG, "stream": True, "n": 4}, timeout=30, trust_env=False
        ) as response:
            lines = response.iter_lines()
            next(lines)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - begin < 15, "the answers need a minute"
    finally:
        process.kill()
        process.communicate()


def refuses(url):
    try:
        httpx.get(url + "/health", timeout=2, trust_env=False)
    except httpx.TransportError:
        return True
    return False
