"""The engine on CUDA: graphs against eager, speculation against plain decoding, and against the CPU."""

import dataclasses

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.core.vocab_map import VocabMap
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.engine.llm import LLM
from tiny import tiny_target

pytestmark = pytest.mark.gpu

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [
    torch.randint(1, 64, (length,), generator=GENERATOR).tolist() for length in (1, 2, 9, 17, 30, 33, 48, 5)
]


def _target(device, dtype=torch.float32):
    target = tiny_target(hidden_size=64, num_heads=4, head_dim=16)
    target.decoder.to(device=device, dtype=dtype)
    return target


def _drafter(kind, target, num_draft_tokens):
    if kind in (None, "prompt_lookup"):
        return kind
    is_peagle = kind in ("peagle", "tables", "hidden")
    config = HeadConfig.for_target(
        target.config,
        kind="peagle" if is_peagle else kind,
        num_layers=2 if is_peagle else 1,
        mask_token_id=63 if is_peagle else None,
    )
    torch.manual_seed(11)
    model = (PEagleModel if is_peagle else Eagle3Model)(config, target.decoder.embed_tokens.weight)
    if kind in ("tables", "hidden"):
        model.add_markov(kind, 16, generator=torch.Generator().manual_seed(11))
        for parameter in model.markov.parameters():
            torch.nn.init.normal_(parameter)
    model = model.to(device=target.device, dtype=target.dtype).eval()
    make = PEagleDrafter if is_peagle else Eagle3Drafter
    return make(model, VocabMap.identity(64), num_draft_tokens)


def _tokens(target, kind, params, *, num_draft_tokens=3, prompts=PROMPTS, **options):
    drafter = _drafter(kind, target, num_draft_tokens)
    if kind != "prompt_lookup":
        llm = LLM(target, drafter, max_model_len=160, page_size=16, **options)
    else:
        llm = LLM(target, kind, num_draft_tokens=num_draft_tokens, max_model_len=160, page_size=16, **options)
    return llm.generate_ids(prompts, params)


GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, seed=3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [None, "prompt_lookup", "eagle3", "peagle", "tables", "hidden"])
def test_graphs_equal_eager(kind, params):
    target = _target("cuda")
    eager = _tokens(target, kind, params, enforce_eager=True)
    assert _tokens(target, kind, params) == eager
    assert len({tuple(row) for row in eager}) == len(PROMPTS)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["prompt_lookup", "eagle3", "peagle", "tables", "hidden"])
def test_speculation_changes_no_token_in_float32(kind, num_draft_tokens):
    target = _target("cuda")
    for params in (GREEDY, SAMPLED):
        plain = _tokens(target, None, params)
        assert _tokens(target, kind, params, num_draft_tokens=num_draft_tokens) == plain


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_cuda_equals_cpu_in_float32(params):
    assert _tokens(_target("cuda"), "eagle3", params) == _tokens(_target("cpu"), "eagle3", params)


def test_rich_parameters_beside_plain_ones():
    """Penalties and log-probabilities take a graph of their own; the batch's other rows do not notice."""
    target = _target("cuda")
    rich = dataclasses.replace(GREEDY, repetition_penalty=1.3, logprobs=2, min_tokens=5)
    mixed = LLM(target, _drafter("peagle", target, 3), max_model_len=160, page_size=16)
    outputs = mixed.generate(PROMPTS, [rich, *[GREEDY] * 7])
    assert [o.outputs[0].token_ids for o in outputs[1:]] == _tokens(target, None, GREEDY)[1:]
    assert outputs[0].outputs[0].token_ids == _tokens(target, None, [rich], prompts=PROMPTS[:1])[0]
    assert len(outputs[0].outputs[0].logprobs) == 40


def test_preemption_on_cuda():
    target = _target("cuda")
    tight = _tokens(target, "eagle3", GREEDY, num_pages=12)
    assert tight == _tokens(target, None, GREEDY)


def test_bfloat16_runs_and_repeats():
    target = _target("cuda", torch.bfloat16)
    for kind in (None, "eagle3", "peagle", "tables", "hidden"):
        assert _tokens(target, kind, GREEDY) == _tokens(target, kind, GREEDY)
