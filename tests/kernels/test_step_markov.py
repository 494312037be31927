"""Corrected guesses: the reference against a naive loop, Triton against the reference."""

import math

import pytest
import torch

from eyas.kernels import dispatch_step


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


def test_the_example():
    logits = torch.tensor([[[1.0, 9, 0], [5, 4, 3]]])
    table, out = torch.tensor([[0.0], [2], [0]]), torch.tensor([[0.0], [0], [3]])
    for index_map, expected in ((None, [[1, 2]]), (torch.tensor([7, 8, 9]), [[8, 9]])):
        actual = dispatch_step.markov_guess(logits, None, table, out, index_map, silu=False)
        assert actual.tolist() == expected
