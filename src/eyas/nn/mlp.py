"""Gated MLP: down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn

from eyas.nn.linear import Linear
from eyas.nn.norm import RMSNorm, Stream


class GatedMLP(nn.Module):
    """SwiGLU with gate and up in one matrix (rows of gate, then rows of up)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        after: RMSNorm | None = None,
        live: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Stream:
        """Compute residual + mlp(norm(x)): x and residual [..., hidden] -> [..., hidden].

        `after`, `live` and `also`: see Linear.
        """
        inner = self.gate_up_proj.gated(x, norm=norm, live=live)
        return self.down_proj.add(inner, residual, after, live, also)
