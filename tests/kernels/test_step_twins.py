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
from eyas.kernels.reference.step_settle import StateRows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
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


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_twins_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
