"""Decode attention: close to its reference, and the same bits whatever else is in the batch.

On CUDA with marker gpu at real shapes, else through the interpreter in a child process with small ones.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_problem import PAGE, Problem

from eyas.kernels.reference.paged_attention import paged_attention as reference_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies bfloat16 as integers; float16 it gets right.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
SHAPES = [(6, 2, 16)] if INTERPRETED else [(32, 8, 128), (9, 3, 64), (14, 2, 64)]
DTYPES = [HALF, torch.float32]

# Numbers of keys below are for chunks of 256.
UNIT = 4 if INTERPRETED else 1

gpu = pytest.mark.gpu
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# The interpreter does the same sums in every type.
bits_dtype = pytest.mark.parametrize("dtype", [HALF] if INTERPRETED else DTYPES, ids=str)


def problem(shape, dtype, before, rows, **options):
    before = [max(keys // UNIT, 0) for keys in before]
    return Problem(*shape, before=before, rows=rows, dtype=dtype, device=DEVICE, **options)


def close(actual, expected, dtype):
    # float32 sums differ in order only; bfloat16 keeps 8 bits, and rotated rows differ by one of them.
    tolerance = {"atol": 3e-5, "rtol": 3e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(actual, expected, **tolerance)


def use(monkeypatch, **constants):
    from eyas.kernels.triton import paged_attention

    for name, value in constants.items():
        monkeypatch.setattr(paged_attention, name, value)


# The interpreter, which is slow, meets each two of these together, but not each three.
WAYS = [
    (dtype, fused, window)
    for dtype, fused, window in product(DTYPES, (True, False), (None, 70 // UNIT))
    if not INTERPRETED or (dtype == HALF) ^ fused ^ (window is None)
]


@pytest.mark.parametrize(("dtype", "fused", "window"), WAYS, ids=str)
@each_shape
@gpu
def test_close_to_the_reference(shape, dtype, fused, window, monkeypatch):
    use(monkeypatch, FUSE_ROTATION=fused)
    case = problem(shape, dtype, [0, 300, 513], 5)
    fields = case.chain(counts=[5, 3, 5])
    out, keys, values = case.attend(fields, window=window)
    expected, expected_keys, expected_values = case.attend(fields, "reference", window=window)
    close(out, expected, dtype)
    assert (out[1, 3:] == 0).all()
    assert (out[1, :3] != 0).any(-1).all()
    # Page 0 is scratch. Triton rounds a rotated key once, torch twice.
    close(keys[1:], expected_keys[1:], dtype)
    assert torch.equal(values[1:], expected_values[1:])


@each_shape
@pytest.mark.parametrize("fused", [True, False])
@gpu
def test_sinks_and_norms(shape, fused, monkeypatch):
    use(monkeypatch, FUSE_ROTATION=fused)
    case = problem(shape, torch.float32, [3, 290], 2)
    norms = (
        {} if fused else {name: torch.rand(shape[2], device=DEVICE) + 0.5 for name in ("q_norm", "k_norm")}
    )
    options = {"sinks": torch.linspace(-2, 3, shape[0], device=DEVICE), "eps": 1e-5, **norms}
    close(
        case.attend(case.chain(), **options)[0],
        case.attend(case.chain(), "reference", **options)[0],
        torch.float32,
    )


def test_sinks_against_loops():
    """A sink joins the sum of weights and nothing else."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(n, 2, 4, generator=generator).double() for n in (3, 8, 8))
    sinks = torch.tensor([0.5, -1.0]).double()
    table, q_start = torch.zeros(1, 1).int(), torch.tensor([0, 3]).int()
    visible = torch.tensor([5, 0, 8]).int()
    pages = (keys[None], values[None])
    out = reference_attention(
        queries, *pages, table, q_start, visible, scale=0.3, max_rows=3, max_visible=8, sinks=sinks
    )
    for t, seen in enumerate(visible.tolist()):
        for h in range(2):
            weights = (0.3 * (keys[:seen, h] @ queries[t, h])).exp()
            want = (weights[:, None] * values[:seen, h]).sum(0) / (weights.sum() + sinks[h].exp())
            torch.testing.assert_close(out[t, h], want if seen else torch.zeros(4).double())


