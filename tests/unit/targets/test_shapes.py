"""Random targets and heads of named shapes."""

import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.drafters.shapes import head_shape, random_head
from eyas.nn.random_weights import fill
from eyas.targets import shapes
from eyas.targets.decoder import Decoder
from eyas.targets.shapes import SHAPES, num_parameters, shape_config, shape_target


@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-3.1-8b", 8030.3), ("llama-3.3-70b", 70553.7), ("qwen2.5-0.5b", 494.0), ("smollm2-135m", 134.5)],
)
def test_shapes_have_as_many_parameters_as_the_models(name, millions):
    assert num_parameters(SHAPES[name]) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_tiny_target_is_whole():
    target = shape_target("shape:tiny", dtype=torch.bfloat16, seed=3)
    assert (target.dtype, target.tokenizer) == (torch.bfloat16, None)
    for name, parameter in target.decoder.named_parameters():
        assert not parameter.requires_grad
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert parameter.float().std().item() == pytest.approx(0.02, rel=0.2)
    assert target.decoder.rotary.cos.dtype == torch.float32
    again = shape_target("shape:tiny", dtype=torch.bfloat16, seed=3)
    other = shape_target("shape:tiny", dtype=torch.bfloat16, seed=4)
    weights = [t.decoder.lm_head_weight for t in (target, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_filling_leaves_real_parameters_alone():
    with torch.device("meta"):
        decoder = Decoder(shape_config("shape:tiny"))
    table = torch.nn.Parameter(torch.zeros(160, 32))
    decoder.embed_tokens.weight = table
    fill(decoder, device="cpu", dtype=torch.float32, std=0.1, seed=0)
    assert decoder.embed_tokens.weight is table
    assert not any(parameter.is_meta for parameter in decoder.parameters())


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(shapes, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 << 30, 141 << 30))
    with pytest.raises(ConfigError, match="70b in bfloat16 takes 131 GiB of weights, and 100 GiB"):
        shape_target("shape:llama-3.3-70b", device="cuda")


@pytest.mark.parametrize("name", ["shape:gpt-9", "shape:", "tiny-er"])
def test_unknown_shapes_are_named_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="shape:tiny"):
        shape_config(name)


@pytest.mark.parametrize(
    ("target", "vocabulary"), [("llama-3.1-8b", 32000), ("smollm2-135m", 15872), ("tiny", 160)]
)
def test_heads_have_their_targets_shape(target, vocabulary):
    config = SHAPES[target]
    eagle, peagle = head_shape("shape:eagle3", config), head_shape("shape:peagle-4", config)
    assert (eagle.num_layers, peagle.num_layers) == (1, 4)
    assert eagle.draft_vocab_size == peagle.draft_vocab_size == vocabulary
    assert (eagle.hidden_size, eagle.kind, peagle.kind) == (config.hidden_size, "eagle3", "peagle")


@pytest.mark.parametrize(
    "spec",
    [
        "shape:peagle",
        "shape:peagle-0",
        "shape:eagle3-2",
        "shape:eagle3-hidden-8",
        "shape:peagle-2-wide-8",
        "eagle3",
        "shape:x",
    ],
)
def test_unknown_heads(spec):
    with pytest.raises(ConfigError, match="shape:eagle3"):
        head_shape(spec, SHAPES["tiny"])


def test_a_shape_may_have_a_correction():
    config = head_shape("shape:peagle-4-hidden-128", SHAPES["llama-3.1-8b"])
    assert (config.num_layers, config.markov_form, config.markov_rank) == (4, "hidden", 128)
    config = head_shape("shape:peagle-2-tables-32", SHAPES["smollm2-135m"])
    assert (config.num_layers, config.markov_form, config.markov_rank) == (2, "tables", 32)


@pytest.mark.parametrize("spec", ["shape:peagle-2", "shape:peagle-2-hidden-8", "shape:peagle-2-tables-8"])
def test_a_random_head_is_whole(spec):
    target = shape_target("shape:tiny")
    table = target.decoder.embed_tokens.weight
    head = random_head(spec, target.config, table)
    assert head.model.embed_weight.data_ptr() == table.data_ptr()
    assert not any(p.is_meta or p.requires_grad for p in head.model.parameters())
    ids = head.vocab_map.target_ids
    assert (ids[1:] > ids[:-1]).all()
    assert ids[-1] < target.config.vocab_size
