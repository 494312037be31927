"""T = 0 on a real model and real text: any drafter, any K, any batch, the same tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.core.sampling import SamplingParams
from eyas.drafters.small_model.propose import SmallModelDrafter
from eyas.engine.llm import LLM
from eyas.kernels.reference.random import uniform
from eyas.targets.decoder import Decoder
from eyas.targets.load import load_target

pytestmark = [pytest.mark.model, pytest.mark.slow]

HEADS = sorted(path.parent for path in Path(__file__).parents[2].glob("heads/smollm2-135m-*/config.json"))
QUESTIONS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Describe a lighthouse at night.",
    "What is 12345 + 678?",
    "Translate to German: The weather is nice today.",
    "List the first 10 prime numbers: 2, 3, 5,",
    "Who wrote Romeo and Juliet, and when?",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target(smollm2_path):
    return load_target(smollm2_path)


def small_model(target, num_drafts):
    """A smaller model of the target's family: its first 22 layers, which often say the same already."""
    config = replace(target.config, num_layers=22)
    with torch.device("meta"):
        small = Decoder(config)
    whole = target.decoder
    small.embed_tokens, small.norm, small.rotary = whole.embed_tokens, whole.norm, whole.rotary
    small.layers = nn.ModuleList(list(whole.layers)[: config.num_layers])
    small._packed_head = whole._packed_head
    return SmallModelDrafter(
        small,
        num_drafts,
        small_vocab_size=config.vocab_size,
        vocab_size=config.vocab_size,
        device=target.device,
        sample_drafts=False,
        uniform=uniform,
    )


def engine(target, drafter, num_drafts=None):
    if drafter == "small_model":
        drafter, num_drafts = small_model(target, num_drafts), None
    return LLM(target, drafter, num_draft_tokens=num_drafts, max_model_len=256, max_num_seqs=8)


def answers(llm, questions=QUESTIONS, num_tokens=NUM_TOKENS):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


@pytest.fixture(scope="module")
def plain(target):
    return answers(engine(target, None))


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize(
    "drafter", ["prompt_lookup", "small_model", *HEADS], ids=lambda drafter: Path(drafter).name
)
def test_real_answers_stay_the_same(target, plain, drafter, num_drafts):
    llm = engine(target, drafter, num_drafts)
    # K forwards of nearly the target's cost a step.
    num_tokens = 10 if drafter == "small_model" else NUM_TOKENS

    assert [ids for ids, _ in answers(llm, num_tokens=num_tokens)] == [ids[:num_tokens] for ids, _ in plain]
    assert llm.stats.acceptance_length > 1.05


@pytest.mark.parametrize(
    "drafter", ["prompt_lookup", "small_model", *HEADS], ids=lambda drafter: Path(drafter).name
)
def test_batches_of_one_to_seven(target, plain, drafter):
    """The first tokens of plain decoding's answers in a batch of eight, whatever the batch is now."""
    llm = engine(target, drafter, 3)
    for count in range(1, 8):
        chosen = [(count + i) % 8 for i in range(count)]
        found = answers(llm, [QUESTIONS[i] for i in chosen], 6)
        assert [ids for ids, _ in found] == [plain[i][0][:6] for i in chosen]
