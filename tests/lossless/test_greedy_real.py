"""T = 0 on a real model and real text: any drafter, the same tokens. Needs `eyas models get smollm2-135m`."""

from pathlib import Path

import pytest

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from eyas.targets.load import load_target

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = Path.home() / ".cache/eyas/models/SmolLM2-135M-Instruct.Q4_1.gguf"
HEADS = sorted(path.parent for path in Path(__file__).parents[2].glob("heads/*/config.json"))
QUESTIONS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Describe a lighthouse at night.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def target():
    if not MODEL.is_file():
        pytest.skip("no model: run `eyas models get smollm2-135m`")
    return load_target(MODEL)


def answers(target, drafter, num_drafts=None):
    llm = LLM(target, drafter, num_draft_tokens=num_drafts, max_model_len=512)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY)
    return llm, [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


@pytest.fixture(scope="module")
def plain(target):
    return answers(target, None)[1]


@pytest.mark.parametrize("num_drafts", [3, 7])
@pytest.mark.parametrize("drafter", ["prompt_lookup", *HEADS], ids=lambda drafter: Path(drafter).name)
def test_real_answers_stay_the_same(target, plain, drafter, num_drafts):
    llm, drafted = answers(target, drafter, num_drafts)

    assert drafted == plain
    assert llm.stats.acceptance_length > 1.05
