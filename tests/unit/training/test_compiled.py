"""Compiling for training."""

import pytest
import torch

from eyas.training.compiled import compile_fixed


def test_the_reduction_that_corrupts_broadcast_gradients_is_off(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: seen.update(kwargs) or function)
    compile_fixed(len)
    assert seen["options"] == {"triton.mix_order_reduction": False}
    assert seen["dynamic"] is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_gradient_of_a_vector_broadcast_into_some_rows():
    def loss(rows, vector, scale):
        joined = torch.cat((rows, vector.expand(rows.shape[0], 40, -1)), dim=1)
        return ((joined * joined.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt() * scale) ** 2).sin().sum()

    gradients = []
    for function in (loss, compile_fixed(loss)):
        torch.manual_seed(0)
        rows = torch.randn(4, 24, 64, device="cuda")
        vector = torch.randn(64, device="cuda", requires_grad=True)
        scale = torch.randn(64, device="cuda", requires_grad=True)
        function(rows, vector, scale).backward()
        gradients.append((vector.grad, scale.grad))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
