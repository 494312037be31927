"""One learned row in many slots."""

import torch

from eyas.training.repeat import repeat_row, sum_rows


def test_copies_and_the_sum_of_their_gradients():
    row = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weights = torch.arange(24, dtype=torch.float64).view(2, 4, 3)
    out = repeat_row(row, 2, 4)
    assert out.shape == (2, 4, 3)
    assert torch.equal(out[1, 3], row)
    (out * weights).sum().backward()
    assert row.grad.tolist() == [84.0, 92.0, 100.0]


def test_operators_hold_to_their_contract():
    row = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for batch, count in ((2, 4), (1, 1), (2, 0)):
        torch.library.opcheck(repeat_row, (row, batch, count))
        torch.library.opcheck(sum_rows, (torch.randn(batch, count, 3),))
