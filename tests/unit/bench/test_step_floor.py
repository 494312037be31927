"""Floors against figures worked out by hand, and against the modules' own parameters."""

import pytest
import torch

from eyas.bench.floor import Ceilings, Work, attention, floor_ms, layer, matrix
from eyas.bench.step_floor import draft_work, logits_work, target_work
from eyas.core.tree import DraftTree, TreeBudget
from eyas.drafters.artifact import make_model
from eyas.drafters.shapes import head_shape
from eyas.targets.decoder import Decoder
from eyas.targets.shapes import shape_config

BYTES_ONLY = Ceilings(4.04e12, 1e30)
FLOPS_ONLY = Ceilings(1e30, 7e14)


def weights(module, *without):
    return sum(p.numel() for name, p in module.named_parameters() if not any(w in name for w in without))


def total(work):
    return sum(piece.num_bytes for piece in work), sum(piece.flops for piece in work)


def test_work_is_bound_by_the_slower_of_the_two():
    ceilings = Ceilings(100.0, 10.0)
    assert Work(200.0, 10.0).seconds(ceilings) == 2.0
    assert Work(200.0, 50.0).seconds(ceilings) == 5.0
    assert floor_ms([Work(200.0, 10.0), Work(0.0, 50.0)], ceilings) == 7000.0


def test_an_8b_forward_takes_371_ms_per_thousand():
    config = shape_config("shape:llama-3.1-8b")
    work = target_work(config, num_requests=1, rows=1, context=0, itemsize=2)
    work.append(logits_work(config, num_requests=1, rows=1, itemsize=2))
    # 8.03 B parameters without the embedding table's 0.525 B, two bytes each, at 4.04 TB/s.
    assert floor_ms(work, BYTES_ONLY) == pytest.approx(3.715, abs=0.001)


@pytest.mark.parametrize("name", ["shape:llama-3.1-8b", "shape:smollm2-135m", "shape:tiny"])
def test_target_bytes_are_those_of_its_matrices(name):
    config = shape_config(name)
    with torch.device("meta"):
        decoder = Decoder(config)
    work = target_work(config, num_requests=2, rows=3, context=0, itemsize=2)
    num_bytes, flops = total([*work, logits_work(config, num_requests=2, rows=3, itemsize=2)])
    matrices = weights(decoder, "norm", "embed_tokens", "lm_head") + config.vocab_size * config.hidden_size
    assert num_bytes == 2 * matrices
    assert flops == 2 * 6 * matrices


def test_attention_reads_the_context_once_a_request():
    shape = layer_shape()
    work = attention(5, 8, 100, shape, 2)
    assert work.num_bytes == 5 * 100 * 2 * 2 * 16 * 2
    assert work.flops == 5 * 8 * 100 * (2 * 8 * 16) * 2  # q . k and p . v


def test_windows_bound_the_context():
    from dataclasses import replace

    config = shape_config("shape:tiny")
    windowed = replace(config, windows=(10,) * config.num_layers)
    arguments = {"num_requests": 1, "rows": 1, "itemsize": 4}
    short, _ = total(target_work(config, context=10, **arguments))
    assert total(target_work(windowed, context=50, **arguments))[0] == short
    assert total(target_work(windowed, context=5, **arguments))[0] < short


def layer_shape():
    from eyas.bench.floor import LayerShape

    return LayerShape(
        input_size=64, hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=2, head_dim=16
    )


def test_a_layer_is_four_matrices_and_attention():
    shape = layer_shape()
    work = layer(2, 3, 7, shape, 2)
    sizes = [(8 * 16 + 2 * 2 * 16, 64), (128, 8 * 16), (512, 128), (128, 256)]
    expected = [matrix(6, out, size, 2) for out, size in sizes]
    expected.insert(1, attention(2, 3, 7, shape, 2))
    assert work == expected


@pytest.mark.parametrize("name", ["shape:llama-3.1-8b", "shape:smollm2-135m"])
def test_heads_read_their_weights_as_often_as_they_run(name):
    target = shape_config(name)
    table = torch.empty(target.vocab_size, target.hidden_size, device="meta")
    arguments = {"num_requests": 1, "accepted": 3.7, "context": 0, "itemsize": 2}
    for spec, times in (("shape:eagle3", 7), ("shape:peagle-4", 1)):
        config = head_shape(spec, target)
        with torch.device("meta"):
            model = make_model(config, table)
        once = 2 * weights(model, "norm", "mask", "layers", "lm_head")
        again = 2 * weights(model, "norm", "mask", "fc.")
        num_bytes, _ = total(draft_work(config, DraftTree.chain(7), **arguments))
        assert num_bytes == once + times * again


def test_a_drafts_rows():
    target = shape_config("shape:tiny")
    arguments = {"num_requests": 4, "accepted": 2.5, "context": 0, "itemsize": 2}

    def rows_of(spec, tree):
        """Rows that the lm_head and the down projection are multiplied with, over all forwards."""
        config = head_shape(spec, target)
        work = draft_work(config, tree, **arguments)
        heads = [w for w in work if w.num_bytes == 2 * config.draft_vocab_size * config.hidden_size]
        per_row = 2 * config.draft_vocab_size * config.hidden_size
        return [w.flops / per_row for w in heads]

    # The vocabulary of the tiny shape gives its lm_head a size of its own.
    assert rows_of("shape:peagle-2", DraftTree.chain(3)) == [12]
    assert rows_of("shape:eagle3", DraftTree.chain(3)) == [4, 4, 4]
    assert rows_of("shape:eagle3", TreeBudget(3, 2, 6)) == [4, 8, 8]
    assert rows_of("shape:peagle-2", TreeBudget(3, 2, 6)) == [12]


def test_flops_bound_large_batches():
    config = shape_config("shape:llama-3.1-8b")
    work = target_work(config, num_requests=64, rows=8, context=1024, itemsize=2)
    assert floor_ms(work, FLOPS_ONLY) > 10 > floor_ms(work, BYTES_ONLY)
