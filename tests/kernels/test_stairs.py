"""Attention over a staircase: reference against the slot rule, Triton kernel against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas.kernels.reference import slot_attention as reference
from eyas.kernels.reference.slot_attention import make_stairs, slot_mask, stairs_attention, stairs_mask

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter keeps bfloat16 as raw 16-bit integers; float16 it gets right.
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def packed(lengths, size):
    """Segments of documents with a row of -1 after each (as draft rows have), -1 to the end."""
    segments = torch.full((size,), -1)
    start = 0
    for number, length in enumerate(lengths):
        segments[start : start + length] = number
        start += length + 1
    return segments


def problem(documents, size, depth, *, keep=0.7, padding=3, seed=0, rows=None):
    """(anchors, depths, segments) [M] and stairs of depth-0 rows, then random rollouts sorted by anchor.

    `rows` picks a stretch of the depth-0 rows; None takes all.
    """
    generator = torch.Generator().manual_seed(seed)
    segments = packed(documents, size)
    slots = [(a, 0) for a in range(size)]
    own = []
    for anchor in range(size):
        lengths = [
            k for k in range(depth + 1) if anchor + k < size and segments[anchor + k] == segments[anchor]
        ]
        chain = max(lengths) if segments[anchor] >= 0 else 0
        kept = 0
        while kept < chain and float(torch.rand((), generator=generator)) < keep:
            kept += 1
        begin = len(slots) - size
        slots += [(anchor, k) for k in range(1, kept + 1)]
        own += [begin] * kept
    anchors, depths = (torch.tensor(column) for column in zip(*slots, strict=True))
    seg = segments[anchors]
    first_row = torch.tensor(
        [min((j for j in range(a + 1) if segments[j] == segments[a]), default=a) for a in range(size)]
    )
    first = torch.where(seg >= 0, first_row[anchors], anchors)
    last = torch.where(seg >= 0, anchors + 1, anchors)
    if padding:
        filler = torch.full((padding,), size)
        first, last = torch.cat((first, filler)), torch.cat((last, filler))
        own += [len(own) + i + 1 for i in range(padding)]
        anchors = torch.cat((anchors, torch.zeros(padding, dtype=torch.int64)))
        depths = torch.cat((depths, torch.ones(padding, dtype=torch.int64)))
        seg = torch.cat((seg, torch.full((padding,), -1)))
    own = torch.tensor(own, dtype=torch.int64)
    if rows is not None:
        keep_rows = torch.cat((torch.arange(*rows), torch.arange(size, first.numel())))
        first, last, anchors, depths, seg = (x[keep_rows] for x in (first, last, anchors, depths, seg))
    return (anchors, depths, seg), make_stairs(first[None], last[None], own[None], size)


def tensors(stairs, size, heads, kv_heads, head_dim, dtype, *, device="cpu", seed=1, batch=1):
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_own = stairs.first.shape[1], stairs.own.shape[1]
    shapes = [(num_slots, heads)] + [(size, kv_heads)] * 2 + [(num_own, kv_heads)] * 2
    return [
        torch.randn(batch, *shape, head_dim, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def gradients(function, inputs, stairs, scale=0.3):
    """Outputs and all gradients; the lse of queries that see nothing takes no part."""
    out, lse = function(*inputs, stairs, scale=scale)
    generator = torch.Generator().manual_seed(7)
    probe = torch.randn(out.shape, generator=generator).to(out)
    probe_lse = torch.randn(lse.shape, generator=generator).to(lse)
    seen = torch.isfinite(lse)
    loss = (out * probe).sum() + (torch.where(seen, lse, 0.0) * probe_lse).sum().to(out.dtype)
    return out, lse, torch.autograd.grad(loss, inputs)


CASES = {
    "one document": ([40], 41, 4),
    "packed": ([7, 1, 19, 2], 37, 5),
    "padding in front of the end": ([9, 4], 24, 3),
    "no rollouts": ([12, 5], 20, 0),
    "deep": ([30], 31, 15),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mask_is_the_slot_rule(case):
    documents, size, depth = CASES[case]
    (anchors, depths, segments), stairs = problem(documents, size, depth)
    wanted = slot_mask(anchors, depths, segments, anchors, depths, segments) & (segments >= 0)[:, None]
    assert torch.equal(stairs_mask(stairs, size)[0], wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_name_the_queries_of_every_key_tile(case, monkeypatch):
    monkeypatch.setattr(reference, "KEY_TILE", 8)
    documents, size, depth = CASES[case]
    _, stairs = problem(documents, size, depth)
    mask = stairs_mask(stairs, size)[0]
    num_slots, num_own = mask.shape[0], stairs.own.shape[1]
    for tile, low in enumerate(range(0, size, 8)):
        keys = mask[:, low : min(low + 8, size)]
        seeing, whole = set(keys.any(1).nonzero()[:, 0].tolist()), set(keys.all(1).nonzero()[:, 0].tolist())
        found, full = set(), set()
        for run in (0, 4):
            begin, full_begin, full_end, end = stairs.bounds[0, tile, run : run + 4].tolist()
            assert 0 <= begin <= full_begin <= full_end <= end <= num_slots
            found |= set(range(begin, end))
            full |= set(range(full_begin, full_end))
        assert seeing <= found
        assert full == whole
        # Beside them only queries that see nothing at all.
        assert not mask[sorted(found - seeing)].any()
    for tile, low in enumerate(range(0, num_own, 8)):
        seeing = mask[:, size + low : size + low + 8].any(1).nonzero()[:, 0] - (num_slots - num_own)
        if len(seeing):
            assert int(seeing.max()) < int(stairs.own_bounds[0, tile])


def test_reference_is_softmax_over_the_mask():
    """Rows that see something equal masked SDPA, value and gradient; the others give 0 and -inf."""
    _, stairs = problem([7, 1, 19, 2], 37, 5)
    inputs = tensors(stairs, 37, 4, 2, 8, torch.float64)
    out, lse, grads = gradients(stairs_attention, inputs, stairs)
    mask = stairs_mask(stairs, 37)
    seeing = mask.any(-1)
    assert bool((out[~seeing] == 0).all())
    assert bool((lse[~seeing] == -torch.inf).all())
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    keys, values = torch.cat((copies[1], copies[3]), 1), torch.cat((copies[2], copies[4]), 1)
    rows = []
    lses = []
    for m in range(mask.shape[1]):
        index = mask[0, m].nonzero()[:, 0]
        for h in range(4):
            if not len(index):
                rows.append(torch.zeros(8, dtype=torch.float64))
                lses.append(torch.zeros((), dtype=torch.float64))
                continue
            scores = 0.3 * keys[0, index, h // 2] @ copies[0][0, m, h]
            rows.append(scores.softmax(0) @ values[0, index, h // 2])
            lses.append(scores.exp().sum().log())
    expected, expected_lse = torch.stack(rows).view(out.shape), torch.stack(lses).view(lse.shape)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    generator = torch.Generator().manual_seed(7)
    probe = torch.randn(out.shape, generator=generator).double()
    probe_lse = torch.randn(lse.shape, generator=generator).double()
    theirs = torch.autograd.grad((expected * probe).sum() + (expected_lse * probe_lse).sum(), copies)
    for mine, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def tolerance(dtype):
    return {"atol": 3e-5, "rtol": 3e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}


KERNEL_CASES = {
    "packed": ([7, 1, 19, 2], 37, 5, None, (2, 1, 64), torch.float32),
    "long tile": ([35], 37, 7, None, (4, 1, 16), torch.float32),
    "group of three": ([20, 9], 33, 4, None, (3, 1, 24), torch.float32),
    "one head each, wide": ([17, 11], 31, 3, None, (1, 1, 128), torch.float32),
    "half": ([30], 31, 4, None, (2, 1, 64), HALF),
    "only rows": ([12, 25], 40, 0, None, (2, 1, 16), torch.float32),
    "only rollouts": ([23, 20], 45, 6, (0, 0), (2, 1, 16), torch.float32),
    "later rows": ([33, 20], 55, 0, (20, 55), (2, 1, 16), torch.float32),
}


def small_tiles(monkeypatch):
    from eyas.kernels.triton import slot_tiles

    for name, tile in (("forward", (16, 16)), ("queries", (32, 16)), ("keys", (16, 32))):
        monkeypatch.setitem(slot_tiles.FORCED, name, slot_tiles.Tiles(*tile, 4, 1))


@pytest.mark.parametrize(
    ("case", "tiles"), [*((case, "small") for case in KERNEL_CASES), ("packed", "table"), ("half", "table")]
)
@pytest.mark.gpu
def test_kernel(case, tiles, monkeypatch):
    from eyas.kernels.triton import slot_attention as kernels

    if tiles == "small":
        small_tiles(monkeypatch)
    documents, size, depth, rows, shape, dtype = KERNEL_CASES[case]
    _, stairs = problem(documents, size, depth, rows=rows, padding=0 if depth == 0 else 3)
    stairs = type(stairs)(*(x.to(DEVICE) for x in stairs))
    inputs = tensors(stairs, size, *shape, dtype, device=DEVICE)
    expected = gradients(stairs_attention, inputs, stairs)
    actual = gradients(kernels.stairs_attention, inputs, stairs)
    for mine, other in zip((*actual[:2], *actual[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(mine, other, **tolerance(dtype))


@pytest.mark.gpu
def test_kernel_of_a_batch_with_strides(monkeypatch):
    """Two batch rows of different staircases, and inputs that are slices of wider ones."""
    from eyas.kernels.triton import slot_attention as kernels

    small_tiles(monkeypatch)
    one = problem([14, 9], 26, 4, seed=1)[1]
    two = problem([3, 20], 26, 4, seed=2)[1]
    longest = max(one.own.shape[1], two.own.shape[1])
    parts = []
    for stairs in (one, two):
        missing = longest - stairs.own.shape[1]
        filler = torch.full((1, missing), 26, dtype=torch.int32)
        own = torch.cat((stairs.own, torch.arange(longest - missing + 1, longest + 1)[None].int()), 1)
        parts.append((torch.cat((stairs.first, filler), 1), torch.cat((stairs.last, filler), 1), own))
    stairs = make_stairs(*(torch.cat(column).to(DEVICE) for column in zip(*parts, strict=True)), 26)
    joined = torch.randn(2, stairs.first.shape[1], 4 + 2 + 2, 16, device=DEVICE, requires_grad=True)
    results = []
    for function in (stairs_attention, kernels.stairs_attention):
        q, k, v = joined[:, :, :4], joined[:, :, 4:6], joined[:, :, 6:]
        results.append(gradients(function, [q, k[:, :26], v[:, :26], k[:, 26:], v[:, 26:]], stairs))
    for mine, other in zip((*results[1][:2], *results[1][2]), (*results[0][:2], *results[0][2]), strict=True):
        torch.testing.assert_close(mine, other, **tolerance(torch.float32))


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu
def test_torch_compile_keeps_the_operator():
    """Traced whole, forward and backward, with the same results."""
    from eyas.kernels.triton import slot_attention as kernels

    _, stairs = problem([9, 5], 16, 3)
    stairs = type(stairs)(*(x.to(DEVICE) for x in stairs))
    inputs = tensors(stairs, 16, 2, 1, 16, torch.float32, device=DEVICE)
    backend = "aot_eager" if INTERPRETED else "inductor"
    compiled = torch.compile(kernels.stairs_attention, fullgraph=True, backend=backend)
    expected, actual = (gradients(function, inputs, stairs) for function in (stairs_attention, compiled))
    for mine, other in zip((*actual[:2], *actual[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(mine, other, **tolerance(torch.float32))


@pytest.mark.skipif(INTERPRETED, reason="shapes of real heads")
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)], ids=str)
@pytest.mark.gpu
def test_bfloat16_gradients_at_real_shapes(heads):
    """Direction and length of every gradient against float32, over 2,000 rows in three documents."""
    from eyas.kernels.triton import slot_attention as kernels

    _, stairs = problem([1200, 300, 490], 2000, 7)
    stairs = type(stairs)(*(x.to(DEVICE) for x in stairs))
    half = tensors(stairs, 2000, *heads, torch.bfloat16, device=DEVICE)
    wide = [x.detach().float().requires_grad_() for x in half]
    scale = heads[2] ** -0.5
    actual = gradients(kernels.stairs_attention, half, stairs, scale)
    expected = gradients(stairs_attention, wide, stairs, scale)
    for mine, other in zip((actual[0], *actual[2]), (expected[0], *expected[2]), strict=True):
        a, b = mine.float().flatten(), other.flatten()
        assert float(a @ b / (a.norm() * b.norm())) > 0.999
        assert 0.99 < float(a.norm() / b.norm()) < 1.01


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    """To PTX, without a device: heads of 128 and 64, groups of 4 and 3."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compile_stairs.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("wgmma") == 8
