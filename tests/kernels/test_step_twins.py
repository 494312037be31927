"""Kernels between the forwards of a step against their reference twins: on CUDA, else in the interpreter.

As in test_triton_twins.py, the CPU run happens in a child process with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys

import pytest
import torch

from eyas.kernels import dispatch_step
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference.step_expand import MaskRow
from eyas.kernels.reference.step_settle import StateRows
from eyas.kernels.reference.step_take import Source

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter keeps bfloat16 as raw 16-bit integers; float16 it gets right.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-2, "rtol": 2e-2},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
S = 6
"""Request slots; row S is the trash row."""


def _state_rows(num_rows, generator, num_eos=2):
    def number(high):
        return torch.randint(0, high, (S + 1,), generator=generator)

    length = number(20)
    rows = StateRows(
        last_token=number(9),
        length=length,
        live=torch.tensor([True, True, True, False, True, True, False]),
        history=torch.randint(0, 9, (S + 1, 40), generator=generator),
        # From far away to reached by the first token.
        limit=length + 2 + number(2 * num_rows),
        stops_at_eos=number(2).bool(),
        eos_ids=torch.tensor([7, 3][:num_eos], dtype=torch.int64),
    )
    return StateRows(*[tensor.to(DEVICE) for tensor in rows])


@pytest.mark.parametrize("num_eos", [0, 2])
@pytest.mark.parametrize("match", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.gpu
def test_settle(seed, num_drafts, match, num_eos):
    """Few tokens, so that drafts are right now and then; padding, off rows, NaN, limits, ends of text."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([2, 0, 5, S, 3, S], device=DEVICE)
    num_rows = num_drafts + 1
    tokens = torch.randint(0, 9, (6, num_rows), generator=generator)
    right = torch.rand(6, num_drafts, generator=generator) < 0.7
    drafts = torch.where(
        right, tokens[:, :num_drafts], torch.randint(-1, 9, right.shape, generator=generator)
    )
    wider = torch.full((6, num_drafts + 2), 5)  # drafts may be a slice of wider rows
    wider[:, :num_drafts] = drafts
    counts = None if match else torch.randint(1, num_rows + 1, (6,), generator=generator).to(DEVICE)
    bad = (torch.rand(6, num_rows, generator=generator) < 0.1).to(DEVICE)
    state = _state_rows(num_rows, generator, num_eos)
    results = []
    for backend in ("reference", "triton"):
        rows = StateRows(*[tensor.clone() for tensor in state])
        with use_backend(backend):
            out = dispatch_step.settle(
                tokens.to(DEVICE),
                counts,
                bad,
                wider.to(DEVICE)[:, :num_drafts],
                slots,
                rows.length[slots],
                rows,
            )
        results.append([*out, *rows])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("max_len", [None, 12])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.gpu
def test_take(num_drafts, max_len):
    generator = torch.Generator().manual_seed(num_drafts)

    def number(*shape, low=0, high=20):
        return torch.randint(low, high, shape, generator=generator)

    source = Source(
        last_token=number(S + 1),
        length=number(S + 1),
        live=number(S + 1, high=2).bool(),
        drafts=number(S + 1, 5, low=-1),
        draft_limit=number(S + 1, high=6),
        page_table=number(S + 1, 1500).int(),
        temperature=torch.rand(S + 1, 6, generator=generator)[:, 1],
        seeds=number(S + 1, 4)[:, 2],
    )
    source = Source(*[tensor.to(DEVICE) for tensor in source])
    slots = torch.tensor([2, 0, S, 5, S], device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(dispatch_step.take(slots, source, num_drafts, max_len))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "extra"), [(1, None), (4, None), (4, 0), (4, 3), (1, 6)])
@pytest.mark.gpu
def test_expand_and_newest(rows, extra, normed, dtype):
    """Without a mask (EAGLE-3), and with one; a committed token that is the mask token too."""
    generator = torch.Generator().manual_seed(rows)

    def number(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    size, num_requests = 40, 3
    tokens = torch.randint(0, 9, (num_requests, rows), generator=generator).to(DEVICE)
    tokens[1, 0] = 7
    counts = torch.randint(1, rows + 1, (num_requests,), generator=generator).to(DEVICE)
    mask = None if extra is None else MaskRow(7, number(size), number(size))
    arguments = (
        tokens,
        counts,
        number(num_requests * rows, size),
        number(9, size),
        number(size),
        number(size),
    )
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            inputs, residual = dispatch_step.expand(
                *arguments, 1e-5, mask=mask, extra=extra or 0, normed_residual=normed
            )
            results.append((inputs, residual, dispatch_step.newest(residual, counts, 1 + (extra or 0))))
    torch.testing.assert_close(results[1][0], results[0][0], **TOLERANCE[dtype])
    exact = {"atol": 0.0, "rtol": 0.0}
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(other, one, **(TOLERANCE[dtype] if normed else exact))


@pytest.mark.parametrize("shared", [True, False], ids=["one storage", "a tensor a layer"])
@pytest.mark.gpu
def test_move_nodes(shared):
    generator = torch.Generator().manual_seed(0)
    shape = (9, 4, 2, 12)
    if shared:
        storage = torch.randn(2, 3, *shape, generator=generator).to(DEVICE)
        caches = [list(storage[0]), list(storage[1])]
    else:
        caches = [[torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3)] for _ in range(2)]
    page_table = torch.tensor([[3, 7, 1], [8, 2, 5], [4, 6, 0], [0, 0, 0]], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([2, 5, 6, 0], device=DEVICE)
    nodes = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 6], [0, 3, 4, 4], [0, 0, 0, 0]], device=DEVICE)
    counts = torch.tensor([4, 4, 3, 1], device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        copies = [list(torch.stack(layers)) if shared else [x.clone() for x in layers] for layers in caches]
        with use_backend(backend):
            dispatch_step.move_nodes(*copies, page_table, start, nodes, counts, 11)
        results.append(torch.stack([torch.stack(layers) for layers in copies]))
    # Page 0 is scratch: the reference parks unmoved rows there.
    assert torch.equal(results[0][:, :, 1:], results[1][:, :, 1:])
    assert not torch.equal(results[1], torch.stack([torch.stack(layers) for layers in caches]))


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_twins_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
