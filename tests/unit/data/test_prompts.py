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
from toy_tokenizer import END, toy_tokenizer

from eyas.core.errors import DataError
from eyas.data.prompts import Pace, PromptsConfig, write_prompts
from eyas.data.sources import Prompt, read_prompts
from eyas.data.template import ChatTemplate
from eyas.engine.llm import LLM
from tiny import tiny_target

BROKEN = toy_tokenizer().convert_tokens_to_ids("\u00ff")
OPENING = "<|im_start|>user\n"


def toy_template():
    return ChatTemplate(toy_tokenizer(), (END,))


def says(texts, *, log=None, backwards=True):
    """Draw i says texts[i]; a pair is (text, reason), and ids go as they are."""
    tokenizer = toy_tokenizer()

    def generate(prompts, params):
        order = range(len(prompts))
        for index in reversed(order) if backwards else order:
            number = index + generate.first
            said = texts[number % len(texts)]
            text, reason = said if isinstance(said, tuple) else (said, "stop")
            ids = list(text) if isinstance(text, list) else tokenizer.encode(text, add_special_tokens=False)
            if log is not None:
                log.append((number, prompts[index], params[index]))
            yield index, ids if reason != "stop" else [*ids, END], reason

    generate.first = 0
    return generate


def write(out, generate, count, *, excluded=None, window=1000, shard_size=3, max_draws=1000, **config):
    return write_prompts(
        count,
        toy_template(),
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
        "Where do birds sleep in winter, and why there?",
        ("never ends", "length"),
        "where do birds sleep in Winter and why there",
        "x",
        ("", "error"),
        "Where do birds sleep in winter, and why there then?",
        [*b"AB", 1, *b"CD"],
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
