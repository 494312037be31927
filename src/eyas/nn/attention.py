"""Grouped-query attention whose keys are chosen by a context that the caller passes in.

A context stores or arranges K and V and says what each row may see:
    PagedContext  (nn/paged.py)   the engine's KV cache
    PackedContext (nn/packed.py)  whole sequences at once, causal within packed documents
    TTTContext, ChainContext (nn/rollout.py)  training slots (anchor, depth)
    SlotContext   (nn/packed.py)  the same slots through a dense mask: the twin in tests
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.kernels import dispatch
from eyas.nn.linear import Linear
from eyas.nn.norm import RMSNorm, Stream
from eyas.nn.paged import PagedContext


class AttentionContext(Protocol):
    """Where keys and values live and which of them a row sees."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend queries [..., H, dh] given this forward's keys and values [..., KV, dh] of `layer`.

        Both are already rotated. Returns [..., H, dh]. `layer` counts from 0 within one model.
        """
        ...


class Attention(nn.Module):
    """Projections, optional q/k norm (Qwen3), rotation, attention through the context, output projection.

    `input_size` may differ from `hidden_size` (EAGLE-3's first layer reads 2 * hidden).
    """

    def __init__(
        self,
        *,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.window = window
        self.q_size, self.kv_size = num_heads * head_dim, num_kv_heads * head_dim
        # Rows of q, then k, then v: one matrix product instead of three.
        self.qkv_proj = Linear(input_size, self.q_size + 2 * self.kv_size, bias=bias)
        self.o_proj = Linear(self.q_size, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        layer: int,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        after: RMSNorm | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
        live: Tensor | None = None,
    ) -> Stream:
        """Compute residual + attention(norm(x)): x [..., input_size] -> [..., hidden_size], as residual is.

        cos and sin are [..., head_dim / 2]. `keep` picks the rows whose output is wanted, of any [T, width];
        the others are keys and values only. Rows from `live` (int32 [1]) on may be left out (see Linear;
        `after` too).
        """
        lead = x.shape[:-1]
        fused: Tensor = self.qkv_proj(x, norm=norm, live=live)
        if isinstance(context, PagedContext):
            out = context.attend_rows(
                layer,
                fused,
                cos,
                sin,
                num_heads=self.num_heads,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                scale=self.scale,
                window=self.window,
            )
        else:
            q, k, v = self._heads(fused, cos, sin)
            out = context.attend(layer, q, k, v, scale=self.scale, window=self.window)
        out = out.reshape(*lead, self.q_size)
        if keep is not None:
            out, residual, live = keep(out), None if residual is None else keep(residual), None
        return self.o_proj.add(out, residual, after, live)

    def _heads(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fused rows [..., (H + 2 KV) dh] -> q [..., H, dh] and k, v [..., KV, dh], q and k rotated."""
        num_heads, joined = self.num_heads, self.num_heads + self.num_kv_heads
        heads = fused.reshape(*fused.shape[:-1], -1, self.head_dim)
        qk, v = heads[..., :joined, :], heads[..., joined:, :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[..., :num_heads, :]), self.k_norm(qk[..., num_heads:, :])), dim=-2)
        # q and k rotate by the same angles, in one call.
        qk = dispatch.apply_rope(qk, cos, sin)
        return qk[..., :num_heads, :], qk[..., num_heads:, :], v
