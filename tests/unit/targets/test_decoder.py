"""What the decoder promises beside its numbers (those are held in tests/parity)."""

import copy
import dataclasses

import pytest
import torch

from eyas.nn.packed import PackedContext
from eyas.targets.decoder import Decoder
from tiny import tiny_config, tiny_target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def run(target, capture=()):
    ids = torch.arange(10)[None]
    return target.decoder(ids, ids, PackedContext.of(torch.zeros_like(ids)), capture=capture)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_of_tiny_targets_wanders(family):
    """Tests of losslessness need a target that does not repeat one token."""
    target, ids = tiny_target(family), [3]
    for _ in range(24):
        row = torch.tensor([ids])
        context = PackedContext.of(torch.zeros_like(row))
        hidden, _ = target.decoder(row, torch.arange(len(ids))[None], context)
        ids.append(int(target.decoder.logits(hidden[0, -1]).argmax()))
    assert len(set(ids)) >= 12


def test_the_same_seed_gives_the_same_weights():
    first, second, other = tiny_target(seed=1), tiny_target(seed=1), tiny_target(seed=2)
    assert torch.equal(first.decoder.embed_tokens.weight, second.decoder.embed_tokens.weight)
    assert not torch.equal(first.decoder.embed_tokens.weight, other.decoder.embed_tokens.weight)


def test_captured_streams():
    """Entering layer 0 is the embedding; the stream after the last layer, normed, is the hidden state."""
    target = tiny_target()
    hidden, features = run(target, capture=(5, 0, 2))
    last, first, _ = features.split(32, dim=-1)
    assert torch.equal(first, target.decoder.embed_tokens(torch.arange(10)[None]))
    assert torch.equal(target.decoder.norm(last), hidden)
    assert torch.equal(run(target, capture=(2,))[1], features[..., 64:])


def test_no_capture_gives_no_features():
    assert run(tiny_target())[1] is None


@pytest.mark.parametrize("tied", [False, True])
def test_head(tied):
    decoder = tiny_target(tie_word_embeddings=tied).decoder
    assert (decoder.lm_head_weight is decoder.embed_tokens.weight) == tied
    hidden = torch.randn(3, 32)
    want = hidden @ decoder.lm_head_weight.T
    assert torch.allclose(decoder.logits(hidden), want, atol=1e-6)
    decoder.pack()
    assert torch.allclose(decoder.logits(hidden), want, atol=1e-5)
    decoder.to(torch.bfloat16)
    assert decoder.logits(hidden.bfloat16()).dtype == torch.bfloat16


def test_packed_decoder_gives_the_same():
    target = tiny_target("qwen2")
    want = run(target, capture=(1, 2))
    target.decoder.pack()
    got = run(target, capture=(1, 2))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True))
    twin = dataclasses.replace(target, decoder=copy.deepcopy(target.decoder))
    assert torch.allclose(run(twin)[0], want[0], atol=1e-6)


def test_layout_and_properties():
    target = tiny_target("qwen3")
    layout = target.decoder.kv_layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (5, 2, 12)
    assert target.device.type == "cpu"
    assert target.dtype == torch.float32


def test_built_on_meta_it_costs_nothing():
    with torch.device("meta"):
        decoder = Decoder(tiny_config())
    assert all(parameter.is_meta for parameter in decoder.parameters())
    assert not decoder.rotary.cos.is_meta
