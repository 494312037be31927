"""On a GPU: steps replayed from CUDA graphs give what eager steps give, for every drafter and variant."""

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.drafters.by_number import ByNumberDrafter
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
    target = tiny_target(head_dim=16)
    target.decoder.to("cuda")
    return target


@pytest.fixture(scope="module")
def answers():
    """What whole forwards on the CPU give, greedily."""
    reference = tiny_target(head_dim=16)
    return [naive_greedy(reference, prompt, 40) for prompt in PROMPTS]


DRAFTERS = {
    "plain": lambda target: None,
    "prompt_lookup": lambda target: PromptLookupDrafter(4),
    "eagle3": lambda target: random_head(target, "eagle3", 4),
    "peagle": lambda target: random_head(target, "peagle", 4),
    "tables": lambda target: random_head(target, "tables", 4),
    "depths": lambda target: random_head(target, "depths", 4),
    "hidden": lambda target: random_head(target, "hidden", 4),
    "hidden sampled": lambda target: random_head(target, "hidden", 4, sample=True),
    "eagle3 tree": lambda target: tree_head(target, "eagle3", "4x3x12"),
    "peagle tree": lambda target: tree_head(target, "peagle", "4x3x12"),
    "by number": lambda target: ByNumberDrafter(
        [tree_head(target, "peagle", "4x3x12"), tree_head(target, "peagle", "3x2x6")],
        random_head(target, "peagle", 4),
    ),
    "self": lambda target: small_model(target, 4, same=True),
    "sampled": lambda target: small_model(target, 4, same=True, sample=True),
}


def make(target, kind, **options) -> LLM:
    options = {"max_model_len": 128, "max_num_seqs": 4, "num_pages": 64, **options}
    return LLM(target, DRAFTERS[kind](target), **options)


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.9, seed=3, top_p=0.8, top_k=20, max_tokens=24, ignore_eos=True),
    "rich": SamplingParams(
        temperature=0.0, frequency_penalty=0.5, logprobs=2, max_tokens=24, ignore_eos=True
    ),
}
# Every drafter, and every way to choose tokens with every way to verify: chains, trees, sampled drafts.
COMBINATIONS = [
    *[("greedy", kind) for kind in DRAFTERS],
    *[("sampled", kind) for kind in ("eagle3", "hidden", "hidden sampled", "peagle tree", "sampled")],
    *[("filtered", kind) for kind in ("prompt_lookup", "eagle3 tree", "sampled")],
    *[("rich", kind) for kind in ("plain", "peagle", "peagle tree", "sampled")],
]


def rounds(llm, params, sizes=(1, 2, 5)):
    """Token ids of the first prompts, so many at a time: the first step of a round has all that fit."""
    return [llm.generate_ids(PROMPTS[:size], params) for size in sizes]


@pytest.mark.parametrize(("params", "kind"), COMBINATIONS, ids=["-".join(pair) for pair in COMBINATIONS])
def test_graphs_equal_eager_steps(target, answers, params, kind):
    """Buckets of one, two and four, padding, joins and leaves: five requests share four rows."""
    graphed = make(target, kind)
    eager = make(target, kind, enforce_eager=True)
    assert graphed._runner._graphs is not None
    assert eager._runner._graphs is None
    one = rounds(graphed, PARAMS[params])

    assert one == rounds(eager, PARAMS[params])
    if params == "greedy":
        assert one == [[answer[:24] for answer in answers[:size]] for size in (1, 2, 5)]
    # One for each bucket, rich steps too.
    assert sorted(bucket for bucket, _ in graphed._runner._graphs._captured) == [1, 2, 4]
    assert graphed.stats.step_seconds > 0
    assert graphed.stats.verify_seconds == 0
    assert eager.stats.verify_seconds > 0


@pytest.mark.parametrize("kind", ["plain", "eagle3", "peagle tree"])
def test_steps_by_phase_give_the_same(target, answers, kind):
    """Without a drafter there is one phase: nothing is left to draft."""
    for by_phase in (True, False):
        llm = make(target, kind, time_phases=by_phase)
        assert llm.generate_ids(PROMPTS, PARAMS["greedy"]) == [answer[:24] for answer in answers]
        assert (llm.stats.verify_seconds > 0) == by_phase
        assert (llm.stats.draft_seconds > 0) == (by_phase and kind != "plain")
        assert (llm.stats.step_seconds > 0) != by_phase


