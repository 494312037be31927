"""Prompts that a target writes: against what the engine was seen to sample, and kills against one run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from toy_tokenizer import CHATML, END, toy_tokenizer

from eyas.core.errors import DataError
from eyas.data.prompts import Pace, PromptsConfig, write_prompts
from eyas.data.sources import Prompt, read_prompts
from eyas.data.template import ChatTemplate
from eyas.engine.llm import LLM
from tiny import tiny_target

TOKENIZER = toy_tokenizer()
BROKEN = TOKENIZER.convert_tokens_to_ids("\u00ff")
BIRDS = "Where do birds sleep in winter, and why there?"
OPENING = "<|im_start|>user\n"


def tokens(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(texts, *, log=None):
    """The draw with the k-th seed says texts[k]; a pair is (text, reason), and ids go as they are."""
    numbers = {}

    def generate(prompts, params):
        for param in params:
            numbers.setdefault(param.seed, len(numbers))
        # Out of order, as a batch engine finishes.
        for index in reversed(range(len(prompts))):
            said = texts[numbers[params[index].seed] % len(texts)]
            text, reason = said if isinstance(said, tuple) else (said, "stop")
            ids = list(text) if isinstance(text, list) else tokens(text)
            if log is not None:
                log.append((prompts[index], params[index]))
            yield index, [*ids, END] if reason == "stop" else ids, reason

    return generate


def write(
    out,
    generate,
    count,
    *,
    excluded=None,
    window=1000,
    shard_size=3,
    max_draws=1000,
    template=CHATML,
    **config,
):
    return write_prompts(
        count,
        ChatTemplate(toy_tokenizer(template), (END,)),
        generate,
        out,
        PromptsConfig(**({"min_tokens": 2} | config)),
        Pace(max_draws=max_draws, shard_size=shard_size, window=window),
        about={"target": "toy"},
        excluded=excluded,
    )


def kept(out):
    return [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]


def test_texts_are_judged_in_the_order_of_their_draws(tmp_path):
    texts = [
        BIRDS,
        ("never ends", "length"),
        "where do birds sleep in Winter and why there",
        "x",
        ("", "error"),
        BIRDS.replace("?", " then?"),
        [*tokens("AB"), 1, *tokens("CD")],
        [BROKEN, BROKEN],
        "tell me " * 40,
        "How tall is a giraffe?",
        "   ",
    ]
    manifest = write(tmp_path, says(texts), 50, max_draws=len(texts))
    assert [r["prompt"] for r in kept(tmp_path)] == [texts[0], texts[9]]
    assert [r["id"] for r in kept(tmp_path)] == ["self-0-0", "self-0-9"]
    assert manifest["faults"] == {
        "alike": 1,
        "broken": 1,
        "cut_off": 1,
        "duplicate": 1,
        "failed": 1,
        "loop": 1,
        "short": 2,
        "special": 1,
    }
    assert manifest["num_draws"] == len(texts) == manifest["num_prompts"] + sum(manifest["faults"].values())
    # The end token of a text counts, as it was sampled.
    said = [t[0] if isinstance(t, tuple) else t for t in texts]
    sizes = [len(t) if isinstance(t, list) else len(t.encode()) for t in said]
    assert manifest["num_tokens"] == sum(sizes) + len(texts) - 2
    assert [p.turns for p in read_prompts(tmp_path / "prompts.jsonl")] == [(texts[0],), (texts[9],)]


def test_excluded_prompts_do_not_come_again(tmp_path):
    """In whole, in nearly the same words, or as a fifth of the text's runs of eight words."""
    bench = [
        Prompt("b", ("Write a haiku.", "Sum all numbers from one to one hundred and tell me how you did it"))
    ]
    long = "Please help: sum all numbers from one to one hundred and " + "or " * 5
    texts = [
        "write a haiku",
        "Write a haiku about rain.",
        "Sum all numbers from one to one hundred and tell me how you did this",
        # 17 words, so ten runs of eight; two of them are the benchmark's: a fifth.
        long + "stop",
        # One more word, eleven runs: less than a fifth.
        long + "or stop",
    ]
    manifest = write(tmp_path, says(texts), 9, excluded=bench, max_draws=5)
    assert [r["prompt"] for r in kept(tmp_path)] == [texts[1], texts[4]]
    assert manifest["faults"] == {"excluded": 3}
    with pytest.raises(DataError, match="excluded differ"):
        write(tmp_path, says(texts), 9, max_draws=5)


def test_every_draw_has_its_own_seed_and_the_bare_template(tmp_path):
    log = []
    write(tmp_path, says(["ok then"], log=log), 9, max_draws=400, temperatures={0.5: 1, 1.0: 3})
    assert {tuple(ids) for ids, _ in log} == {tuple(tokens(OPENING))}
    assert len({params.seed for _, params in log}) == 400
    assert all(params.stop_token_ids == (END,) for _, params in log)
    # 3/4 of 400 = 300, sigma 8.7.
    assert 250 < sum(params.temperature == 1.0 for _, params in log) < 350


