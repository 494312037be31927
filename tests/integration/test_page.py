"""The page in a real Chromium against a live server: type, stream, race, stop, by keyboard and mouse."""

import re
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from browser import Browser, find_chromium
from served import Served, tiny_llm, wait_for

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium found: install one, or name it in EYAS_CHROMIUM"
)
ENTER, ESCAPE, TAB, RIGHT = ("Enter", 13, "\r"), ("Escape", 27), ("Tab", 9), ("ArrowRight", 39)


class Unhurried:
    """Steps that take a while, so that there is something to stop."""

    def __init__(self, llm):
        self._step, self.seconds = llm.step, 0.0
        llm.step = self

    def __call__(self):
        time.sleep(self.seconds)
        return self._step()


@pytest.fixture(scope="module")
def served():
    llms = [tiny_llm(drafter="self", num_draft_tokens=4), tiny_llm(drafter="eagle3"), tiny_llm(drafter=None)]
    paces = [Unhurried(llm) for llm in llms]
    with Served(llms) as running:
        running.paces = paces
        yield running


@pytest.fixture(scope="module")
def browser():
    with Browser(CHROMIUM) as running:
        yield running


@pytest.fixture
def page(served, browser):
    for pace in served.paces:
        pace.seconds = 0.0
    browser.open(served.url)
    browser.wait("document.getElementById('model').textContent === 'tiny-llama'")
    browser.js("document.getElementById('max-tokens').value = 60")
    browser.js("document.getElementById('prompt').value = 'hello'")  # this tokenizer knows no capitals
    yield browser
    wait_for(served.idle)
    assert browser.problems == []


def test_the_page_asks_nothing_of_others(served):
    answer = served.http.get("/")
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)
    assert len(files) == 2
    seen = set()
    while files:
        name = files.pop()
        seen.add(name)
        text = served.http.get(f"/{name}").raise_for_status().text
        assert not re.search(r"https?:|//\w+\.\w+/", text), name
        files += [
            f"page/{one}" for one in re.findall(r'from "\./([^"]+)"', text) if f"page/{one}" not in seen
        ]
    assert len(seen) == 7
    assert served.http.get("/page/../app.py").status_code == 404


@needs_chromium
def test_an_answer_streams_in_the_colours_of_its_tokens(served, page):
    page.click("#message")
    page.type("hello")
    page.key(*ENTER)
    page.wait("document.querySelector('.assistant')?.dataset.reason")
    asked = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 60}
    whole = served.post("/v1/chat/completions", **asked, return_token_ids=True).json()
    choice = whole["choices"][0]
    assert page.text(".assistant") == choice["message"]["content"]
    depths = page.js(
        "[...document.querySelectorAll('.assistant .token')].map((e) => e.className.match(/\\d+/)[0])"
    )
    assert {int(depth) for depth in depths} == set(choice["origins"]) == {0, 1, 2, 3, 4}
    assert page.js("document.querySelector('.assistant .depth-2').title") == "drafted, accepted at depth 2"
    speculation = whole["usage"]["speculation"]
    assert page.text("[data-meter=tokens]") == str(whole["usage"]["completion_tokens"])
    assert page.text("[data-meter=steps]") == str(speculation["steps"])
    length = 1 + speculation["accepted_tokens"] / speculation["draft_steps"]
    assert speculation["acceptance_length"] == pytest.approx(length, abs=1e-4)
    assert float(page.text("[data-meter=al]")) == pytest.approx(length, abs=0.006)
    assert float(page.text("[data-meter=speed]")) > 0
    assert page.js("document.activeElement.id") == "message", "one can go on typing"


@needs_chromium
def test_text_comes_while_it_is_written_and_escape_stops_it(served, page):
    served.paces[0].seconds = 0.05
    page.js("document.getElementById('max-tokens').value = 240")
    page.click("#message")
    page.type("hello")
    page.key(*ENTER)
    page.wait("document.querySelectorAll('.assistant .token').length > 3")
    assert page.js("!document.getElementById('stop').disabled && document.getElementById('send').disabled")
    wait_for(lambda: served.bridge.load.running == 1)
    page.key(*ESCAPE)
    page.wait("document.querySelector('.assistant').dataset.reason === 'stopped'")
    wait_for(served.idle)
    assert page.js("document.getElementById('error').hidden")


@needs_chromium
def test_the_next_message_takes_the_conversation_along(served, page):
    for count, text in enumerate(("ab", "cd"), start=1):
        page.click("#message")
        page.type(text)
        page.click("#send")
        page.wait(f"document.querySelectorAll('.assistant[data-reason]').length === {count}")
    first, second = page.js("[...document.querySelectorAll('.assistant')].map((e) => e.textContent)")
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "cd"},
    ]
    whole = served.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=60).json()
    assert second == whole["choices"][0]["message"]["content"]


