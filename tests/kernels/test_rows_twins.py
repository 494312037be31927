"""Metadata of rows, angles and residual norms against their references: on CUDA, else in the interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from eyas.kernels import dispatch
from eyas.kernels.dispatch import use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
gpu = pytest.mark.gpu


def both(call):
    """What the reference and the Triton twin give."""
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(call())
    return results


def table(requests, pages):
    return (torch.randperm(requests * pages) + 1).view(requests, pages).int().to(DEVICE)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 130])
@pytest.mark.parametrize("rows", [1, 5])
@gpu
def test_chain_rows(requests, rows, packed):
    torch.manual_seed(requests)
    # Starts run past the table and past max_position.
    start = torch.randint(0, 30, (requests,)).to(DEVICE)
    counts = torch.randint(0, rows + 1, (requests,)).to(DEVICE)
    pages = table(requests, 6)
    want, got = both(lambda: dispatch.chain_rows(start, counts, pages, rows, 4, 27, packed=packed))
    assert (want.slots == -1).any()
    for name, one, two in zip(want._fields, want, got, strict=True):
        assert one is two if one is None else torch.equal(one, two) and one.dtype == two.dtype, name


@gpu
def test_packed_rows_are_the_rows_that_count_and_then_the_others():
    start, counts = torch.tensor([4, 9, 2], device=DEVICE), torch.tensor([2, 0, 3], device=DEVICE)
    for got in both(lambda: dispatch.chain_rows(start, counts, table(3, 6), 3, 4, 20, packed=True)):
        assert got.q_start.tolist() == [0, 2, 2, 5]
        assert got.positions.tolist() == [4, 5, 2, 3, 4, 6, 9, 10, 11]
        assert got.visible.tolist() == [5, 6, 3, 4, 5, 0, 0, 0, 0]


@pytest.mark.parametrize("first", [0, 3])
@gpu
def test_tree_rows(first):
    torch.manual_seed(first)
    start = torch.tensor([0, 3, 20, 25], device=DEVICE)
    depths, bits = torch.randint(0, 4, (4, 5)).to(DEVICE), torch.randint(0, 2**62, (4, 5)).to(DEVICE)
    pages = table(4, 7)
    want, got = both(lambda: dispatch.tree_rows(start, depths, bits, pages, first, 4, 27))
    assert (want.slots == -1).any()
    assert (want.slots >= 0).any()
    for name, one, two in zip(want._fields, want, got, strict=True):
        assert torch.equal(one, two), name
        assert one.dtype == two.dtype, name


@gpu
def test_angles():
    cos, sin = torch.rand(2, 9, 6, device=DEVICE)
    positions = torch.tensor([[0, 8, 3], [-1, 9, 100]], device=DEVICE)
    for want, got in zip(*both(lambda: dispatch.angles(positions, cos, sin)), strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("size", [72, 576])
@gpu
def test_a_normed_row_has_the_bits_it_has_alone(dtype, size):
    x, weight = torch.randn(7, size, device=DEVICE).to(dtype), torch.rand(size, device=DEVICE).to(dtype)
    want, got = both(lambda: dispatch.rms_norm(x, weight, 1e-5))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    with use_backend("triton"):
        assert torch.equal(dispatch.rms_norm(x[3:4], weight, 1e-5), got[3:4])


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_these_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
