"""One fixed run of a head, to tell whether two heads are the same function."""

import torch
from torch import Tensor

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.peagle.model import PEagleModel
from eyas.nn.packed import PackedContext

ROWS, DEPTHS = 12, 3


@torch.no_grad()
def probe(model: Eagle3Model) -> Tensor:
    """Logits [DEPTHS, ROWS, Vd] of random rows: features first, then the head's own output (or mask rows)."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    features = torch.randn(1, ROWS, config.feature_size, generator=generator)
    token_ids = torch.randint(0, config.vocab_size, (1, ROWS), generator=generator)
    context = PackedContext.of(torch.zeros(1, ROWS, dtype=torch.int64))
    hidden, logits = model.fuse(features), []
    for depth in range(DEPTHS):
        normed, hidden = model(model.embed(token_ids), hidden, torch.arange(ROWS)[None] + depth, context)
        logits.append(model.logits(normed)[0])
        if isinstance(model, PEagleModel):
            token_ids = torch.full_like(token_ids, model.mask_token_id)
            hidden = model.masked_states(torch.full((1, ROWS), depth + 1))
    return torch.stack(logits)