@needs_chromium
def test_a_race_by_keyboard(served, page):
    page.js("document.getElementById('tab-chat').focus()")
    page.key(*RIGHT)
    assert page.js("document.activeElement.id") == "tab-race"
    assert page.js("document.getElementById('chat').hidden && !document.getElementById('race').hidden")
    # A pass, not a click, leads to the button.
    for _ in range(12):
        if page.js("document.activeElement.id") == "start":
            break
        page.key(*TAB)
    assert page.js("document.activeElement.id") == "start"
    page.key(*ENTER)
    page.wait("document.querySelectorAll('.column[data-reason]').length === 3")
    methods = page.js("[...document.querySelectorAll('.column')].map((e) => e.dataset.method)")
    assert methods == ["small_model", "eagle3", "plain"]
    texts = page.js("[...document.querySelectorAll('.column .text')].map((e) => e.textContent)")
    assert len(set(texts)) == 1
    assert texts[0]
    ranks = page.js("[...document.querySelectorAll('.column h2')].map((e) => Number(e.textContent[0]))")
    assert sorted(ranks) == [1, 2, 3]
    assert page.js("document.querySelectorAll('.column.won').length") == 1
    assert page.js("document.querySelector('.column.won h2').textContent[0]") == "1"
    assert page.text("#race-note").startswith("All wrote the same text")
    al = page.js(
        "[...document.querySelectorAll('.column [data-meter=al]')].map((e) => Number(e.textContent))"
    )
    assert al[0] > al[2] == 1
    assert page.js("document.querySelectorAll('.column .depth-1').length") > 0


@needs_chromium
def test_a_race_is_stopped(served, page):
    for pace in served.paces:
        pace.seconds = 0.03
    page.js("document.getElementById('max-tokens').value = 240")
    page.click("#tab-race")
    page.click("#start")
    page.wait("[...document.querySelectorAll('.column')].every((e) => e.querySelector('.token'))")
    page.wait("document.querySelectorAll('.column').length === 3")
    page.click("#race-stop")
    page.wait("document.querySelectorAll('.column[data-reason=stopped]').length === 3")
    wait_for(served.idle)


@needs_chromium
def test_sliders_follow_the_methods_and_reach_the_engine(served, page):
    state = (
        "(({ k, tree }) => [k.max, k.disabled, tree.disabled])(document.getElementById('settings').elements)"
    )
    assert page.js(state) == ["4", False, True]
    page.js("document.getElementById('k').focus()")
    for _ in range(3):
        page.key("ArrowLeft", 37)
    assert page.text("#k-value") == "1"
    page.click("#message")
    page.type("hello")
    page.key(*ENTER)
    page.wait("document.querySelector('.assistant')?.dataset.reason")
    depths = page.js("[...document.querySelectorAll('.assistant .token')].map((e) => e.className)")
    assert set(depths) == {"token depth-0", "token depth-1"}
    page.js(
        "(({ method }) => { method.selectedIndex = 2; method.dispatchEvent(new Event('change')); })"
        "(document.getElementById('settings').elements)"
    )
    assert page.js(state) == ["0", True, True]
    page.click("#clear")
    page.click("#message")
    page.type("hello")
    page.key(*ENTER)
    page.wait("document.querySelector('.assistant')?.dataset.reason")
    assert page.js("document.querySelectorAll('.assistant .token:not(.depth-0)').length") == 0


@needs_chromium
def test_errors_are_said(served, page):
    page.click("#message")
    page.type("a" * 300)
    page.key(*ENTER)
    page.wait("!document.getElementById('error').hidden")
    assert "max_model_len=256" in page.text("#error")
    assert page.js("document.querySelectorAll('.assistant').length") == 0
    page.problems[:] = [one for one in page.problems if "400" not in one]  # the browser logs the answer


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_have_contrast(page, scheme):
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.click("#message")
    page.type("hello")
    page.key(*ENTER)
    page.wait("document.querySelector('.assistant')?.dataset.reason")
    pairs = page.js(
        "[...document.querySelectorAll('body, .token, #model, button')].map((e) => {"
        " let b = e; while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        " return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; })"
    )
    page.command("Emulation.setEmulatedMedia", features=[])
    grounds = {ground for _, ground in pairs}
    assert len(grounds) >= 6
    for ink, ground in pairs:
        assert contrast(ink, ground) > 4.5, (ink, ground)


def contrast(first, second):
    """WCAG's ratio of two CSS colours."""

    def luminance(colour):
        parts = [float(one) / 255 for one in re.findall(r"[\d.]+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@needs_chromium
def test_where_the_api_asks_for_a_key_the_page_does(browser):
    with Served(tiny_llm(drafter=None), api_key="s3cret") as served:
        browser.open(served.url)
        browser.wait("!document.getElementById('key-field').hidden")
        browser.js("document.getElementById('key').focus()")
        browser.type("s3cret")
        browser.key(*ENTER)
        browser.wait("document.getElementById('model').textContent === 'tiny-llama'")
        assert browser.js("document.getElementById('error').hidden")
        browser.problems.clear()  # the 401 is logged by the browser
