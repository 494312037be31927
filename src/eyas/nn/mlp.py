"""Gated MLP: down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn
from torch.nn import functional

from eyas.nn.linear import Linear


class GatedMLP(nn.Module):
    """SwiGLU with gate and up in one matrix (rows of gate, then rows of up)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., hidden] -> [..., hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out
