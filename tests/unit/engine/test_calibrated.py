"""K by batch size: how a calibration is read, and that changing K from step to step changes no token."""

import itertools
import json

import pytest
import torch

from eyas.core.device import device_name
from eyas.core.errors import ConfigError, ModelFormatError
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.drafters.artifact import save_head
from eyas.drafters.by_number import ByNumberDrafter
from eyas.engine.calibrated import Schedule, schedule_of
from eyas.engine.llm import LLM
from fakes import make_drafter, naive_greedy, random_head, small_model
from tiny import tiny_target
from tree_fakes import tree_head

PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], [20], [31, 32]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def entry(max_batch, k, tree=None):
    return {"max_batch": max_batch, "k": k, "tree": tree, "tokens_per_second": 1.0}


def write(folder, entries, device="here", dtype="float32"):
    calibration = {"device": device, "dtype": dtype, "by_batch": entries}
    (folder / "eyas.json").write_text(json.dumps({"calibration": calibration}))
    return folder


def read(folder, max_num_seqs=64):
    return schedule_of(folder, device="here", dtype="float32", max_num_seqs=max_num_seqs)


def test_k_by_batch_size(tmp_path):
    schedule = read(write(tmp_path, [entry(8, 3), entry(1, 7), entry(32, 0)]))

    assert [schedule.num_drafts(n) for n in (1, 2, 8, 9, 32, 64)] == [7, 3, 3, 0, 0, 0]
    assert schedule.most == 7
    assert schedule.trees == ()


def test_measurements_of_another_device_are_not_used(tmp_path):
    assert read(tmp_path) is None
    assert read(write(tmp_path, [entry(1, 7)], device="elsewhere")) is None
    assert read(write(tmp_path, [entry(1, 7)], dtype="bfloat16")) is None
    (tmp_path / "eyas.json").write_text("{}")
    assert read(tmp_path) is None


def test_trees_and_chains_by_batch_size(tmp_path):
    wide, narrow = TreeBudget(5, 4, 24), TreeBudget(3, 2, 6)
    write(tmp_path, [entry(1, 24, "5x4x24"), entry(8, 24, "5x4x24"), entry(16, 6, "3x2x6"), entry(64, 2)])

    assert read(tmp_path, 8) == Schedule(((1, 24), (8, 24)), (wide,))
    assert read(tmp_path, 8).longest_chain == 0
    mixed = read(tmp_path, 17)
    assert mixed.trees == (wide, narrow)
    assert [mixed.num_drafts(n) for n in (1, 8, 9, 17)] == [24, 24, 6, 2]
    assert (mixed.most, mixed.longest_chain) == (24, 2)


@pytest.mark.parametrize(
    ("shapes", "drafts", "trees"),
    [
        # A chain of 6 is in use, so 6 drafts are no tree.
        ([("3x2x6", 4), (None, 6)], [4, 6], []),
        # Two trees of 10: one gives way, and its chain of 7 to nobody.
        ([("5x2x10", 7), ("3x4x10", 3)], [7, 10], ["3x4x10"]),
        # The chain of a tree that gave way is as long as another tree has nodes.
        ([("3x2x6", 7), ("5x2x7", 3), (None, 6)], [7, 3, 6], []),
        # One tree twice is one.
        ([("3x2x6", 4), ("3x2x6", 5), (None, 0)], [6, 6, 0], ["3x2x6"]),
        # Chains longer than any tree.
        ([("3x2x6", 4), (None, 100)], [4, 100], []),
    ],
)
def test_where_a_number_would_mean_two_shapes_the_best_chain_counts(tmp_path, shapes, drafts, trees):
    entries = [
        entry(1 << i, k if tree is None else 0, tree) | {"chain_k": k} for i, (tree, k) in enumerate(shapes)
    ]
    schedule = read(write(tmp_path, entries))
    assert [schedule.num_drafts(1 << i) for i in range(len(shapes))] == drafts
    assert schedule.trees == tuple(map(TreeBudget.parse, trees))


