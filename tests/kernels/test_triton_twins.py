"""Each Triton kernel against its reference twin: on CUDA with marker gpu, else through the interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is imported, so the CPU run of this file
happens in a child process (test_twins_in_the_interpreter).
"""

import os
import subprocess
import sys

import pytest
import torch

from eyas.kernels import dispatch
from eyas.kernels.dispatch import use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter keeps bfloat16 as raw 16-bit integers and multiplies those; float16 it gets right.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]


def _tolerance(dtype):
    # float32 sums differ in order only; bfloat16 keeps 8 bits.
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


def _problem(*, rows, cached, page_size, heads, kv_heads, head_dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pages_each = [-(-(c + r) // page_size) for c, r in zip(cached, rows, strict=True)]
    total = sum(pages_each) + 1
    order = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(rows), max(pages_each), dtype=torch.int32)
    for request, count in enumerate(pages_each):
        for column in range(count):
            table[request, column] = order.pop()
    keys = torch.randn(total, page_size, kv_heads, head_dim, generator=generator)
    values = torch.randn(total, page_size, kv_heads, head_dim, generator=generator)
    # Memory that nobody may read.
    keys[0], values[0] = float("nan"), float("nan")
    queries = torch.randn(sum(rows), heads, head_dim, generator=generator)
    visible = torch.cat([c + 1 + torch.arange(r) for c, r in zip(cached, rows, strict=True)]).int()
    q_start = torch.tensor([0, *rows]).cumsum(0).int()
    moved = [x.to(DEVICE, dtype) for x in (queries, keys, values)]
    return [*moved, table.to(DEVICE), q_start.to(DEVICE), visible.to(DEVICE)]


CASES = {
    "one row": {"rows": [1], "cached": [5]},
    "chains": {"rows": [4, 4, 4], "cached": [0, 17, 130]},
    "ragged chunks": {"rows": [3, 22, 1], "cached": [9, 0, 64]},
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", [4] if INTERPRETED else [4, 16])
@pytest.mark.gpu
def test_paged_attention(case, dtype, window, page_size):
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 16, "page_size": page_size, "dtype": dtype}
    problem = _problem(**CASES[case], **shape)
    problem[-1][-1] = 0  # a padding row
    arguments = {"scale": 0.25, "max_rows": 40, "max_visible": 200, "window": window}
    with use_backend("reference"):
        expected = dispatch.paged_attention(*problem, **arguments)
    with use_backend("triton"):
        actual = dispatch.paged_attention(*problem, **arguments)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, **_tolerance(dtype))


TREES = {
    "after prefixes": ([4, 4], [7, 20], [1, 3, 5, 11, 1, 3, 7, 9]),
    "after nothing, beside padding": ([4, 4, 2], [0, 20, 0], [1, 3, 5, 11, 1, 3, 7, 9, 0, 0]),
    "all after nothing": ([3], [0], [1, 3, 5]),
    "below rows of an earlier forward": ([2, 2], [5, 61], [0b1001, 0b10011, 0b1101, 0b10001]),
    "bit 62": ([2], [70], [2**63 - 1, 2**62 + 5]),
}


@pytest.mark.parametrize("case", TREES, ids=str)
@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.gpu
def test_paged_attention_of_a_tree(case, window):
    rows, cached, bits = TREES[case]
    shape = {"page_size": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    # Room for what bits of earlier forwards name.
    problem = _problem(rows=[r + 64 for r in rows], cached=cached, **shape)
    total = sum(rows)
    problem[0] = problem[0][:total].contiguous()
    problem[4] = torch.tensor([0, *rows]).cumsum(0).int().to(DEVICE)
    visible = [c for c, r in zip(cached, rows, strict=True) for _ in range(r)]
    problem[5] = torch.tensor(visible, dtype=torch.int32, device=DEVICE)
    arguments = {"scale": 0.25, "max_rows": max(rows), "max_visible": max(cached), "window": window}
    arguments["tree_bits"] = torch.tensor(bits, device=DEVICE)
    with use_backend("reference"):
        expected = dispatch.paged_attention(*problem, **arguments)
    with use_backend("triton"):
        actual = dispatch.paged_attention(*problem, **arguments)
    seeing = torch.tensor(bits, device=DEVICE) > 0
    assert (expected[seeing] != 0).any(-1).all()
    assert (actual[~seeing] == 0).all()
    torch.testing.assert_close(actual, expected, **_tolerance(torch.float32))


@pytest.mark.gpu
def test_a_tree_that_outgrows_the_page_table():
    """Bits past the last page see nothing, and nothing past the table is read."""
    shape = {"page_size": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    problem = _problem(rows=[2], cached=[6], **shape)
    problem[5] = torch.tensor([6, 6], dtype=torch.int32, device=DEVICE)
    arguments = {"scale": 0.25, "max_rows": 2, "max_visible": 8}
    results = []
    for backend in ("reference", "triton"):
        for bits in ([1, 3], [1 + 4, 3 + 64]):
            with use_backend(backend):
                moved = torch.tensor(bits, device=DEVICE)
                results.append(dispatch.paged_attention(*problem, **arguments, tree_bits=moved))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **_tolerance(torch.float32))


@pytest.mark.gpu
def test_write_kv_skips_slot_minus_one():
    keys, values = torch.randn(2, 3, 2, 16, device=DEVICE)
    slots = torch.tensor([5, -1, 9], device=DEVICE)
    caches = [torch.zeros(4, 4, 2, 16, device=DEVICE) for _ in range(4)]
    with use_backend("reference"):
        dispatch.write_kv(keys, values, caches[0], caches[1], slots)
    with use_backend("triton"):
        dispatch.write_kv(keys, values, caches[2], caches[3], slots)
    # Page 0 is scratch: the reference parks unwritten rows there.
    assert torch.equal(caches[0][1:], caches[2][1:])
    assert torch.equal(caches[1][1:], caches[3][1:])
    assert torch.equal(caches[2].view(16, 2, 16)[5], keys[0])
    assert int((caches[2] != 0).any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.gpu
def test_norm_and_rope(dtype):
    x = torch.randn(5, 72, device=DEVICE).to(dtype)
    weight = torch.rand(72, device=DEVICE).to(dtype) + 0.5
    # A slice of a wider row, as q and k are slices of fused qkv.
    heads = torch.randn(5, 96, device=DEVICE).to(dtype)[:, 16:64].reshape(5, 3, 16)
    cos, sin = torch.rand(2, 5, 8, device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append((dispatch.rms_norm(x, weight, 1e-5), dispatch.apply_rope(heads, cos, sin)))
    torch.testing.assert_close(results[1][0], results[0][0], **_tolerance(dtype))
    torch.testing.assert_close(results[1][1], results[0][1], **_tolerance(dtype))


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_twins_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
