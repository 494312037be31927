"""Packed linear layers: same numbers, same bits in every company, and no stale copies."""

import copy

import pytest
import torch

from eyas.nn.linear import Linear, pack_linears


def layer(bias=True, inner=40, outer=24):
    torch.manual_seed(0)
    return Linear(inner, outer, bias=bias).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (2,), (3,), (4,), (17,), (2, 5), (1, 1), ()])
def test_packed_equals_plain(bias, lead):
    linear = layer(bias)
    x = torch.randn(*lead, 40)
    want = linear(x)
    pack_linears(linear)
    assert linear.packed.tensor is not None
    got = linear(x)
    assert got.shape == want.shape
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(("inner", "outer"), [(576, 96), (1536, 64), (33, 7)])
def test_a_row_has_the_same_bits_in_every_company(inner, outer):
    """Why a request's greedy tokens do not depend on how many drafts are verified with them."""
    linear = layer(bias=False, inner=inner, outer=outer)
    pack_linears(linear)
    x = torch.randn(64, inner)
    full = linear(x)
    for rows in (1, 2, 3, 4, 5, 8, 16, 33):
        assert torch.equal(linear(x[:rows]), full[:rows])


def test_strided_input():
    """A slice of a wider buffer is multiplied as what it shows."""
    linear = layer(bias=False)
    pack_linears(linear)
    wide = torch.randn(5, 100)
    assert torch.allclose(linear(wide[:, 30:70]), wide[:, 30:70] @ linear.weight.T, atol=1e-5)


def test_gradients_take_the_plain_way():
    linear = layer()
    pack_linears(linear)
    x = torch.randn(5, 40, requires_grad=True)
    linear(x).sum().backward()
    assert torch.allclose(x.grad, linear.weight.sum(0).expand_as(x), atol=1e-5)


def test_what_is_never_packed():
    trained, half = Linear(8, 8), layer().to(torch.bfloat16)
    pack_linears(trained)
    pack_linears(half)
    assert trained.packed.tensor is None
    assert half.packed.tensor is None


def test_new_weights_drop_the_packed_ones():
    for change in ("load", "cast", "assign"):
        linear = layer()
        pack_linears(linear)
        state = {name: value + 1 for name, value in linear.state_dict().items()}
        if change == "cast":
            linear.double()
        else:
            linear.load_state_dict(state, assign=change == "assign")
        x = torch.randn(5, 40, dtype=linear.weight.dtype)
        assert torch.allclose(linear(x), x @ linear.weight.T + linear.bias, atol=1e-5), change


def test_copies_start_unpacked():
    linear = layer()
    pack_linears(linear)
    twin = copy.deepcopy(linear)
    assert twin.packed.tensor is None
    assert twin.state_dict().keys() == {"weight", "bias"}
    assert torch.allclose(twin(torch.ones(5, 40)), linear(torch.ones(5, 40)), atol=1e-6)