def test_a_chain_that_is_no_number_is_named(tmp_path):
    write(tmp_path, [entry(1, 24, "5x4x24") | {"chain_k": None}])
    with pytest.raises(ModelFormatError, match="chain_k"):
        read(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {},
        [entry(0, 3)],
        [entry(1, -1)],
        [entry(1, 2.5)],
        [entry(1, k=True)],
        [entry(1, 3, 5)],
        [{"k": 3}],
        [7],
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, bad):
    with pytest.raises(ModelFormatError, match=r"eyas.json: calibration.by_batch"):
        read(write(tmp_path, bad))
    (tmp_path / "eyas.json").write_text('{"calibration": 5}')
    with pytest.raises(ModelFormatError, match=r"eyas.json: calibration must be an object"):
        read(tmp_path)
    with pytest.raises(ModelFormatError, match="DEPTHxTOP_KxNODES"):
        read(write(tmp_path, [entry(1, 3, "big")]))


def varying(llm: LLM, *ks: int) -> LLM:
    """K of n requests: ks[n - 1]."""
    llm._runner._launcher._num_drafts = lambda batch_size: ks[batch_size - 1]
    return llm


KINDS = ["prompt_lookup", "eagle3", "peagle", "small_model", "self"]


# With overlap the spy would also see rows that are off, whose history stands still.
@pytest.mark.parametrize(("kind", "overlap"), [*itertools.product(KINDS, [False, True]), ("spy", False)])
def test_k_may_change_with_every_step(kind, overlap):
    """Requests of different lengths: batches of 4, 3, 2 and 1, with K 2, 0, 4 and 1."""
    target = tiny_target()
    expected = [naive_greedy(target, prompt, 8 + 8 * i) for i, prompt in enumerate(PROMPTS)]
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    llm = LLM(target, make_drafter(kind, target, 4, answers), overlap=overlap, page_size=4, max_model_len=80)
    params = [SamplingParams(temperature=0.0, max_tokens=8 + 8 * i, ignore_eos=True) for i in range(4)]

    assert varying(llm, 1, 4, 0, 2).generate_ids(PROMPTS, params) == expected
    assert llm.stats.drafted > 0
    if kind == "self":
        assert llm.stats.accepted > 8


def test_sampled_drafts_of_varying_number_are_lossless_at_temperature_0():
    target = tiny_target()
    llm = LLM(target, small_model(target, 4, sample=True), max_model_len=80)
    params = [SamplingParams(temperature=0.0, max_tokens=6 + 6 * i, ignore_eos=True) for i in range(4)]
    hot = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    outputs = varying(llm, 1, 4, 0, 2, 3).generate_ids([*PROMPTS, [1]], [*params, hot])

    assert outputs[:4] == [naive_greedy(target, p, 6 + 6 * i) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "eagle3 tree"])
def test_speculation_goes_on_after_a_pause_as_if_there_had_been_none(kind):
    """While K is 0 the drafter's cache takes in what was committed: later guesses are the same."""
    target = tiny_target()
    guesses = []
    for pause in (True, False):
        drafter = tree_head(target, "eagle3", "3x2x6") if "tree" in kind else random_head(target, kind, 4)
        llm = LLM(target, drafter, max_model_len=80, page_size=4)
        most = llm.num_draft_tokens
        varying(llm, 0 if pause else most)
        (group,) = llm._intake.groups([PROMPTS[1]], GREEDY)
        llm.submit(group)
        request = group.requests[0]
        found = {}
        while llm.step():
            if len(request.output_ids) >= 12:
                varying(llm, most)
            if request.slot >= 0:
                found[len(request.output_ids)] = llm._runner.state.drafts[request.slot].tolist()
        guesses.append(found)
    common = {n for n in set(guesses[0]) & set(guesses[1]) if n > 13}

    assert len(common) >= 2
    for n in common:
        assert guesses[0][n] == guesses[1][n]
        assert min(guesses[0][n]) >= 0


