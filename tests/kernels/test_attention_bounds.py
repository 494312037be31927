"""The attention kernels touch nothing outside their tensors, whatever the page table holds past a request.

Results hide a wrong address that is masked later, and the hardware one that falls into another tensor. So the
interpreter holds all addresses of each load and store against the tensors of the launch. In a child process.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_problem import Problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process")


@pytest.fixture
def accesses(monkeypatch):
    """Number of addresses of each load and store so far; each access has been found to lie in one tensor."""
    from triton.runtime import interpreter

    builder, tensors, seen = interpreter.interpreter_builder, [], []
    launch, load, store = (
        interpreter.GridExecutor.__call__,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def launched(self, *arguments, **options):
        tensors[:] = [(x.data_ptr(), _end(x)) for x in arguments if isinstance(x, torch.Tensor)]
        return launch(self, *arguments, **options)

    def check(pointers, mask):
        addresses = pointers.data[mask.data.astype(bool)]
        seen.append(addresses.size)
        if addresses.size:
            low, high = int(addresses.min()), int(addresses.max())
            high += pointers.get_element_ty().primitive_bitwidth // 8
            assert any(begin <= low and high <= end for begin, end in tensors), "outside every tensor"

    def checked_load(pointers, mask, *rest):
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers, values, mask, *rest):
        check(pointers, mask)
        return store(pointers, values, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    return seen


def _end(tensor):
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else tensor.data_ptr()


def _force(monkeypatch, kind):
    from eyas.kernels.triton import paged_attention_plan as plans

    choose, keys = plans.choose, {"unit": 32, "chunk": plans.CHUNK, "walk": 0}[kind]

    def forced(*given):
        splits = -(-given[3] // keys) if kind == "unit" else 1
        return replace(choose(*given), state=keys, splits=splits)

    monkeypatch.setattr(plans, "choose", forced)


@interpreted
@pytest.mark.parametrize("page", [-1, 2**30])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["unit", "chunk", "walk"])
def test_every_address_lies_in_a_tensor(kind, fused, page, accesses, monkeypatch):
    from eyas.kernels.triton import paged_attention

    monkeypatch.setattr(paged_attention, "FUSE_ROTATION", fused)
    _force(monkeypatch, kind)
    case = Problem(6, 2, 12, before=[77, 0, 30], rows=3, dtype=torch.float32, device="cpu")
    for request, used in enumerate((5, 1, 3)):
        case.table[request, used:] = page
    case.attend(case.chain(counts=[3, 1, 2]), max_visible=100)
    case.attend(case.chain(counts=[3, 1, 2]), max_visible=100, window=20)
    case.attend(case.tree([0, 1, 1], [0b1, 0b11, 0b101]), max_visible=100)
    assert sum(accesses) > 0


@interpreted
def test_an_address_outside_is_found(accesses, monkeypatch):
    """A page table that names a page past the cache, for keys that are seen."""
    case = Problem(6, 2, 12, before=[20], rows=2, dtype=torch.float32, device="cpu")
    fields = case.chain()
    case.table[0, 0] = len(case.keys)
    with pytest.raises(Exception, match="outside every tensor"):
        case.attend(fields)
    assert accesses


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_these_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
