"""The P-EAGLE head (arXiv 2602.01469, section 2): EAGLE-3 plus a mask token, K guesses in one forward.

Depth 0 of an anchor is EAGLE-3's row: the next token's embedding beside the fused features. Depths 1, 2, ...
know neither, so all of them read the same two learned vectors and tell themselves apart by RoPE position:

    mask_embedding [D]      the row of `mask_token_id` in the embedding table
    mask_hidden [A * Dt]    stands in for the features, before the norms and fc

With `encoded_depths` E, the paper's ablation, they are told their depth too: `depth_encoding` [E, A * Dt] is
added to mask_hidden, row k - 1 at depth k, the last row at depths past E. It starts as zeros.

Layer 0 is EAGLE-3's fused layer, the others are plain; 4 layers in the paper. With `markov_rank` each guess
also hears the guess before it (markov.py).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from eyas.core.errors import ConfigError
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.head_config import HeadConfig, MarkovForm
from eyas.drafters.peagle.markov import MarkovTables, make_markov


class PEagleModel(Eagle3Model):
    """Weights of a P-EAGLE head; mask_hidden starts as N(0, 1), mask_embedding as the table's row."""

    def __init__(self, config: HeadConfig, embed_weight: Tensor) -> None:
        super().__init__(config, embed_weight)
        if config.mask_token_id is None:
            raise ConfigError("a peagle head needs mask_token_id, the id of a token that no text contains")
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.randn(config.feature_size))
        self.mask_embedding = nn.Parameter(embed_weight[self.mask_token_id].detach().clone())
        self.depth_encoding: nn.Parameter | None = None
        if config.encoded_depths:
            self.depth_encoding = nn.Parameter(torch.zeros(config.encoded_depths, config.feature_size))
        self.markov = make_markov(config)

    def encode_depths(self, num_depths: int) -> None:
        """Give depths 1 .. num_depths a vector each, if fewer have one; guesses stay what they were."""
        held = self.config.encoded_depths
        if held >= num_depths:
            return
        last = torch.zeros_like(self.mask_hidden) if self.depth_encoding is None else self.depth_encoding[-1]
        rows = [] if self.depth_encoding is None else [self.depth_encoding.detach()]
        rows.append(last.detach().expand(num_depths - held, -1))
        self.depth_encoding = nn.Parameter(torch.cat(rows))
        self.config = replace(self.config, encoded_depths=num_depths)

    def add_markov(self, form: MarkovForm, rank: int, *, generator: torch.Generator) -> None:
        """Give the head a correction; its guesses stay what they were until that is trained."""
        self.config = replace(self.config, markov_form=form, markov_rank=rank)
        markov = make_markov(self.config)
        self.markov = None if markov is None else markov.to(self.fc.weight.device)
        self.reset_markov(generator)

    def reset_markov(self, generator: torch.Generator) -> None:
        """Draw the correction's weights for inputs of the sizes that this head has."""
        if self.markov is not None:
            self.markov.reset(generator, normed_rms=_rms(self.norm.weight), token_rms=_rms(self.embed_weight))

    def remove_markov(self) -> None:
        """Leave the correction out: the base head is complete by itself."""
        self.config = replace(self.config, markov_form="tables", markov_rank=0)
        self.markov = None

    def markov_tables(self, target_ids: Tensor) -> MarkovTables:
        """What decoding reads of the correction; target_ids int64 [Vd] are those of the draft ids."""
        assert self.markov is not None
        return self.markov.tables(self.embed(target_ids), self.lm_head.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids [...] -> [..., D]; mask_token_id gives mask_embedding."""
        table = super().embed(token_ids)
        return torch.where((token_ids == self.mask_token_id).unsqueeze(-1), self.mask_embedding, table)

    def fused_mask(self) -> Tensor:
        """mask_hidden through the norms and fc, [D]: the hidden state of every depth past 0.

        With encoded depths one state each, [E, D] (kernels/reference/step_expand.MaskRow).
        """
        encoding = self.depth_encoding
        return self.fuse(self.mask_hidden if encoding is None else self.mask_hidden + encoding)

    def masked_states(self, depths: Tensor) -> Tensor:
        """Hidden states [B, m, D] of mask slots at depths int64 [B, m], each at least 1."""
        fused = self.fused_mask()
        if fused.ndim == 1:
            return fused.expand(*depths.shape, -1)
        # A product, not a gather: its backward adds up thousands of slots in a fixed order, and in float32.
        which = (depths - 1).clamp(0, fused.shape[0] - 1).unsqueeze(-1)
        return (which == torch.arange(fused.shape[0], device=fused.device)).to(fused.dtype) @ fused


def _rms(weight: Tensor) -> float:
    """Root of the mean square."""
    return float(weight.detach().float().square().mean().sqrt())
