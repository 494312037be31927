"""On a GPU: steps replayed from CUDA graphs give what eager steps give, for every drafter and variant."""

import copy

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.drafters.prompt_lookup.propose import PromptLookupDrafter
from eyas.engine.llm import LLM
from fakes import naive_greedy, random_head, small_model
from tiny import tiny_target
from tree_fakes import tree_head

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 4, 5], [7], list(range(1, 40)), [9, 9, 9, 9, 9], [60, 50, 40]]


@pytest.fixture(scope="module")
def target():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    target = copy.copy(tiny_target(head_dim=16))
    target.decoder.to("cuda")
    return target


def drafters(target):
    made = {
        "plain": lambda: None,
        "prompt_lookup": lambda: PromptLookupDrafter(4),
        "eagle3": lambda: random_head(target, "eagle3", 4),
        "peagle": lambda: random_head(target, "peagle", 4),
        "eagle3 tree": lambda: tree_head(target, "eagle3", "4x3x12"),
        "peagle tree": lambda: tree_head(target, "peagle", "4x3x12"),
        "self": lambda: small_model(target, 4, same=True),
        "sampled": lambda: small_model(target, 4, same=True, sample=True),
    }
    yield from made.values()


def make(target, drafter, **options) -> LLM:
    return LLM(target, drafter, **{"max_model_len": 128, "max_num_seqs": 4, "num_pages": 64, **options})


KINDS = ["plain", "prompt_lookup", "eagle3", "peagle", "eagle3 tree", "peagle tree", "self", "sampled"]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, top_p=0.8, top_k=20, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=2, max_tokens=40, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "filtered", "rich"],
)
def test_graphs_equal_eager_steps(target, kind, params):
    """Five requests over four rows: buckets of one, two and four, padding, joins and leaves."""
    graphed = make(target, list(drafters(target))[kind]())
    eager = make(target, list(drafters(target))[kind](), enforce_eager=True)
    assert graphed._runner._graphs is not None
    assert eager._runner._graphs is None
    one = [output.outputs[0].token_ids for output in graphed.generate(PROMPTS, params)]
    two = [output.outputs[0].token_ids for output in eager.generate(PROMPTS, params)]

    assert one == two
    assert len(graphed._runner._graphs._captured) >= 3  # every step, rich ones too
    assert graphed.stats.step_seconds > 0
    assert graphed.stats.verify_seconds == 0
    assert eager.stats.verify_seconds > 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle tree"])
def test_steps_by_phase_give_the_same(target, kind):
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = []
    for by_phase in (True, False):
        llm = make(target, list(drafters(target))[KINDS.index(kind)](), time_phases=by_phase)
        outputs.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
        assert (llm.stats.verify_seconds > 0) == (llm.stats.draft_seconds > 0) == by_phase
        assert (llm.stats.step_seconds > 0) != by_phase

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_overlap_and_plain_order_give_the_same(target, kind):
    """Ends by length, by stop token and by stop rows on the device; late ones join."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=5 + 7 * i, stop_token_ids=(3 * i,), ignore_eos=i % 2 == 0)
        for i in range(5)
    ]
    outputs = []
    for overlap in (True, False):
        llm = make(target, list(drafters(target))[kind](), overlap=overlap)
        outputs.append([output.outputs[0] for output in llm.generate(PROMPTS, params)])

    for one, other in zip(*outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "prompt_lookup"])
def test_k_may_change_with_the_batch(target, kind):
    params = [SamplingParams(temperature=0.0, max_tokens=8 + 8 * i, ignore_eos=True) for i in range(5)]
    expected = make(target, None).generate_ids(PROMPTS, params)
    llm = make(target, list(drafters(target))[KINDS.index(kind)]())
    llm._runner._launcher._num_drafts = lambda batch_size: [1, 4, 0, 2][batch_size - 1]

    assert llm.generate_ids(PROMPTS, params) == expected
    assert len({variant.num_drafts for _, variant in llm._runner._graphs._captured}) == 4


def test_warm_graphs_are_the_ones_that_run(target):
    llm = make(target, random_head(target, "peagle", 4), warm_graphs=True)
    captured = set(llm._runner._graphs._captured)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm.generate(PROMPTS, params)

    assert len(captured) == 6  # batches of 1, 2 and 4, greedy and sampled
    assert set(llm._runner._graphs._captured) == captured


def test_nothing_waits_for_the_device_but_the_report(target, monkeypatch):
    """With the device's wait forbidden everywhere but at the report's event."""
    llm = make(target, random_head(target, "eagle3", 4))
    params = [
        SamplingParams(
            temperature=t, seed=1, max_tokens=30, ignore_eos=True, logit_bias={5: 1.0} if t else {}
        )
        for t in (0.0, 0.7, 0.0, 0.9, 0.0)
    ]
    first = llm.generate_ids(PROMPTS, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert llm.generate_ids(PROMPTS, params) == first
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_are_lossless_in_float32(target):
    reference = tiny_target(head_dim=16)
    expected = [naive_greedy(reference, prompt, 40) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for drafter in drafters(target):
        outputs = make(target, drafter()).generate(PROMPTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_second_batch_reuses_the_graphs(target):
    llm = make(target, random_head(target, "peagle", 4))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = llm.generate(PROMPTS, params)
    captured = dict(llm._runner._graphs._captured)
    second = llm.generate(PROMPTS, params)

    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    assert llm._runner._graphs._captured == captured


def test_pages_run_out_under_graphs(target):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    roomy = make(target, random_head(target, "eagle3", 4)).generate(PROMPTS, params)
    tight = make(target, random_head(target, "eagle3", 4), num_pages=9)
    outputs = tight.generate(PROMPTS, params)

    assert tight.stats.preemptions > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in roomy]