@bits_dtype
@each_shape
@gpu
def test_a_row_decoded_alone_equals_the_row_verified_with_others(shape, dtype):
    """Plain decoding and verification of 8 rows, across the end of a chunk."""
    rows = 4 if INTERPRETED else 8
    case = problem(shape, dtype, [250, 40], rows)
    before = case.before[0]
    out, keys, values = case.attend(case.chain())
    for row in range(rows):
        alone = case.only(0, slice(row, row + 1), before=before + row)
        # Plain decoding has written the rows before this one already.
        alone.keys, alone.values = keys, values
        got, got_keys, _ = alone.attend(alone.chain())
        assert torch.equal(got[0, 0], out[0, row]), row
        assert torch.equal(got_keys[1:], keys[1:])


@bits_dtype
@each_shape
@pytest.mark.parametrize("window", [None, 100 // UNIT])
@gpu
def test_bits_do_not_depend_on_the_batch(shape, dtype, window):
    case = problem(shape, dtype, [600, 0, 255], 4)
    out = case.attend(case.chain(), window=window)[0]
    for request in range(3):
        alone = case.only(request, slice(0, 4))
        for bound in (case.before[request] + 4, 608 // UNIT) if request < 2 else (608 // UNIT,):
            got = alone.attend(alone.chain(), window=window, max_visible=bound)[0]
            assert torch.equal(got[0], out[request]), (request, bound)


@bits_dtype
@each_shape
@pytest.mark.parametrize("window", [None, 100 // UNIT])
@gpu
def test_bits_do_not_depend_on_the_plan(shape, dtype, window, monkeypatch):
    """A program a unit, a chunk, several chunks or all."""
    from eyas.kernels.triton import paged_attention_plan as plans

    case = problem(shape, dtype, [600 if INTERPRETED else 1100, 0, 255], 3)
    ways = [
        {"state": 0, "splits": 1},
        {"state": "unit"},
        {"state": "chunk", "splits": 1},
        {"state": "chunk", "splits": 2},
        {"state": 0, "splits": 1, "block_m": 32 if dtype == HALF else 16},
    ]
    if not INTERPRETED:
        ways += [
            {"state": "unit", "stages": 4},
            {"state": "chunk", "splits": 2, "stages": 4},
            {"state": 0, "splits": 1, "stages": 4},
            {"state": 0, "splits": 1, "block_m": 16},
        ]
    choose, results = plans.choose, []
    for way in ways:

        def forced(*given, way=way):
            keys = {"unit": plans.unit(dtype), "chunk": plans.CHUNK, 0: 0}[way["state"]]
            most = max(-(-given[3] // keys), 1) if keys else 1
            splits = most if way["state"] == "unit" else min(way["splits"], most)
            return replace(choose(*given), **way | {"state": keys, "splits": splits})

        monkeypatch.setattr(plans, "choose", forced)
        results.append(case.attend(case.chain(), window=window)[0])
        assert torch.equal(results[-1], results[0]), way
    close(results[0], case.attend(case.chain(), "reference", window=window)[0], dtype)


@bits_dtype
@each_shape
@gpu
def test_bits_do_not_depend_on_the_number_of_rows(shape, dtype):
    """1 to 64 rows, with and without the rotation inside the attention kernel."""
    most = 64 if not INTERPRETED else 17
    case = problem(shape, dtype, [230], most)
    out, keys, _ = case.attend(case.chain())
    for rows in (1, 5, 16) if INTERPRETED else (1, 2, 5, 8, 16, 33, 63):
        part = case.only(0, slice(0, rows))
        got, got_keys, _ = part.attend(part.chain())
        assert torch.equal(got[0], out[0, :rows]), rows
        slots = part.chain().slots
        assert torch.equal(got_keys.flatten(0, 1)[slots], keys.flatten(0, 1)[slots])


@each_shape
@gpu
def test_bits_do_not_depend_on_whether_one_kernel_does_it_all(shape, monkeypatch):
    case = problem(shape, HALF, [300, 17], 3)
    results = []
    for fused in (True, False):
        use(monkeypatch, FUSE_ROTATION=fused)
        results.append(case.attend(case.chain()))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one[1:] if one.shape[0] > 2 else one, two[1:] if two.shape[0] > 2 else two)


@each_shape
@gpu
def test_other_chunks_give_other_bits(shape, monkeypatch):
    """Equality above is no accident: the order of sums shows in the bits."""
    case = problem(shape, torch.float32, [600], 2)
    out = case.attend(case.chain())[0]
    from eyas.kernels.triton import paged_attention_plan

    monkeypatch.setattr(paged_attention_plan, "CHUNK", 128 // UNIT)
    other = case.attend(case.chain())[0]
    assert not torch.equal(other, out)
    close(other, out, torch.float32)


@bits_dtype
@each_shape
@gpu
def test_a_chain_as_a_tree(shape, dtype):
    """Rows 0, 1, 2, ... below each other see what causal rows see, at the same KV indices."""
    rows = 6
    case = problem(shape, dtype, [254, 3], rows)
    bits = [(1 << (row + 1)) - 1 for row in range(rows)]
    as_tree = case.attend(case.tree(list(range(rows)), bits))
    as_chain = case.attend(case.chain())
    for one, two in zip(as_tree, as_chain, strict=True):
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))


@bits_dtype
@each_shape
@gpu
def test_rows_of_a_tree_against_their_path_as_a_chain(shape, dtype):
    """Root, two children, a grandchild below the second: each row is the last of a chain of its ancestors."""
    parents, depths, bits = [0, 0, 0, 2], [0, 1, 1, 2], [0b1, 0b11, 0b101, 0b1101]
    case = problem(shape, dtype, [255], 4)
    out = case.attend(case.tree(depths, bits))[0]
    for row in range(4):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        chain = case.only(0, slice(0, len(path)))
        chain.qkv = case.qkv[:, path]
        close(chain.attend(chain.chain())[0][0, -1], out[0, row], dtype)


@each_shape
@pytest.mark.parametrize("rows", [1, 64])
@gpu
def test_a_tree_has_the_same_bits_in_any_batch(shape, rows):
    rows = min(rows, 7) if INTERPRETED else min(rows, 62)
    depths = [0, *[1 + (row % 3 > 0) for row in range(1, rows)]]
    bits = [1 | 1 << row | (2 if depth == 2 else 0) for row, depth in enumerate(depths)]
    case = problem(shape, HALF, [500, 9, 250], rows)
    out = case.attend(case.tree(depths, bits))[0]
    for request in range(3):
        alone = case.only(request, slice(0, rows))
        got = alone.attend(alone.tree(depths, bits), max_visible=700 // UNIT)[0]
        assert torch.equal(got[0], out[request]), request
    if not INTERPRETED:
        assert torch.isfinite(out).all()


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA graph")
@each_shape
@gpu
def test_in_a_graph(shape):
    """Captured once with short requests, replayed with long ones."""
    case = problem(shape, HALF, [1200, 900], 8)
    fields = case.chain()
    expected = case.attend(fields)[0]
    static = [x.clone() for x in fields[:4]]
    static[2].clamp_(max=9)
    short = type(fields)(*static)
    case.attend(short, max_visible=2048)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        # cos and sin are made inside from the positions, and max_visible is given: nothing is read back.
        out = case.attend(short, max_visible=2048)[0]
    static[2].copy_(fields.visible)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_these_in_the_interpreter():
    pytest.importorskip("triton")
    assert PAGE == 16
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
