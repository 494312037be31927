"""Forced acceptance against its reference twin: on CUDA with marker gpu, else through the interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from eyas.kernels import dispatch_step
from eyas.kernels.dispatch import use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7, 8])
@pytest.mark.gpu
def test_force(num_drafts):
    """Lengths from none to all, missing drafts, positions and slots far beyond the table."""
    generator = torch.Generator().manual_seed(num_drafts)

    def numbers(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    drafts = numbers(9, 20, num_drafts)
    # Columns of a wider tensor, as the engine's are.
    drafts = torch.cat((drafts, drafts), 1)[:, :num_drafts]
    drafts[:5, num_drafts // 2 :] = -1
    arguments = (
        numbers(9, 20, num_drafts + 1),
        drafts,
        numbers(10**6, 20),
        numbers(500, 20),
        numbers(num_drafts + 1, 97),
    )
    with use_backend("reference"):
        expected = dispatch_step.force(*arguments)
    with use_backend("triton"):
        actual = dispatch_step.force(*arguments)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "gpu"]
    child = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "5 passed" in child.stdout
