"""The target: one lean decoder for every family of the table in `families.py`.

Layers are pre-norm: attention on the normed stream, added; gated MLP on the normed stream, added. What a
row sees is decided by the attention context that is handed in (paged cache, packed documents), so the same
module prefills, decodes, verifies drafts and teaches.

Legend: T rows (any leading shape), D hidden size, V vocabulary, A captured layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.batch import KVLayout
from eyas.core.model_config import TargetConfig
from eyas.nn.attention import Attention, AttentionContext
from eyas.nn.linear import Linear, PackedWeight, pack_linears
from eyas.nn.mlp import GatedMLP
from eyas.nn.norm import RMSNorm, Stream
from eyas.nn.paged import PagedContext
from eyas.nn.rotary import Rotary


class DecoderLayer(nn.Module):
    """One pre-norm block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            input_size=config.hidden_size,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            window=config.windows[layer] if config.windows else None,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        stream: Stream,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        after: RMSNorm | None = None,
        also: Tensor | None = None,
    ) -> Stream:
        """Stream [..., D], cos and sin [..., head_dim / 2] -> [..., D].

        `after` is the norm that reads the result, where it may be computed here; `also` [..., D] gets a
        copy of the result (see Linear).
        """
        x, norm = stream.before(self.input_layernorm)
        post, hidden = self.post_attention_layernorm, stream.hidden
        stream = self.self_attn(x, cos, sin, context, self.layer, norm=norm, residual=hidden, after=post)
        x, norm = stream.before(post)
        out: Stream = self.mlp(x, norm=norm, residual=stream.hidden, after=after, also=also)
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm and (tied or own) output matrix."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._packed_head = PackedWeight()
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    @property
    def lm_head_weight(self) -> Tensor:
        """Output matrix [V, D]; the embedding table itself where the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def kv_layout(self) -> KVLayout:
        """What the engine must cache per token."""
        return KVLayout(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids and positions [...] -> (normed hidden [..., D], features [..., A * D] or None).

        `capture` holds entering-layer ids (core.capture): id k is the residual stream that enters layer k,
        id num_layers the last layer's output before the final norm. Captured streams are written side by
        side, in the order of `capture`, into one buffer.

        Example, 4 layers, capture (1, 4): features[..., :D] is layer 0's output, features[..., D:] layer 3's.
        """
        assert all(0 <= k <= len(self.layers) for k in capture), capture
        x = self._embed(token_ids)
        cos, sin = self.rotary(positions)
        size = x.shape[-1]
        features = x.new_empty(*x.shape[:-1], len(capture) * size) if capture else None
        stream, norms = Stream(x), self._norms_after(context)
        for place in self._places(0, capture, features):
            place.copy_(x)
        for layer, (block, after) in enumerate(zip(self.layers, norms, strict=True), start=1):
            places = self._places(layer, capture, features)
            # A layer that may use what is not its own writes its stream there itself.
            also = places.pop() if places and after is not None else None
            stream = block(stream, cos, sin, context, after, also)
            for place in places:
                place.copy_(stream.hidden)
        x, norm = stream.before(self.norm)
        return x if norm is None else norm(x), features

    def _norms_after(self, context: AttentionContext) -> list[RMSNorm | None]:
        """The norm that reads each layer's output; in training a layer has its own weights alone (FSDP)."""
        norms: list[Any] = [layer.input_layernorm for layer in self.layers[1:]]
        return [*norms, self.norm] if isinstance(context, PagedContext) else [None] * len(self.layers)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the table. Of up to 16, nn.Embedding's kernel takes 7 us on CUDA and an index 2."""
        weight = self.embed_tokens.weight
        if weight.is_cuda and not torch.is_grad_enabled():
            return weight[token_ids]
        rows: Tensor = self.embed_tokens(token_ids)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., D] after the final norm -> logits [..., V]."""
        return self._packed_head.linear(hidden, self.lm_head_weight)

    def max_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden [..., D] -> (largest logit, first id that has it) [...]; on CUDA without the logits."""
        return self._packed_head.max_linear(hidden, self.lm_head_weight)

    def pack(self) -> None:
        """Keep blocked copies of float32 weights on the CPU (nn/linear.py); elsewhere nothing happens."""
        pack_linears(self)
        self._packed_head.pack(self.lm_head_weight)

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        """Moved or cast weights are not the packed ones."""
        self._packed_head.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @staticmethod
    def _places(layer: int, capture: tuple[int, ...], features: Tensor | None) -> list[Tensor]:
        """Views [..., D] of `features` for the stream entering `layer`, one for each time it is asked for."""
        if features is None:
            return []
        size = features.shape[-1] // len(capture)
        return [features[..., i * size : (i + 1) * size] for i, k in enumerate(capture) if k == layer]


def random_decoder(config: TargetConfig, *, std: float, seed: int) -> Decoder:
    """A decoder on the CPU in float32 with normal weights; for tests and dry runs without a model."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norm scales stay near one, else depth multiplies them up or away.
            parameter.copy_(1 + 0.1 * noise if "norm" in name else std * noise)
    return decoder.eval().requires_grad_(requires_grad=False)
