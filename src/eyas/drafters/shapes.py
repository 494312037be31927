"""Heads with random weights, in the shape of a target: for measuring a step without training anything.

shape:eagle3       one layer, as EAGLE-3
shape:peagle-4     P-EAGLE with 4 layers; any number
shape:peagle-4-hidden-128, shape:peagle-4-tables-32
                   the same with a correction by the token before: its form and rank
"""

import re
from typing import cast

import torch
from torch import Tensor

from eyas.core.errors import ConfigError
from eyas.core.model_config import TargetConfig
from eyas.core.vocab_map import VocabMap
from eyas.drafters.artifact import LoadedHead, make_model
from eyas.drafters.head_config import HeadConfig, MarkovForm
from eyas.nn.random_weights import fill

PREFIX = "shape:"
WEIGHT_STD = 0.02
DRAFT_VOCAB_SIZE = 32000
"""Of published heads for targets with 128 thousand tokens."""
DRAFT_VOCAB_SIZES = {49152: 15872}
"""Target vocabulary -> Vd where fewer do: SmolLM2, as in its shipped head."""


def is_shape(spec: str) -> bool:
    """Whether a user's word names a head's shape and not a head."""
    return spec.startswith(PREFIX)


def head_shape(spec: str, target: TargetConfig) -> HeadConfig:
    """The config that a word of this file names for a target; ConfigError for other words."""
    correction = r"(?:-(?P<form>tables|hidden)-(?P<rank>[1-9]\d{0,3}))?"
    match = re.fullmatch(rf"shape:(?:(eagle3)|peagle-([1-9]\d?){correction})", spec)
    if match is None:
        raise ConfigError(
            f"drafter {spec!r} is no shape; write shape:eagle3, shape:peagle-LAYERS or "
            "shape:peagle-LAYERS-hidden-RANK"
        )
    usual = DRAFT_VOCAB_SIZES.get(target.vocab_size, DRAFT_VOCAB_SIZE)
    draft_vocab_size = min(usual, target.vocab_size)
    if match[1]:
        return HeadConfig.for_target(target, kind="eagle3", draft_vocab_size=draft_vocab_size)
    return HeadConfig.for_target(
        target,
        kind="peagle",
        num_layers=int(match[2]),
        draft_vocab_size=draft_vocab_size,
        mask_token_id=target.vocab_size - 1,
        markov_rank=int(match["rank"] or 0),
        markov_form=cast("MarkovForm", match["form"] or "tables"),
    )


def random_head(spec: str, target: TargetConfig, embed_weight: Tensor, *, seed: int = 0) -> LoadedHead:
    """A head for a target whose embedding table [V, D] is given: on its device, in its dtype."""
    config = head_shape(spec, target)
    device, dtype = embed_weight.device, embed_weight.dtype
    with torch.device("meta"):
        model = make_model(config, embed_weight)
    fill(model, device=device, dtype=dtype, std=WEIGHT_STD, seed=seed)
    model.rotary.to(device)
    step = config.vocab_size / config.draft_vocab_size
    ids = (torch.arange(config.draft_vocab_size, dtype=torch.float64) * step).long()
    return LoadedHead(model, VocabMap(ids, config.vocab_size).to(device), {})