@pytest.mark.parametrize("kind", ["plain", "eagle3", "peagle tree", "sampled"])
def test_overlap_and_plain_order_give_the_same(target, kind):
    """Ends by length, by stop token and by stop rows on the device; late ones join."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=5 + 7 * i, stop_token_ids=(3 * i,), ignore_eos=i % 2 == 0)
        for i in range(5)
    ]
    outputs = []
    for overlap in (True, False):
        llm = make(target, kind, overlap=overlap)
        outputs.append([output.outputs[0] for output in llm.generate(PROMPTS, params)])

    for one, other in zip(*outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("eagle3", [1, 4, 0, 2]),
        ("peagle", [1, 4, 0, 2]),
        ("prompt_lookup", [1, 4, 0, 2]),
        ("by number", [12, 6, 0, 2]),
    ],
)
def test_k_may_change_with_the_batch(target, answers, kind, drafts):
    """Three at once take none and four take two, so drafts are left over, cut off and missing."""
    llm = make(target, kind)
    llm._runner._launcher._num_drafts = lambda batch_size: drafts[batch_size - 1]
    params = [SamplingParams(temperature=0.0, max_tokens=8 + 8 * i, ignore_eos=True) for i in range(5)]

    assert llm.generate_ids(PROMPTS, params) == [answer[: 8 + 8 * i] for i, answer in enumerate(answers)]
    rounds(llm, PARAMS["greedy"], sizes=(1, 2, 3, 4))
    captured = {(bucket, variant.num_drafts) for bucket, variant in llm._runner._graphs._captured}
    assert captured == {(1, drafts[0]), (2, drafts[1]), (4, 0), (4, 2)}


def test_warm_graphs_are_the_ones_that_run(target):
    llm = make(target, "peagle", warm_graphs=True)
    captured = set(llm._runner._graphs._captured)
    prefills = set(llm._runner._prefills._captured)
    rounds(llm, PARAMS["greedy"])

    assert len(captured) == 6  # batches of 1, 2 and 4, greedy and sampled
    assert set(llm._runner._graphs._captured) == captured
    assert len(prefills) == 7  # 1 to 64 blocks
    assert set(llm._runner._prefills._captured) == prefills


def test_all_graphs_share_one_pool_of_memory(target):
    llm = make(target, "peagle")
    rounds(llm, PARAMS["greedy"])
    rounds(llm, PARAMS["sampled"])
    graphs = [graph for entry in llm._runner._graphs._captured.values() for graph, _ in entry.graphs]
    graphs += [entry.graph for entry in llm._runner._prefills._captured.values()]

    assert len(graphs) > 6
    assert len({graph.pool() for graph in graphs}) == 1


# Torch says of this mode that it is a prototype, once.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["eagle3", "sampled"])
def test_nothing_waits_for_the_device_but_the_report(target, kind):
    """With the device's wait forbidden everywhere but at the report's event; all graphs are there by then."""
    llm = make(target, kind)
    params = [
        SamplingParams(
            temperature=t, seed=1, max_tokens=24, ignore_eos=True, logit_bias={5: 1.0} if t else {}
        )
        for t in (0.0, 0.7, 0.0, 0.9, 0.0)
    ]
    first = llm.generate_ids(PROMPTS, params)
    captured = set(llm._runner._graphs._captured)
    prefills = set(llm._runner._prefills._captured)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert llm.generate_ids(PROMPTS, params) == first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(llm._runner._graphs._captured) == captured
    assert set(llm._runner._prefills._captured) == prefills


def test_pages_run_out_under_graphs(target, answers):
    tight = make(target, "eagle3", num_pages=9)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    assert tight.generate_ids(PROMPTS, params) == answers
    assert tight.stats.preemptions > 0


# Shorter, as long as and longer than a block; several blocks, and more than one graph's worth of short ones.
LONG_PROMPTS = [
    [(7 * i + 3 * length) % 63 + 1 for i in range(length)]
    for length in (210, 2, 64, 65, 66, 129, 1, 193, 20, 130)
]
PREFILL_OPTIONS = {
    "whole": {},
    "parts": {"prefill_chunk": 90, "prefill_budget": 200},
    "shared": {"prefix_caching": True},
    "tight": {"num_pages": 20},
}


def filled(llm):
    """Keys and values of target and drafter, without the scratch page."""
    drafter = llm.drafter
    found = [llm._runner.models.cache, None if drafter is None else getattr(drafter, "_cache", None)]
    return [page[1:].clone() for cache in found if cache is not None for page in (*cache.keys, *cache.values)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, "parts") for kind in DRAFTERS],
        *[("eagle3", name) for name in PREFILL_OPTIONS if name != "parts"],
        ("self", "shared"),
        ("peagle tree", "tight"),
    ],
)
def test_captured_prefill_gives_what_eager_prefill_gives(target, kind, options):
    options = {"max_model_len": 256, "num_pages": 160, "page_size": 16, **PREFILL_OPTIONS[options]}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [*LONG_PROMPTS, LONG_PROMPTS[0][:80] + LONG_PROMPTS[5]]
    captured, eager = make(target, kind, **options), make(target, kind, enforce_eager=True, **options)
    assert eager._runner._prefills is None
    for _ in range(2):
        assert captured.generate_ids(prompts, params) == eager.generate_ids(prompts, params)
    assert captured._runner._prefills._captured
    assert captured.stats.prefill_seconds > 0
    if "prefix_caching" in options:
        assert captured.stats.prefix_hits > 128
    if options["num_pages"] == 20:
        assert captured.stats.preemptions > 0


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "plain"),
        ("llama", "eagle3"),
        ("llama", "peagle"),
        ("llama", "self"),
        ("mistral", "eagle3"),
        ("qwen3", "eagle3"),
    ],
)
def test_captured_prefill_writes_the_bits_of_eager_prefill(family, kind):
    """In bfloat16, where products are batch-invariant; a window shorter than a block, normed heads."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    half = tiny_target(family, head_dim=16)
    half.decoder.to("cuda", torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    caches = []
    for enforce_eager in (False, True):
        options = {"max_model_len": 256, "num_pages": 160, "page_size": 16, "overlap": False}
        llm = make(half, kind, max_num_seqs=16, enforce_eager=enforce_eager, **options)
        llm.generate_ids(LONG_PROMPTS, params)
        caches.append(filled(llm))
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one, other)


def test_aborted_beside_captured_prefill(target, answers):
    """Requests that leave while others are prefilled take nothing with them."""
    llm = make(target, "eagle3", max_model_len=256, num_pages=160, prefill_chunk=40)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for _ in range(3):
        running = llm.iterate_ids(LONG_PROMPTS, params)
        next(running)
        running.close()
        assert llm.generate_ids(PROMPTS, params) == answers
