"""Trees change no token: T = 0 against a loop without any cache, T > 0 against plain decoding."""

import pytest
import torch
from test_greedy import GREEDY, NUM_TOKENS, prompts
from test_greedy_sampled import PARAMS

from eyas.core.errors import ConfigError
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.engine.llm import LLM
from fakes import naive_greedy, random_head
from tiny import tiny_target
from tree_fakes import tree_head

SHAPES = ("1x4x3", "3x1x3", "3x2x6", "5x4x24", "4x8x62")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    return [naive_greedy(target, prompt, NUM_TOKENS) for prompt in prompts()]


@pytest.fixture(scope="module")
def plain(target):
    return decode(target, None, params=PARAMS)[1]


def decode(target, drafter, count: int = 8, params=GREEDY, **options):
    llm = LLM(target, drafter, **{"max_model_len": 80, "page_size": 4, "num_pages": 400, **options})
    outputs = llm.generate(prompts(count), params)
    return llm, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "oracle"])
def test_greedy(target, expected, kind, shape):
    drafter = tree_head(target, kind, shape, answers=answers(expected))
    llm, tokens = decode(target, drafter)

    assert tokens == expected
    if kind == "oracle":
        assert llm.stats.accepted > 20


def answers(expected):
    return [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("page_size", [1, 3, 256])
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "oracle"])
def test_batches_and_pages(target, expected, kind, count, page_size):
    drafter = tree_head(target, kind, "4x3x12", answers=answers(expected))
    _, tokens = decode(target, drafter, count, page_size=page_size, num_pages=1200)

    assert tokens == expected[:count]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "oracle"])
def test_chunks_and_preemption(target, expected, kind):
    """Few pages and rows: requests join, leave and come back while others draft."""
    drafter = tree_head(target, kind, "3x2x6", answers=answers(expected))
    llm, tokens = decode(target, drafter, num_pages=20, prefill_chunk=4)
    assert llm.stats.preemptions > 0
    assert tokens == expected

    assert decode(target, drafter, 4, max_num_seqs=2, prefill_chunk=2)[1] == expected[:4]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "oracle"])
def test_context_limit_inside_a_tree(target, expected, kind):
    """Where the tree does not fit below the limit, only nodes with a page may be accepted."""
    drafter = tree_head(target, kind, "5x4x24", answers=answers(expected))
    prompt = prompts()[3]
    for limit in [len(prompt) + more for more in (1, 2, 3, 5, 8, 13, 21)]:
        llm = LLM(target, drafter, max_model_len=limit, page_size=4)
        (output,) = llm.generate([prompt], GREEDY)
        assert output.outputs[0].token_ids == expected[3][: limit - len(prompt)]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["eagle3", "oracle"])
def test_families(family, kind):
    """Among them sliding windows of 6 positions: a tree's rows sit at their depths."""
    target = tiny_target(family)
    expected = [naive_greedy(target, prompt, NUM_TOKENS) for prompt in prompts(4)]
    known = [prompt + tokens for prompt, tokens in zip(prompts(4), expected, strict=True)]
    _, tokens = decode(target, tree_head(target, kind, "5x3x14", answers=known), 4)

    assert tokens == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "oracle"])
def test_sampled_seed_by_seed(target, plain, kind, shape):
    """Temperatures, filters, penalties, min-tokens and a greedy request in one batch."""
    known = [prompt + tokens for prompt, tokens in zip(prompts(), plain, strict=True)]
    llm, tokens = decode(target, tree_head(target, kind, shape, answers=known), params=PARAMS)

    assert tokens == plain
    if kind == "oracle":
        assert llm.stats.accepted > 20


def test_logprobs_are_those_of_plain_decoding(target, expected):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)

    def values(drafter):
        llm = LLM(target, drafter, max_model_len=80, page_size=4)
        tops = [output.outputs[0].logprobs for output in llm.generate(prompts(4), params)]
        return [[(top.token_id, round(top.logprob, 3)) for top in step] for tops_ in tops for step in tops_]

    assert values(tree_head(target, "oracle", "4x3x12", answers=answers(expected))) == values(None)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("shape", ["1x4x4", "3x2x6", "5x4x24", "5x4x5"])
def test_a_tree_accepts_no_less_than_its_chain(target, expected, kind, shape):
    """Same head, depth and contexts: the tree holds the chain, so no step accepts less."""
    budget = TreeBudget.parse(shape)
    chain = random_head(target, kind, budget.depth)
    seen = []

    class Both:
        """The tree's drafter, which compares its drafts with the chain's on equal caches."""

        def __init__(self):
            self.inner = tree_head(target, kind, shape)
            self.name, self.tree = "both", budget
            self.aux_layers, self.kv_layout = self.inner.aux_layers, self.inner.kv_layout
            self.num_draft_tokens = budget.num_draft_tokens

        def bind(self, cache, max_visible):
            self.inner.bind(cache, max_visible)
            chain.bind(cache, max_visible)

        def prefill(self, committed):
            self.inner.prefill(committed)

        def propose(self, committed):
            line = chain.propose(committed).tokens
            draft = self.inner.propose(committed)
            for row, wanted in enumerate(line.tolist()):
                inside = budget.depth + int(committed.start[row] + committed.counts[row]) < 80
                if inside:
                    assert follows(draft.tokens[row].tolist(), draft.parents[row].tolist(), wanted)
                    seen.append(row)
            return draft

    assert decode(target, Both())[1] == expected
    assert len(seen) > 50


def follows(tokens, parents, path):
    row = 0
    for token in path:
        below = [i + 1 for i, parent in enumerate(parents) if parent == row and tokens[i] == token]
        if not below:
            return False
        row = below[0]
    return True


def test_stats_count_by_depth(target, expected):
    llm, _ = decode(target, tree_head(target, "oracle", "5x4x24", answers=answers(expected)))

    by_depth = llm.stats.accepted_by_depth
    assert len(by_depth) == 5
    assert by_depth == sorted(by_depth, reverse=True)
    assert sum(by_depth) == llm.stats.accepted > 0


def test_features_of_the_path_reach_the_drafter(target, expected):
    spy = tree_head(target, "spy", "4x3x12", answers=answers(expected))
    _, tokens = decode(target, spy)

    assert tokens == expected
    assert spy.num_rows >= sum(len(answer) - 1 for answer in answers(expected))


def test_seeds_do_matter(plain):
    assert torch.tensor([len(set(tokens)) for tokens in plain]).min() > 3


def test_options_that_do_not_fit(target):
    with pytest.raises(ConfigError, match="needs a drafter"):
        LLM(target, tree="3x2x6")
    with pytest.raises(ConfigError, match="another shape"):
        LLM(target, tree_head(target, "eagle3", "3x2x6"), tree="3x2x5")
    narrow = tiny_target("mistral")
    deep = tree_head(narrow, "peagle", "6x2x9")
    with pytest.raises(ConfigError, match="sliding window of 6 tokens"):
        LLM(narrow, deep, max_model_len=64)
    assert (
        LLM(target, tree_head(target, "peagle", "3x2x6"), tree="3x2x6", max_model_len=64).num_draft_tokens
        == 6
    )
