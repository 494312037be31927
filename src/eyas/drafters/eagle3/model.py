"""The EAGLE-3 head (arXiv 2503.01840, section 3.1): fc, one fused decoder layer, norm, its own lm_head.

    features [..., A * Dt]  --fuse-->  h [..., D]            (depth 0: the target's captured states)
    token ids [...]         --embed--> e [..., D]
    (e, h, positions) --layers--> h'  --norm--> normed --lm_head--> logits [..., Vd]
                                  h' (or normed, with norm_output) is the hidden state of the next depth

The same module trains (TTTContext, ChainContext) and runs (PagedContext). It never sees the target: the
embedding table is handed in and shared, unless the config says that the head owns a trained one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.core.batch import KVLayout
from eyas.core.errors import HeadMismatchError
from eyas.drafters.eagle3.layers import HeadLayer
from eyas.drafters.head_config import HeadConfig
from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_expand import MaskRow
from eyas.nn.attention import AttentionContext
from eyas.nn.linear import Linear
from eyas.nn.norm import RMSNorm, Stream
from eyas.nn.paged import PagedContext
from eyas.nn.rotary import Rotary


class Eagle3Model(nn.Module):
    """Weights of a head. `embed_weight` [V, D] is kept by reference (a buffer outside the state dict).

    With `config.trained_embedding` it is copied into a parameter of the same name instead.
    """

    embed_weight: Tensor

    def __init__(self, config: HeadConfig, embed_weight: Tensor) -> None:
        super().__init__()
        self.config = config
        wanted = (config.vocab_size, config.hidden_size)
        if tuple(embed_weight.shape) != wanted:
            raise HeadMismatchError(
                f"the head reads embeddings of shape {list(wanted)}, the table has {list(embed_weight.shape)}"
            )
        if config.trained_embedding:
            self.embed_weight = nn.Parameter(embed_weight.detach().clone())
        else:
            self.register_buffer("embed_weight", embed_weight.detach(), persistent=False)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers)
            if config.fc_norm
            else None
        )
        self.fc = Linear(config.feature_size, size, bias=False)
        self.layers = nn.ModuleList(HeadLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    @property
    def kv_layout(self) -> KVLayout:
        """What the head caches per token."""
        return self.config.kv_layout

    def fuse(self, features: Tensor, live: Tensor | None = None) -> Tensor:
        """Captured states of A layers side by side [..., A * Dt] -> [..., D]; live: see nn.linear.Linear."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            features = torch.cat(normed, dim=-1)
        fused: Tensor = self.fc(features, live=live)
        return fused

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids [...] -> [..., D]."""
        return functional.embedding(token_ids, self.embed_weight)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on embeddings and hidden [..., D] at RoPE positions [...].

        Returns (normed [..., D], the lm_head's input; feedback [..., D], the next depth's hidden state).
        """
        hidden = self.run(*self.first.join(embeddings, hidden), positions, context)
        normed: Tensor = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    @property
    def first(self) -> HeadLayer:
        """Layer 0."""
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        return layer

    def run(
        self,
        inputs: Tensor,
        residual: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Callable[[Tensor], Tensor] | None = None,
        live: Tensor | None = None,
    ) -> Tensor:
        """Inputs [..., 2D] and residual [..., D] through all layers: [..., D] before the final norm.

        `keep` picks the rows that are wanted, of any [T, width]: the last layer only attends to the others.
        Rows from `live` (int32 [1]) on may be left out.
        """
        cos, sin = self.rotary(positions)
        stream = Stream(residual, inputs)
        for layer, after in zip(self.layers, self._norms_after(context), strict=True):
            stream = layer(stream, cos, sin, context, keep if layer is self.layers[-1] else None, live, after)
        return stream.hidden

    def _norms_after(self, context: AttentionContext) -> list[RMSNorm | None]:
        """See targets/decoder.py; what reads the last layer's output depends on the caller."""
        norms: list[Any] = [layer.input_layernorm for layer in self.layers[1:]]
        return [*norms, None] if isinstance(context, PagedContext) else [None] * len(self.layers)

    def expand(
        self,
        tokens: Tensor,
        counts: Tensor,
        hidden: Tensor,
        mask: MaskRow | None = None,
        extra: int = 0,
        *,
        packed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Embed and join rows in one kernel: tokens [B, R] beside hidden [B * R, D], as `run` takes them.

        See kernels/reference/step_expand for what counts, mask, extra and packed do.
        """
        first = self.first
        assert first.hidden_norm is not None
        return dispatch_step.expand(
            tokens,
            counts,
            hidden,
            self.embed_weight,
            first.input_layernorm.weight,
            first.hidden_norm.weight,
            first.input_layernorm.eps,
            mask=mask,
            extra=extra,
            normed_residual=first.norm_before_residual,
            packed=packed,
        )

    def guess(self, hidden: Tensor, index_map: Tensor | None) -> Tensor:
        """Likeliest target ids [...] of hidden [..., D] before the final norm; no logits are kept."""
        weight = self.lm_head.weight
        return self.lm_head.packed.max_linear(hidden, weight, index_map, norm=self.norm)[1]

    def logits(self, normed: Tensor) -> Tensor:
        """[..., D] after the final norm -> logits over the draft vocabulary [..., Vd]."""
        out: Tensor = self.lm_head(normed)
        return out
