"""Streams that layers write into the buffer of features themselves: the bits of what each layer gives.

On the CPU by the reference; the kernels through the interpreter, in a child process, and on CUDA (gpu).
"""

import os
import subprocess
import sys

import pytest
import torch

from eyas.bench.step_profile import profile
from eyas.kernels.dispatch import use_backend
from eyas.nn.packed import PackedContext
from eyas.nn.paged import PagedContext, allocate_cache, uniform_batch
from eyas.nn.tree_paged import tree_batch
from tiny import tiny_target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
CAPTURES = [(0, 1, 3, 5), (3, 0, 3, 0), (5,), ()]
"""Of 5 layers: the embedding, first, middle and last; twice the same; the last alone."""
# Small products hold all of K, or go through it in parts (rows > 64); the wide one's norm adds K-splits.
SMALL = {"hidden_size": 64, "head_dim": 16}
WIDE = {"hidden_size": 4096, "intermediate_size": 2048, "head_dim": 64}


def _forward(decoder, kind, *, each=4, num_requests=2):
    """A function of `capture`: verification of as many rows each, after 5 and 9 cached ones.

    The second request of a chain has one row less, which is padding.
    """
    device = decoder.embed_tokens.weight.device
    dtype = decoder.embed_tokens.weight.dtype
    ids = torch.arange(num_requests * each, device=device).view(num_requests, each) % 64
    start = torch.tensor([5, 9], device=device).repeat(num_requests // 2)
    pages = -(-(9 + each) // 16)
    table = torch.arange(1, num_requests * pages + 1, device=device, dtype=torch.int32).view(-1, pages)
    cache = allocate_cache(decoder.kv_layout, num_requests * pages + 1, 16, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    for x in (*cache.keys, *cache.values):
        x.copy_(torch.randn(x.shape, generator=generator))
    common = {"page_table": table, "page_size": 16, "max_position": 9 + each, "max_visible": 16 * pages}
    if kind == "tree":
        # Two drafts after the last token, and one after the first of them.
        depths, bits = (
            torch.tensor([row], device=device).repeat(num_requests, 1)
            for row in ([0, 1, 1, 2], [1, 3, 5, 11])
        )
        batch = tree_batch(token_ids=ids, start=start, depths=depths, bits=bits, first=0, **common)
    else:
        counts = torch.full_like(start, each)
        counts[1] -= 1
        batch = uniform_batch(token_ids=ids, start=start, counts=counts, **common)
    return lambda capture: decoder(
        batch.token_ids, batch.positions, PagedContext(cache, batch), capture=capture
    )


def _watched(decoder, forward, capture):
    """(hidden, features) of a forward, what was expected, and whether each layer was handed a place."""
    streams, handed = [], []

    def watch(_, given, out):
        streams.append(out.hidden.clone())
        handed.append(given[5] is not None)

    hooks = [layer.register_forward_hook(watch) for layer in decoder.layers]
    first = decoder.embed_tokens.register_forward_hook(lambda _, __, out: streams.append(out.clone()))
    with torch.no_grad():
        hidden, features = forward(capture)
    for hook in (*hooks, first):
        hook.remove()
    if len(streams) == len(decoder.layers):  # on CUDA rows of the table are not the module's
        streams.insert(0, None)
    return hidden, features, streams, handed


def _check(decoder, forward, capture):
    plain = _watched(decoder, forward, ())[0]
    hidden, features, streams, handed = _watched(decoder, forward, capture)
    assert torch.equal(hidden, plain)
    assert handed == [k in capture for k in range(1, len(decoder.layers) + 1)]
    if not capture:
        assert features is None
        return
    pieces = features.split(hidden.shape[-1], dim=-1)
    for k, piece in zip(capture, pieces, strict=True):
        if streams[k] is not None:
            assert torch.equal(piece, streams[k]), k
            assert piece.abs().max() > 0
    assert features.is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("capture", CAPTURES, ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_on_the_cpu(kind, capture, packed):
    decoder = tiny_target().decoder
    if packed:
        decoder.pack()
    with use_backend("reference"):
        _check(decoder, _forward(decoder, kind), capture)


def test_layers_in_training_are_handed_nothing():
    """There the stream is copied, and has a gradient."""
    decoder = tiny_target().decoder
    ids = torch.arange(10)[None]

    def forward(capture):
        return decoder(ids, ids, PackedContext.of(torch.zeros_like(ids)), capture=capture)

    _, features, streams, handed = _watched(decoder, forward, (3, 0, 3))
    assert not any(handed)
    assert torch.equal(features, torch.cat((streams[3], streams[0], streams[3]), dim=-1))
    decoder.embed_tokens.weight.requires_grad_(requires_grad=True)
    forward((3, 0, 3))[1][..., 32:64].sum().backward()
    assert torch.equal(decoder.embed_tokens.weight.grad[:10], torch.ones(10, 32))


@pytest.mark.parametrize("capture", CAPTURES[:2], ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.gpu
def test_by_kernels(kind, capture):
    decoder = tiny_target(**SMALL).decoder.to(DEVICE, torch.float16 if INTERPRETED else torch.bfloat16)
    with use_backend("triton"):
        _check(decoder, _forward(decoder, kind), capture)


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs")
@pytest.mark.parametrize(("shape", "each"), [(SMALL, 4), (SMALL, 40), (WIDE, 4), (WIDE, 40)], ids=str)
@pytest.mark.gpu
def test_in_a_graph_a_captured_layer_costs_no_launch(shape, each):
    """Only the embedding and what is captured again are copied."""
    profile()
    decoder = tiny_target(std=0.02, **shape).decoder.to(DEVICE, torch.bfloat16)
    forward = _forward(decoder, "chain", each=each)
    counts, results = {}, {}
    for capture in ((), (1, 3, 5), (0, 1, 3, 5, 3)):
        _check(decoder, forward, capture)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            results[capture] = forward(capture)[1]
        counts[capture] = profile(graph.replay).launches
    assert counts[()] > 5 * len(decoder.layers)
    assert counts[1, 3, 5] == counts[()]
    assert counts[0, 1, 3, 5, 3] == counts[()] + 2
    few, many = (results[capture].split(shape["hidden_size"], dim=-1) for capture in list(results)[1:])
    assert torch.equal(torch.cat(few, -1), torch.cat((*many[1:4],), -1))
    assert torch.equal(many[2], many[4])


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
