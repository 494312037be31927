"""T > 0 with point-mass drafts: the very tokens of plain decoding for the same seed, whoever is in the batch.

Greedy in the file's name stands for the drafts: argmaxes and look-ups, verified by equality of choices.
"""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from fakes import make_drafter, small_model
from tiny import tiny_target

NUM_TOKENS = 20


def sampled(seed: int, **options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    )


PARAMS = [
    sampled(1),
    sampled(2, temperature=1.3, top_k=20),
    sampled(3, top_p=0.8),
    sampled(4, temperature=0.0),
    sampled(5, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2),
    sampled(6, min_p=0.05, logit_bias={3: 4.0, 9: -100.0}),
    sampled(7, min_tokens=10, stop_token_ids=(5, 6, 7, 8, 9, 10), ignore_eos=False),
    sampled(-(2**70), temperature=0.3),
]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (1, 2, 5, 19, 3, 11, 8, 33)]


def decode(target, drafter, prompts, params, **options):
    llm = LLM(target, drafter, **{"max_model_len": 80, "page_size": 4, "num_pages": 200, **options})
    outputs = llm.generate(prompts, params)
    return llm, [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return decode(target, None, prompts, PARAMS)[1]


def test_seeds_matter(target, prompts, plain):
    other = [sampled(100 + i) for i in range(8)]
    tokens = decode(target, None, prompts, other)[1]
    assert all(mine != yours for mine, yours in zip(plain, tokens, strict=True))
    assert decode(target, None, prompts, PARAMS)[1] == plain


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize(
    "kind", ["silent", "oracle", "wrong", "prompt_lookup", "eagle3", "peagle", "small_model"]
)
def test_point_mass_drafts_change_nothing(target, prompts, plain, kind, num_drafts):
    answers = [prompt + tokens for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    llm, tokens = decode(target, make_drafter(kind, target, num_drafts, answers), prompts, PARAMS)

    assert tokens == plain
    if kind == "oracle":
        assert llm.stats.accepted > 20


@pytest.mark.parametrize("kind", [None, "oracle", "eagle3"])
def test_alone_and_among_seven_others(target, prompts, plain, kind):
    answers = [prompt + tokens for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    for index in range(8):
        drafter = None if kind is None else make_drafter(kind, target, 3, answers)
        _, alone = decode(target, drafter, [prompts[index]], [PARAMS[index]])
        assert alone == [plain[index]]


@pytest.mark.parametrize("kind", ["oracle", "eagle3", "peagle", "small_model"])
def test_preemption_changes_nothing(target, prompts, plain, kind):
    answers = [prompt + tokens for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    llm, tokens = decode(target, make_drafter(kind, target, 3, answers), prompts, PARAMS, num_pages=20)

    assert llm.stats.preemptions > 0
    assert tokens == plain


def test_order_and_number_of_rows_change_nothing(target, prompts, plain):
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = [[prompts[i] for i in order], [PARAMS[i] for i in order]]
    _, tokens = decode(
        target, make_drafter("eagle3", target, 3, []), *shuffled, max_num_seqs=3, prefill_chunk=5
    )

    assert tokens == [plain[i] for i in order]


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_sampled_drafts_of_the_target_itself_are_all_accepted(target, prompts, num_drafts):
    """q = p: the rejection rule must accept everything, so K + 1 tokens come out of every full step."""
    params = [sampled(i) for i in range(8)]
    llm, _ = decode(target, small_model(target, num_drafts, sample=True, same=True), prompts, params)

    steps = 1 + -(-(NUM_TOKENS - 1) // (num_drafts + 1))
    assert llm.stats.row_steps == 8 * steps


def test_greedy_rows_beside_sampled_drafts(target, prompts, plain):
    """A request at T = 0 gives its tokens also where neighbours' drafts are sampled."""
    _, tokens = decode(target, small_model(target, 3, sample=True), prompts, PARAMS)

    assert tokens[3] == plain[3]


def test_a_seed_gives_the_same_tokens_with_sampled_drafts_alone_and_in_company(target, prompts):
    params = [sampled(i) for i in range(8)]
    _, together = decode(target, small_model(target, 3, sample=True), prompts, params)
    for index in (0, 3, 7):
        drafter = small_model(target, 3, sample=True)
        assert decode(target, drafter, [prompts[index]], [params[index]])[1] == [together[index]]
