"""Where answers part from plain decoding's, the gap there, and which gaps rounding explains."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import eyas.engine.first_difference as module
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.engine.exact import next_logits
from eyas.engine.first_difference import Outputs, greedy_difference, may_part, spacing, summary
from eyas.engine.llm import LLM
from eyas.engine.verify_check import CheckOptions, check_lossless
from eyas.kernels.reference import step_settle, step_tree
from eyas.kernels.settings import use_invariant
from fakes import random_head
from tiny import tiny_target
from tree_fakes import tree_head

V = 24
PROMPTS = [[1, 2, 3], [5, 6, 7, 8]]
TREE = CheckOptions(
    num_draft_tokens=(),
    trees=(TreeBudget(3, 2, 6),),
    batch_sizes=(2,),
    num_tokens=6,
    samples=0,
    temperatures=(),
)
PLACE = 3


def paired(dtype):
    """Tokens 2 i and 2 i + 1 are one and the same to this target: their logits are equal."""
    target = tiny_target(vocab_size=V, num_layers=2, tie_word_embeddings=True)
    with torch.no_grad():
        target.decoder.embed_tokens.weight[1::2] = target.decoder.embed_tokens.weight[::2]
    target.decoder.to(dtype)
    return target


def verify(target):
    def head(tree):
        return tree_head(target, "eagle3", str(tree))

    return check_lossless(target, head, PROMPTS, TREE).checks[0]


def part(monkeypatch, other):
    """Make engines with a drafter answer the first prompt of each batch with another token at PLACE."""
    whole = LLM.generate_ids

    def parted(self, prompts, params, progress=None):
        outputs = whole(self, prompts, params, progress)
        if self.drafter is not None:
            outputs[0][PLACE] = other(self.target, [*prompts[0], *outputs[0][:PLACE]], outputs[0][PLACE])
        return outputs

    monkeypatch.setattr(LLM, "generate_ids", parted)


def twin(target, context, token):
    del target, context
    return token ^ 1


def worst(target, context, token):
    del token
    return int(next_logits(target, [context])[0].argmin())


def test_a_tree_that_parts_at_a_tie_passes_in_bfloat16_and_says_so(monkeypatch):
    part(monkeypatch, twin)
    check = verify(paired(torch.bfloat16))

    found = next(one for one in check.differences if one.prompt == 0)
    assert check.passed
    assert (found.place, found.token, found.gap, found.batch_size) == (PLACE, found.plain_token ^ 1, 0.0, 2)
    assert found.within_rounding
    assert (check.near_ties, check.different) == (len(check.differences), 0)
    assert f"differs in {len(check.differences)} of 2, gap" in check.detail
    assert "(bf16 spacing 0." in check.detail


def test_a_tree_that_parts_at_a_large_gap_fails_in_bfloat16(monkeypatch):
    part(monkeypatch, worst)
    target = paired(torch.bfloat16)
    check = verify(target)

    found = next(one for one in check.differences if one.prompt == 0)
    assert not check.passed
    assert found.gap > 4 * found.spacing
    params = SamplingParams(temperature=0.0, max_tokens=PLACE + 1, ignore_eos=True)
    plain = LLM(target).generate_ids([PROMPTS[0]], params)[0]
    logits = next_logits(target, [[*PROMPTS[0], *plain[:PLACE]]])[0]
    assert found.gap == float(logits[plain[PLACE]] - logits.min())
    assert check.different == 1
    assert "1 DIFFER beyond rounding; first: prompt 0, batch 2, output token 3" in check.detail


def test_in_float32_a_tie_is_no_excuse(monkeypatch):
    part(monkeypatch, twin)
    check = verify(paired(torch.float32))

    assert not check.passed
    assert [(one.prompt, one.gap, one.within_rounding) for one in check.differences] == [(0, 0.0, False)]


def test_sound_trees_in_bfloat16_part_at_near_ties_only():
    """These two prompts do part on some CPUs, where rows of a tree are added in another order."""
    target = tiny_target(vocab_size=V, num_layers=2)
    target.decoder.to(torch.bfloat16)
    options = CheckOptions(
        num_draft_tokens=(), trees=TREE.trees, batch_sizes=(2,), num_tokens=30, samples=0, temperatures=()
    )
    prompts = [[4, 2, 3], [15, 2, 3]]
    report = check_lossless(target, lambda tree: tree_head(target, "eagle3", str(tree)), prompts, options)

    assert report.passed, report.checks


WIDE = [[1 + i, 2, 3] for i in range(12)]


def test_in_bfloat16_too_an_engine_that_accepts_everything_fails(monkeypatch):
    monkeypatch.setattr(step_settle, "count_matches", lambda _, drafts: 1 + (drafts >= 0).long().sum(1))
    target = tiny_target(vocab_size=V, num_layers=2)
    target.decoder.to(torch.bfloat16)
    options = replace(TREE, num_draft_tokens=(3,), trees=(), batch_sizes=(12,))
    check = check_lossless(target, lambda k: random_head(target, "eagle3", k), WIDE, options).checks[0]

    assert not check.passed
    assert max(one.gap / one.spacing for one in check.differences) > 20


@pytest.mark.parametrize("broken", [False, True])
def test_in_bfloat16_too_tree_rows_that_miss_their_root_fail(monkeypatch, broken):
    whole = step_tree.tree_shape

    def rootless(draft_parents, max_depth):
        parents, depths, bits = whole(draft_parents, max_depth)
        row = torch.arange(bits.shape[1]).expand_as(bits)
        return parents, depths, torch.where(row > 0, bits & ~1, bits)

    if broken:
        monkeypatch.setattr(step_tree, "tree_shape", rootless)
    target = tiny_target(vocab_size=V, num_layers=2)
    target.decoder.to(torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = [p + o for p, o in zip(WIDE, LLM(target).generate_ids(WIDE, params), strict=True)]
    options = replace(TREE, batch_sizes=(12,), num_tokens=16)
    check = check_lossless(
        target, lambda tree: tree_head(target, "oracle", str(tree), answers), WIDE, options
    ).checks[0]

    assert check.acceptance_length > 1.2
    assert check.passed is not broken
    assert (check.different > 0) is broken


@pytest.mark.parametrize(
    ("best", "other", "third", "near"),
    [
        (17.0, 16.5, 0.0, True),  # four spacings
        (17.0, 16.375, 0.0, False),  # five
        (16.5, 17.0, 0.0, True),  # this forward has them the other way round
        (15.75, 15.25, -20.0, True),  # the largest logit, here a negative one, says how far numbers lie apart
        (17.0, 17.0, 18.0, False),  # close to each other, and both are wrong
        (float("nan"), 17.0, 0.0, False),
    ],
)
def test_four_spacings(monkeypatch, best, other, third, near):
    target = paired(torch.bfloat16)
    seen = []

    def logits(_, contexts):
        seen.extend(contexts)
        return torch.tensor([[best, other, third]], dtype=torch.float64)

    monkeypatch.setattr(module, "next_logits", logits)
    found = greedy_difference(target, Outputs(7, 4, [2, 2], [2, 0, 0], [2, 1, 2]), tree=True)

    assert seen == [[2, 2, 2]]
    assert found.within_rounding is near
    assert (found.prompt, found.batch_size, found.place) == (7, 4, 1)
    assert (found.plain_token, found.token) == (0, 1)
    gap = best - other
    assert found.gap == (gap if math.isfinite(gap) else None)
    assert found.gap is None or found.spacing == 0.125


def test_an_output_that_ends_early_fails():
    found = greedy_difference(paired(torch.bfloat16), Outputs(0, 1, [2], [3, 4], [3]), tree=True)

    assert (found.place, found.plain_token, found.token, found.gap) == (1, 4, None, None)
    assert not found.within_rounding
    assert "4 became the end" in summary([found], 1, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "tree", "allowed"),
    [
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, True),
        ("cpu", torch.bfloat16, False, True),
        ("cuda", torch.float32, True, False),
        ("cpu", torch.float32, False, False),
        ("cuda", torch.float16, True, True),
    ],
)
def test_who_may_part(device, dtype, tree, allowed):
    target = SimpleNamespace(device=torch.device(device), dtype=dtype)

    assert may_part(target, tree=tree) is allowed


def test_chains_may_part_where_the_library_multiplies():
    target = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    with use_invariant(on=False):
        assert may_part(target, tree=False)


@pytest.mark.parametrize("value", [16.0, -17.5, 31.875, 32.0, 0.5, 0.75, 2.0**-12, -3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_spacing_is_the_way_to_the_next_number(value, dtype):
    number = torch.tensor(abs(value), dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    following = (number.view(bits) + 1).view(dtype)

    assert spacing(value, dtype) == float(following.double() - number.double())


def test_spacing_at_zero_is_above_zero():
    assert spacing(0.0, torch.bfloat16) > 0.0


def test_many_prompts_run_in_batches(monkeypatch):
    target = paired(torch.float32)
    sizes = []
    whole = LLM.generate_ids

    def seen(self, prompts, params, progress=None):
        if self.drafter is not None:
            sizes.append(len(prompts))
        return whole(self, prompts, params, progress)

    monkeypatch.setattr(LLM, "generate_ids", seen)
    prompts = [[1 + i % 20, 2 + i // 20] for i in range(70)]
    options = CheckOptions(num_draft_tokens=(2,), batch_sizes=(64,), num_tokens=3, samples=0, temperatures=())
    report = check_lossless(target, "prompt_lookup", prompts, options)

    assert report.passed
    assert sizes == [64, 6]
    assert (report.checks[0].outputs, report.checks[0].tokens) == (70, 210)


def test_summary_line():
    one = module.Difference(0, 1, 3, 5, 6, within_rounding=True, gap=0.0, spacing=0.125)
    line = summary([one, replace(one, gap=0.125)], 16, torch.bfloat16)

    assert line == "differs in 2 of 16, gaps 0 to 0.125 (bf16 spacing 0.125), all ties within rounding"
    assert summary([], 16, torch.bfloat16) == "16 of 16 outputs equal plain decoding, token by token"
