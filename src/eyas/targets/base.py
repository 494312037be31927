"""A loaded target: decoder, tokenizer and who it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.core.model_config import TargetConfig, TargetIdentity
from eyas.targets.decoder import Decoder


@dataclass(slots=True)
class Target:
    """The model being accelerated, as `targets.load.load_target` returns it."""

    decoder: Decoder
    config: TargetConfig
    tokenizer: Any
    """A transformers tokenizer with its chat template; None where it was not asked for."""
    identity: TargetIdentity
    path: Path | None
    """The folder or file it came from; None for weights made in memory."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of every activation."""
        return self.decoder.embed_tokens.weight.dtype