def test_system_messages_are_taken_in_turn(tmp_path):
    log, texts = [], [f"text number {word}" for word in ("one", "two", "three", "four")]
    systems = ("Be brief.", "Rhyme.")
    for keep in (False, True):
        write(tmp_path / str(keep), says(texts, log=log), 4, max_draws=4, systems=systems, keep_system=keep)
    assert [TOKENIZER.decode(ids) for ids, _ in log[3::-1]] == [
        f"<|im_start|>system\n{text}<|im_end|>\n{OPENING}" for text in systems * 2
    ]
    plain, whole = kept(tmp_path / "False"), kept(tmp_path / "True")
    assert [r["prompt"] for r in plain] == texts
    assert [p.system for p in read_prompts(tmp_path / "True" / "prompts.jsonl")] == list(systems * 2)
    assert [r["messages"][1]["content"] for r in whole] == texts
    mute = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    with pytest.raises(DataError, match="shows no system message"):
        write(tmp_path / "mute", says(texts), 4, systems=systems, template=mute)


def test_only_as_many_as_asked_for_and_more_later(tmp_path):
    texts = [f"this is the {word} text of all" for word in ("1st", "2nd", "3rd", "4th", "5th", "6th")]
    assert write(tmp_path / "a", says(texts), 2)["num_draws"] == 2
    assert [r["prompt"] for r in kept(tmp_path / "a")] == texts[:2]
    write(tmp_path / "whole", says(texts), 5)
    # Draws 2 .. of the continued run: the generator counts from its first one.
    write(tmp_path / "a", says(texts[2:]), 5)
    assert kept(tmp_path / "a") == kept(tmp_path / "whole")
    assert write(tmp_path / "a", says([]), 3)["num_prompts"] == 3
    assert kept(tmp_path / "a") == kept(tmp_path / "whole")[:3]


def test_a_missing_shard_and_another_run_are_refused(tmp_path):
    texts = [f"text number {number}" for number in range(9)]
    write(tmp_path, says(texts), 9, alike=1.0)
    with pytest.raises(DataError, match="another run"):
        write(tmp_path, says(texts), 9, alike=1.0, seed=1)
    (tmp_path / "draws-00001.json").unlink()
    with pytest.raises(DataError, match=r"draws-00002\.json: begins at draw 6, not at 3"):
        write(tmp_path, says(texts), 9, alike=1.0)


@pytest.fixture(scope="module")
def llm():
    target = tiny_target(vocab_size=len(TOKENIZER), eos_token_ids=(END,))
    return LLM(target, max_num_seqs=6, max_model_len=96, device="cpu")


# A random target says anything; these make it say letters, and end now and then.
LETTERS = dict.fromkeys(tokens("abcdefghijklmno "), 5.0) | {END: 6.0}
SETTINGS = {"temperatures": {1.0: 1, 1.5: 1}, "max_tokens": 12, "alike": 0.9}


def sampled(llm, log=None, delay=0.0):
    def generate(prompts, params):
        biased = [replace(param, logit_bias=LETTERS) for param in params]
        for index, ids, reason in llm.iterate_ids(prompts, biased):
            time.sleep(delay)
            if log is not None:
                log[params[index].seed] = prompts[index], biased[index], list(ids), reason
            yield index, ids, reason

    return generate


def test_every_prompt_is_what_the_engine_samples_alone(tmp_path, llm):
    log = {}
    manifest = write(tmp_path, sampled(llm, log), 12, **SETTINGS)
    records = kept(tmp_path)
    assert len(records) == 12
    assert manifest["faults"]["cut_off"] > 0
    texts = {TOKENIZER.decode(ids[:-1]): (params, ids) for _, params, ids, _ in log.values()}
    for record in records:
        params, ids = texts[record["prompt"]]
        # By itself, from the opening typed by hand: the same ids, with one end of turn.
        (alone,) = llm.generate_ids([tokens(OPENING)], params)
        assert alone == ids
        assert ids.index(END) == len(ids) - 1
        assert tokens(record["prompt"]) == ids[:-1]
        assert params.temperature == record["temperature"]
    assert len({r["prompt"] for r in records}) == 12


def test_an_interrupted_run_goes_on_to_the_same_file(tmp_path, llm):
    write(tmp_path / "whole", sampled(llm), 12, **SETTINGS)

    def dies(prompts, params):
        for number, item in enumerate(sampled(llm)(prompts, params)):
            if number == 9:
                raise KeyboardInterrupt
            yield item

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "parts", dies, 12, **SETTINGS)
    assert 0 < len(kept(tmp_path / "parts")) < 12
    manifest = write(tmp_path / "parts", sampled(llm), 12, **SETTINGS)
    assert (tmp_path / "parts" / "prompts.jsonl").read_bytes() == (
        tmp_path / "whole" / "prompts.jsonl"
    ).read_bytes()
    whole = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    for name in ("num_draws", "faults", "num_tokens", "sha256"):
        assert manifest[name] == whole[name]


CHILD = """
import sys
sys.path[:0] = {paths!r}
import test_prompts as t
llm = t.LLM(
    t.tiny_target(vocab_size=len(t.TOKENIZER), eos_token_ids=(t.END,)),
    max_num_seqs=6, max_model_len=96, device="cpu",
)
t.write(t.Path({out!r}), t.sampled(llm, delay=0.05), 30, **t.SETTINGS)
"""


@pytest.mark.slow
def test_a_run_killed_with_signal_9_goes_on_to_the_same_file(tmp_path, llm):
    here = Path(__file__).parent
    code = CHILD.format(paths=[str(here), str(here.parents[1])], out=str(tmp_path / "parts"))
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((tmp_path / "parts").glob("draws-*.json"))) < 3:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "parts" / "prompts.jsonl").exists()
    write(tmp_path / "parts", sampled(llm), 30, **SETTINGS)
    write(tmp_path / "whole", sampled(llm), 30, **SETTINGS)
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    assert len(kept(tmp_path / "whole")) == 30
