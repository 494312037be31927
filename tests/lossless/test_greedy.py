"""T = 0: with any drafter, the tokens are those of plain decoding, and those of a loop without any cache."""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from fakes import make_drafter, naive_greedy
from tiny import tiny_target

PROMPT_LENGTHS = (1, 2, 5, 19, 3, 11, 8, 33)
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAFTERS = (
    "silent",
    "oracle",
    "perfect",
    "wrong",
    "prompt_lookup",
    "eagle3",
    "peagle",
    "small_model",
    "self",
)


def prompts(count: int = 8) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS[:count]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    """What a loop of whole forwards says; 24 tokens for each of the 8 prompts."""
    return [naive_greedy(target, prompt, NUM_TOKENS) for prompt in prompts()]


def answers(expected: list[list[int]]) -> list[list[int]]:
    return [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]


def decode(target, drafter, count: int = 8, **options) -> LLM:
    llm = LLM(target, drafter, **{"max_model_len": 80, "page_size": 4, "num_pages": 200, **options})
    outputs = llm.generate(prompts(count), GREEDY)
    return llm, [output.outputs[0].token_ids for output in outputs]


def test_the_naive_loop_wanders(expected):
    """A target that repeats itself would make every comparison below easy."""
    assert min(len(set(tokens)) for tokens in expected) >= 8
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_plain_decoding_equals_the_naive_loop(target, expected, count):
    _, tokens = decode(target, None, count)

    assert tokens == expected[:count]


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_changes_nothing(target, expected, kind, num_drafts):
    llm, tokens = decode(target, make_drafter(kind, target, num_drafts, answers(expected)))

    assert tokens == expected
    length = llm.stats.acceptance_length
    if kind in {"silent", "wrong"}:
        assert length == 1.0
    if kind == "silent":
        assert llm.stats.drafted == 0
    if kind in {"perfect", "self"}:
        # 24 tokens in steps of K + 1; the first step has no drafts yet.
        draft_steps = -(-(NUM_TOKENS - 1) // (num_drafts + 1))
        assert llm.stats.drafted_row_steps == 8 * draft_steps
        assert llm.stats.tokens_per_forward == pytest.approx(NUM_TOKENS / (1 + draft_steps))
        # Where the last run is cut, its last token is a draft too.
        cut = (NUM_TOKENS - 1) % (num_drafts + 1) > 0
        assert length == pytest.approx(1 + (NUM_TOKENS - 1 - draft_steps + cut) / draft_steps)


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["oracle", "prompt_lookup", "eagle3", "peagle", "small_model"])
def test_batch_sizes(target, expected, kind, num_drafts):
    """Batches of 1 to 8 in one engine, of other prompts each time."""
    drafter = make_drafter(kind, target, num_drafts, answers(expected))
    llm = LLM(target, drafter, max_model_len=80, page_size=4, num_pages=200)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for count in range(1, 9):
        chosen = [(3 * count + i) % 8 for i in range(count)]
        outputs = llm.generate([prompts()[i] for i in chosen], params)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[i][:10] for i in chosen]


@pytest.mark.parametrize("page_size", [1, 3, 256])
@pytest.mark.parametrize("kind", ["oracle", "eagle3", "peagle", "small_model"])
def test_page_sizes(target, expected, kind, page_size):
    drafter = make_drafter(kind, target, 3, answers(expected))
    _, tokens = decode(target, drafter, page_size=page_size, num_pages=1000)

    assert tokens == expected


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "small_model", "spy"])
def test_chunked_prefill_beside_decoding(target, expected, kind, chunk):
    """Two rows for eight requests: requests join at any step, while others are in the middle of theirs."""
    drafter = make_drafter(kind, target, 3, answers(expected))
    _, tokens = decode(target, drafter, prefill_chunk=chunk, max_num_seqs=2)

    assert tokens == expected


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_the_drafter_sees_the_targets_features_shifted_by_one(target, expected, num_drafts):
    spy = make_drafter("spy", target, num_drafts, answers(expected))
    llm, tokens = decode(target, spy, prefill_chunk=6, max_num_seqs=3)

    assert tokens == expected
    # Every position but the last has been a draft row exactly once, and a preempted one again.
    assert spy.num_rows >= sum(len(answer) - 1 for answer in answers(expected))
    assert llm.stats.accepted > 0


@pytest.mark.parametrize("kind", ["oracle", "eagle3", "peagle", "small_model", "prompt_lookup", "spy"])
def test_preemption_with_drafts_in_flight(target, expected, kind):
    """33 + 24 tokens and a step's reserve need 16 pages; 20 pages for all eight requests force preemption."""
    drafter = make_drafter(kind, target, 3, answers(expected))
    llm, tokens = decode(target, drafter, num_pages=20)

    assert llm.stats.preemptions > 0
    assert tokens == expected


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["oracle", "eagle3"])
def test_families(family, kind):
    """Sliding windows, biases and q/k norms go through the paged cache too."""
    target = tiny_target(family)
    expected = [naive_greedy(target, prompt, NUM_TOKENS) for prompt in prompts(4)]
    _, tokens = decode(target, make_drafter(kind, target, 3, answers_of(prompts(4), expected)), 4)

    assert tokens == expected


def answers_of(some_prompts, expected):
    return [prompt + tokens for prompt, tokens in zip(some_prompts, expected, strict=True)]


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["perfect", "oracle", "eagle3", "peagle", "small_model"])
def test_context_limit_inside_a_run(target, expected, kind, num_drafts):
    """Every position from which a run may cross the limit; tokens up to it are the same ones."""
    drafter = make_drafter(kind, target, num_drafts, answers(expected))
    prompt = prompts()[3]
    for limit in [len(prompt) + more for more in (1, 2, 3, 5, 8, 13, 21)]:
        llm = LLM(target, drafter, max_model_len=limit, page_size=4)
        (output,) = llm.generate([prompt], GREEDY)
        completion = output.outputs[0]
        assert completion.token_ids == expected[3][: limit - len(prompt)]
        assert completion.finish_reason == "length"
