"""Corrected guesses: the reference against a naive loop, Triton against the reference."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from eyas.kernels import dispatch, dispatch_step
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference import step_markov
from eyas.kernels.settings import use_pdl
from eyas.kernels.triton.step_markov import Tiling, keys_of_depths, launch, tiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter gets bfloat16 products wrong.
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def naive(logits, pre, table, out, index_map, silu):
    """Python numbers, one request and one column at a time."""
    answers = []
    for request in range(len(logits)):
        before, ids = None, []
        for depth, row in enumerate(logits[request].tolist()):
            values = list(row)
            if before is not None:
                state = table[before].tolist()
                if pre is not None:
                    state = [a + b for a, b in zip(pre[request, depth].tolist(), state, strict=True)]
                if silu:
                    state = [x / (1 + math.exp(-x)) for x in state]
                state = torch.tensor(state).to(out.dtype).tolist()
                values = [
                    value + sum(a * b for a, b in zip(weights, state, strict=True))
                    for value, weights in zip(values, out.tolist(), strict=True)
                ]
            before = values.index(max(values))
            ids.append(before if index_map is None else int(index_map[before]))
        answers.append(ids)
    return torch.tensor(answers)


def whole(generator, low, high, *shape, dtype=torch.float32):
    """Whole numbers: every sum of them is exact, and many are equal."""
    return torch.randint(low, high, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_pre", [False, True])
@pytest.mark.parametrize("has_map", [False, True])
def test_the_reference_is_the_formula(dtype, has_pre, has_map):
    generator = torch.Generator().manual_seed(1)
    logits = whole(generator, -3, 4, 5, 4, 37, dtype=dtype)
    pre = whole(generator, -2, 3, 5, 4, 6, dtype=dtype) if has_pre else None
    table, out = (whole(generator, -2, 3, 37, 6, dtype=dtype) for _ in range(2))
    index_map = torch.arange(37) * 3 + 1 if has_map else None
    actual = dispatch_step.markov_guess(logits, pre, table, out, index_map, silu=False)
    assert torch.equal(actual, naive(logits, pre, table, out, index_map, silu=False))
    # It must be the correction that is tested.
    assert not torch.equal(actual, logits.argmax(-1) if index_map is None else index_map[logits.argmax(-1)])


def test_the_reference_with_silu():
    generator = torch.Generator().manual_seed(2)
    logits, pre = torch.randn(6, 3, 41, generator=generator), torch.randn(6, 3, 8, generator=generator)
    table, out = torch.randn(2, 41, 8, generator=generator).unbind(0)
    actual = dispatch_step.markov_guess(logits, pre, table, out, None, silu=True)
    assert torch.equal(actual, naive(logits, pre, table, out, None, silu=True))
    assert not torch.equal(actual, dispatch_step.markov_guess(logits, pre, table, out, None, silu=False))


def test_passes_are_the_sequence(monkeypatch):
    """All depths at once, until nothing changes, is depth by depth; and takes fewer products."""
    generator = torch.Generator().manual_seed(3)
    products = []
    silu = functional.silu
    monkeypatch.setattr(step_markov.functional, "silu", lambda x: products.append(len(x)) or silu(x))
    for scale in (0.3, 3.0):  # few guesses change, nearly all do
        logits, pre = torch.randn(9, 7, 60, generator=generator), torch.randn(9, 7, 8, generator=generator)
        table, out = torch.randn(60, 8, generator=generator), scale * torch.randn(60, 8, generator=generator)
        for before in (pre, None):
            products.clear()
            expected = step_markov.markov_guess(logits, before, table, out, None, silu=True)
            assert len(products) == 6
            products.clear()
            actual = step_markov.guess_in_passes(logits, before, table, out, None, silu=True)
            assert torch.equal(actual, expected)
            assert products[0] == 9 * 6
            assert len(products) <= 6
            assert sum(products) < (3 if scale < 1 else 5) * products[0]


def test_passes_end_on_logits_that_are_no_numbers():
    logits = torch.tensor([[[1.0, math.nan, 0], [5, 4, math.nan], [math.inf, -math.inf, 1]]])
    table, out = torch.ones(3, 1), torch.tensor([[math.nan], [0], [3]])
    guesses = step_markov.guess_in_passes(logits, None, table, out, None, silu=False)
    assert ((guesses >= 0) & (guesses < 3)).all()


def test_the_example():
    logits = torch.tensor([[[1.0, 9, 0], [5, 4, 3]]])
    table, out = torch.tensor([[0.0], [2], [0]]), torch.tensor([[0.0], [0], [3]])
    for index_map, expected in ((None, [[1, 2]]), (torch.tensor([7, 8, 9]), [[8, 9]])):
        actual = dispatch_step.markov_guess(logits, None, table, out, index_map, silu=False)
        assert actual.tolist() == expected


def twins(logits, pre, table, out, index_map, silu):
    """(Triton's answer, the reference's)."""
    arguments = [x if x is None else x.to(DEVICE) for x in (logits, pre, table, out, index_map)]
    with use_backend("reference"):
        expected = dispatch_step.markov_guess(*arguments, silu=silu)
    with use_backend("triton"):
        return dispatch_step.markov_guess(*arguments, silu=silu), expected


# A lone request, more than a block of them, tiles that do not fit, one depth, ranks that are no power of two.
SHAPES = [(1, 7, 300, 8), (3, 2, 261, 33), (17, 3, 128, 20), (2, 1, 70, 128)]
KINDS = [(HALF, False, False), (HALF, True, True), (torch.float32, True, False), (torch.float32, False, True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "has_pre", "has_map"), KINDS)
@pytest.mark.parametrize(("requests", "depths", "vocab", "rank"), SHAPES)
def test_equal_where_sums_are_exact(requests, depths, vocab, rank, dtype, has_pre, has_map):
    """Whole numbers have many ties, and no order of a sum changes them."""
    generator = torch.Generator().manual_seed(vocab)
    logits = whole(generator, -9, 10, requests, depths, vocab, dtype=dtype)
    pre = whole(generator, -2, 3, requests, depths, rank, dtype=dtype) if has_pre else None
    table, out = (whole(generator, -2, 3, vocab, rank, dtype=dtype) for _ in range(2))
    index_map = torch.randperm(3 * vocab, generator=generator)[:vocab] if has_map else None
    actual, expected = twins(logits, pre, table, out, index_map, silu=False)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [
        (Tiling(64, 3, 64, 16, 4), HALF),
        (Tiling(64, 3, 16, 16, 4), HALF),
        (Tiling(64, 3, 32, 16, 4), torch.float32),
        (Tiling(256, 1, 64, 64, 8), HALF),
    ],
)
def test_other_cuts(tiles, dtype):
    """Several tiles a program, whose last has none; R in parts; more requests at once than there are."""
    generator = torch.Generator().manual_seed(4)
    logits, pre = (whole(generator, -9, 10, 18, 3, size, dtype=dtype).to(DEVICE) for size in (270, 50))
    table, out = (whole(generator, -2, 3, 270, 50, dtype=dtype).to(DEVICE) for _ in range(2))
    with torch.no_grad():
        actual = launch(tiles, logits, pre, table, out, None, silu=False)
    with use_backend("reference"):
        assert torch.equal(actual, dispatch_step.markov_guess(logits, pre, table, out, None, silu=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_every_guess_is_a_largest(dtype):
    """With silu and real numbers: what is chosen, given what was chosen before it, is no worse than any."""
    generator = torch.Generator().manual_seed(5)
    logits, pre = (torch.randn(19, 4, size, generator=generator).to(dtype) for size in (500, 24))
    table, out = torch.randn(2, 500, 24, generator=generator).to(dtype).unbind(0)
    actual, expected = (ids.cpu() for ids in twins(logits, pre, table, out, None, silu=True))
    assert (actual == expected).float().mean() > 0.9
    for depth in range(1, 4):
        row = torch.nn.functional.silu(pre[:, depth].float() + table[actual[:, depth - 1]].float())
        values = logits[:, depth].float() + row.to(dtype).float() @ out.float().T
        chosen = values.gather(1, actual[:, depth : depth + 1])[:, 0]
        # One unit in the last place of a row's number may differ.
        assert (chosen >= values.max(1).values - (0.1 if dtype == HALF else 1e-4)).all()


@pytest.mark.gpu
def test_infinities_and_both_zeros():
    """Whole rows of -inf choose the first id; -0.0 ties with 0.0; the padding of a tile is never chosen."""
    logits = torch.full((2, 3, 70), float("-inf"))
    logits[1, 0, 20:] = torch.where(torch.arange(50) % 2 == 0, -0.0, 0.0)
    logits[1, 1, 69] = float("inf")
    table, out = torch.ones(70, 8), torch.zeros(70, 8)
    actual, expected = twins(logits.to(HALF), None, table.to(HALF), out.to(HALF), None, silu=False)
    assert torch.equal(actual, expected)
    assert actual.tolist() == [[0, 0, 0], [20, 69, 0]]


@pytest.mark.gpu
def test_nan_hurts_its_own_request_only():
    generator = torch.Generator().manual_seed(6)
    logits = whole(generator, -9, 10, 5, 3, 300, dtype=HALF)
    table, out = (whole(generator, -2, 3, 300, 8, dtype=HALF) for _ in range(2))
    sound, _ = twins(logits, None, table, out, torch.arange(300) + 7, silu=False)
    logits[1, 0], logits[3, 1, 5] = float("nan"), float("nan")
    broken, _ = twins(logits, None, table, out, torch.arange(300) + 7, silu=False)
    assert torch.equal(broken[[0, 2, 4]], sound[[0, 2, 4]])
    assert ((broken >= 7) & (broken < 307)).all()


@pytest.mark.gpu
def test_parts_of_wider_tensors():
    """Rows of a wider tensor are copied, and nothing but the rows is read."""
    generator = torch.Generator().manual_seed(7)
    logits = whole(generator, -9, 10, 3, 4, 400, dtype=HALF)
    table, out = (whole(generator, -2, 3, 300, 16, dtype=HALF) for _ in range(2))
    actual, expected = twins(logits[:, 1:, 50:350], None, table[:, 4:12], out[:, 8:], None, silu=False)
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="a product's bits are the device's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "rank"), [(14848, 128), (14848, 32), (3001, 100), (40000, 128)])
def test_a_request_gets_the_same_bits_in_every_batch(vocab, rank, dtype):
    """The largest sum of every tile: requests alone, in other places and among 3, 16, 17, 33 and 70."""
    generator = torch.Generator().manual_seed(8)
    logits, pre = (torch.randn(70, 7, size, generator=generator) for size in (vocab, rank))
    table, out = torch.randn(2, vocab, rank, generator=generator).unbind(0)
    logits, pre, table, out = (x.to(DEVICE, dtype) for x in (logits, pre, table, out))

    def keys(rows):
        tiles = tiling(vocab, rank, out.element_size(), len(logits[rows]))
        with torch.no_grad():
            return keys_of_depths(tiles, logits[rows], pre[rows], table, out, silu=True)

    together = keys(slice(0, 70))
    assert together[1:].unique().numel() > 0.9 * together[1:].numel()
    for size in (1, 3, 16, 17, 33):
        for first in range(0, 70 - size, 7):
            part = slice(first, first + size)
            assert torch.equal(keys(part), together[:, part]), (size, first)
    order = torch.randperm(70, generator=generator).to(DEVICE)
    assert torch.equal(keys(order), together[:, order])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
@pytest.mark.parametrize("pdl", ["off", "late", "early", "auto"])
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_in_a_graph(requests, pdl):
    """Captured after a product that makes the logits, and run again with other numbers in the same memory."""
    with use_pdl(pdl), torch.no_grad():
        shape = {"device": DEVICE, "dtype": torch.bfloat16}
        normed = torch.empty(requests * 7, 256, **shape)
        head = torch.randn(14848, 256, **shape)
        pre, table, out = (torch.randn(*size, 128, **shape) for size in ((requests, 7), (14848,), (14848,)))
        index_map = torch.arange(14848, device=DEVICE) * 2

        def draft():
            logits = dispatch.linear(normed, head).view(requests, 7, -1)
            return dispatch_step.markov_guess(logits, pre, table, out, index_map, silu=True)

        normed.normal_()
        draft()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = draft()
        for _ in range(5):
            normed.normal_()
            graph.replay()
            with use_pdl("off"):
                assert torch.equal(captured, draft())


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "gpu"]
    child = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "25 passed" in child.stdout
