"""The P-EAGLE head (arXiv 2602.01469, section 2): EAGLE-3 plus a mask token, K guesses in one forward.

Depth 0 of an anchor is EAGLE-3's row: the next token's embedding beside the fused features. Depths 1, 2, ...
know neither, so all of them read the same two learned vectors and tell themselves apart by RoPE position:

    mask_embedding [D]      the row of `mask_token_id` in the embedding table
    mask_hidden [A * Dt]    stands in for the features, before the norms and fc

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
        self.markov = make_markov(config)

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
        """mask_hidden through the norms and fc, [D]: the hidden state of every depth past 0."""
        return self.fuse(self.mask_hidden)


def _rms(weight: Tensor) -> float:
    """Root of the mean square."""
    return float(weight.detach().float().square().mean().sqrt())