def test_an_engine_takes_what_its_head_says(tmp_path):
    target = tiny_target()
    drafter = random_head(target, "eagle3", 2)
    save_head(tmp_path, drafter.model, drafter.vocab_map, meta={})
    about = json.loads((tmp_path / "eyas.json").read_text())
    device = device_name(torch.device("cpu"))

    def calibrated(*entries, **options):
        calibration = {"device": device, "dtype": "float32", "by_batch": list(entries)}
        (tmp_path / "eyas.json").write_text(json.dumps(about | {"calibration": calibration}))
        return LLM(target, tmp_path, max_model_len=80, **{"max_num_seqs": 4, **options})

    llm = calibrated(entry(1, 6), entry(2, 2), entry(4, 0))
    assert llm.num_draft_tokens == 6
    assert [llm._runner._num_drafts(n) for n in (1, 2, 3)] == [6, 2, 0]
    assert llm.generate_ids(PROMPTS, GREEDY) == [naive_greedy(target, prompt, 24) for prompt in PROMPTS]
    assert calibrated(entry(1, 6), num_draft_tokens=3).num_draft_tokens == 3
    assert calibrated(entry(1, 6, "3x2x6")).drafter.tree == TreeBudget(3, 2, 6)
    assert calibrated(entry(8, 0)).drafter is None


SHAPES_BY_BATCH = [entry(1, 12, "4x3x12"), entry(2, 6, "3x2x6"), entry(3, 2), entry(4, 0)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "hidden"])
def test_trees_and_chains_take_turns(tmp_path, kind, overlap):
    """Four requests that end one by one: nothing, chains of 2, narrow trees, wide ones; and back again."""
    target = tiny_target()
    head = random_head(target, kind, 2)
    save_head(tmp_path, head.model, head.vocab_map, meta={})
    about = json.loads((tmp_path / "eyas.json").read_text())
    calibration = {"device": device_name(torch.device("cpu")), "dtype": "float32"}
    calibration["by_batch"] = SHAPES_BY_BATCH
    (tmp_path / "eyas.json").write_text(json.dumps(about | {"calibration": calibration}))
    llm = LLM(target, tmp_path, max_model_len=80, max_num_seqs=4, page_size=4, overlap=overlap)
    assert isinstance(llm.drafter, ByNumberDrafter)
    assert str(llm.drafter.tree) == "4x3x12"
    seen, propose = [], llm.drafter.propose

    def watched(committed):
        draft = propose(committed)
        seen.append((len(committed.start), int((draft.tokens >= 0).sum(1).max())))
        return draft

    llm.drafter.propose = watched
    for temperature in (0.0, 0.9):
        params = [
            SamplingParams(temperature=temperature, seed=7, max_tokens=8 + 8 * i, ignore_eos=True)
            for i in range(4)
        ]
        plain = LLM(target, max_model_len=80, page_size=4).generate_ids(PROMPTS, params)
        for order in (1, -1):
            assert llm.generate_ids(PROMPTS[::order], params[::order]) == plain[::order]
        assert {(1, 12), (2, 6), (3, 2)} == set(seen)
    assert llm.stats.drafted > 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_chain_among_trees_drafts_what_a_chain_alone_does(kind):
    target = tiny_target()
    guesses = []
    for among_trees in (True, False):
        drafter = random_head(target, kind, 3)
        if among_trees:
            drafter = ByNumberDrafter([tree_head(target, kind, "5x4x24")], drafter)
        llm = varying(LLM(target, drafter, max_model_len=80, page_size=4), 3)
        (group,) = llm._intake.groups([PROMPTS[1]], GREEDY)
        llm.submit(group)
        request, found = group.requests[0], {}
        while llm.step():
            if request.slot >= 0:
                found[len(request.output_ids)] = llm._runner.state.drafts[request.slot].tolist()
        guesses.append(found)
    assert guesses[0].keys() == guesses[1].keys()
    for length, drafts in guesses[1].items():
        assert guesses[0][length] == drafts + [-1] * 21


@pytest.mark.parametrize("wrong", [entry(1, 10**9), entry(1, 3, "abc"), entry(1, 3) | {"chain_k": 10**9}])
def test_a_wrong_entry_is_named_with_its_file(tmp_path, wrong):
    with pytest.raises(ModelFormatError, match=r"eyas\.json: calibration\.by_batch.*calibrate"):
        read(write(tmp_path, [wrong]))


WRONG = [
    ("seed", "x"),
    ("seed", None),
    ("num_draft_tokens", 2.5),
    ("max_model_len", "x"),
    ("max_num_seqs", 1.5),
    ("page_size", "x"),
    ("num_pages", 10**13),
    ("gpu_memory_fraction", "x"),
    ("prefill_budget", 1.5),
    ("admit_together", "x"),
    ("tree", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_option_of_another_type_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        LLM(tiny_target(), **{name: value})
