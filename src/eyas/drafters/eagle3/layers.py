"""The two kinds of decoder layer that a head has.

Layer 0 reads the token embedding e and the hidden state h side by side (EAGLE-3, section 3.1):

    u = [RMSNorm_in(e) ; RMSNorm_hid(h)]   [..., 2D]
    r = h + Attention(u)                   or hidden_norm(h) + ... with norm_before_residual
    out = r + MLP(RMSNorm_post(r))

Layers above it are ordinary Llama layers, D -> D. Module names are those of the public checkpoints.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eyas.drafters.head_config import HeadConfig
from eyas.nn.attention import Attention, AttentionContext
from eyas.nn.mlp import GatedMLP
from eyas.nn.norm import RMSNorm, Stream


class HeadLayer(nn.Module):
    """Decoder layer `index` of a head; index 0 is the fused one."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if index == 0 else None
        self.self_attn = Attention(
            input_size=2 * size if index == 0 else size,
            hidden_size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            window=config.windows[index] if config.windows else None,
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer 0's inputs [..., 2D] and residual [..., D], of embeddings and hidden [..., D].

        The engine makes them in one kernel (kernels/reference/step_expand).
        """
        assert self.hidden_norm is not None, "only layer 0 joins"
        normed: Tensor = self.hidden_norm(hidden)
        inputs = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        return inputs, normed if self.norm_before_residual else hidden

    def forward(
        self,
        stream: Stream,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        keep: Callable[[Tensor], Tensor] | None = None,
        live: Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> Stream:
        """Stream [..., D] -> [..., D]; of layer 0 residual and inputs as `join` makes them.

        `after`, `keep` and `live`: see Attention.
        """
        x, norm = stream.before(self.input_layernorm)
        post = self.post_attention_layernorm
        options = {"norm": norm, "residual": stream.hidden, "after": post, "keep": keep, "live": live}
        stream = self.self_attn(x, cos, sin, context, self.index, **options)
        live = live if keep is None else None
        x, norm = stream.before(post)
        out: Stream = self.mlp(x, norm=norm, residual=stream.hidden, after=after, live=live)
        return out
