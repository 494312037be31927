"""Products of one block of rows of which some count: cut so that threads load those alone, same bits."""

import os
from dataclasses import replace

import pytest
import torch

from eyas.kernels import dispatch
from eyas.kernels.triton import linear_kernels
from eyas.kernels.triton.linear import launch
from eyas.kernels.triton.linear_tiling import MOST_DEPTH, SHARED_BYTES, WIDE, tiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = {
    "gate_up": (14336, 4096, True),
    "down": (4096, 14336, False),
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "first qkv": (6144, 8192, False),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [65, 112, 128])
def test_a_count_changes_the_cut_but_nothing_that_bits_depend_on(name, rows):
    out, size, gated = SHAPES[name]
    whole, counted = (tiling(out, size, rows, gated=gated, counted=c) for c in (False, True))
    assert whole.tma
    assert not counted.tma
    assert counted.block_rows >= rows
    assert counted.splits == whole.splits
    assert counted.length(size) == whole.length(size)
    assert counted.length(size) % MOST_DEPTH == 0
    assert counted.block_out >= WIDE


@pytest.mark.parametrize("rows", [8, 64, 129, 512])
def test_fewer_and_more_rows_are_cut_as_without_a_count(rows):
    for out, size, gated in SHAPES.values():
        assert tiling(out, size, rows, gated=gated, counted=True) == tiling(out, size, rows, gated=gated)


@pytest.mark.skipif(not INTERPRETED, reason="on the interpreter")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the rows that are NaN
def test_rows_that_do_not_count_are_neither_read_nor_written(gated):
    size, out, rows = 512, 32, 112
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, size, generator=generator)
    weight = torch.randn(out * (2 if gated else 1), size, generator=generator)
    cut = replace(
        tiling(4096, 4096, rows, counted=True),
        block_out=16,
        splits=1 if gated else 2,
        parallel=not gated,
    )
    whole = torch.empty(rows, out)
    launch(cut, x, weight, whole, gated=gated)
    for live in (0, 1, 64, 78, 112):
        given, some = x.clone(), torch.full_like(whole, 7.0)
        given[live:] = torch.nan
        launch(cut, given, weight, some, gated=gated, live=torch.tensor([live], dtype=torch.int32))
        assert torch.equal(some[:live], whole[:live])
        assert (some[live:] == 7.0).all()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", SHAPES)
def test_a_counted_product_fits_and_loads_by_threads(name, tmp_path):
    from test_linear_compiles import _compile, _stack_bytes

    out, size, gated = SHAPES[name]
    tiles = tiling(out, size, 112, gated=gated, counted=True)
    constants = {"OUT": out, "K": size, "BLOCK_OUT": tiles.block_out, "BLOCK_ROWS": tiles.block_rows}
    constants |= {"BLOCK_K": tiles.block_k, "TMA": False, "PDL": 1, "PREFETCH": 0, "SPLITS": tiles.splits}
    constants |= {"LENGTH": tiles.length(size), "PARALLEL": tiles.parallel, "GATED": gated}
    absent = ["bias_ptr", "residual_ptr", "arrived_ptr", *([] if tiles.parallel else ["partial_ptr"])]
    compiled = _compile(linear_kernels.linear_kernel, constants, tiles, absent)
    assert _stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_BYTES
    ptx = compiled.asm["ptx"]
    assert "wgmma" in ptx
    assert "cp.async.cg" in ptx
    assert "cp.async.bulk" not in ptx


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="real shapes")
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_that_counts_has_the_bits_it_has_alone(name):
    out, size, gated = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(out * (2 if gated else 1), size, **options) * size**-0.5
    x = torch.randn(112, size, **options)
    product = dispatch.gated_linear if gated else dispatch.linear
    with torch.no_grad():
        whole = product(x, weight)
        alone = product(x[:8], weight)
        for live in (1, 64, 65, 78, 112):
            given = x.clone()
            given[live:] = torch.nan
            count = torch.tensor([3, live], dtype=torch.int32, device="cuda")[1:]
            got = product(given, weight, live=count)
            assert torch.equal(got[:live], whole[:live]), f"{live} rows"
            assert torch.equal(got[: min(live, 8)], alone[:live])
