"""The frozen target over packed rows, in this process: features for the drafter and what the teacher says.

The teacher's distribution is never stored: the final hidden state [.., D] is, and the loss multiplies it
with the output matrix chunk by chunk. Its final norm is already applied (Decoder.forward does that).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eyas.core.model_config import TargetIdentity
from eyas.data.features import FeatureStore
from eyas.data.loader import Batch
from eyas.kernels.settings import use_pdl
from eyas.nn.packed import PackedContext
from eyas.targets.decoder import Decoder


class Captured(NamedTuple):
    """What the target knows about rows [B, n]."""

    features: Tensor
    """[B, n, A * D], streams entering the aux layers"""
    hidden: Tensor
    """[B, n, D] after the final norm: lm_head's input"""
    choices: Tensor
    """int64 [B, n], argmax over the target's whole vocabulary: its greedy token AFTER each position"""


def teacher_choices(hidden: Tensor, lm_head_weight: Tensor, *, chunk_rows: int = 4096) -> Tensor:
    """Argmax of hidden [..., D] @ lm_head_weight [V, D]^T in chunks of rows: int64 [...]."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    parts = [functional.linear(part, lm_head_weight).argmax(-1) for part in torch.split(flat, chunk_rows)]
    return torch.cat(parts).view(hidden.shape[:-1])


def capture(decoder: Decoder, batch: Batch, aux_layers: tuple[int, ...]) -> Captured:
    """Run the target over packed rows, no gradients; documents don't see each other."""
    # A sharded layer's weights are written by the kernel just before it, and with dependent launches
    # (kernels/triton/pdl) a norm reads its weight without waiting for that one.
    with torch.no_grad(), use_pdl("off"):
        context = PackedContext.of(batch.segments, batch.positions)
        hidden, features = decoder(batch.ids.long(), batch.positions.long(), context, capture=aux_layers)
        assert features is not None
        return Captured(features, hidden, teacher_choices(hidden, decoder.lm_head_weight))


CaptureFn = Callable[[Decoder, Batch, tuple[int, ...]], Captured]
"""`capture`, or what stands in for it."""


def capture_meta(identity: TargetIdentity, aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """What captured features depend on besides the tokens."""
    return {"target": identity.name, "fingerprint": identity.fingerprint, "aux_layers": list(aux_layers)}


def captured_before(features: FeatureStore) -> CaptureFn:
    """`capture` that reads what `eyas data capture` wrote; batches need their `source`."""

    def read(decoder: Decoder, batch: Batch, aux_layers: tuple[int, ...]) -> Captured:
        del aux_layers  # the store was checked against them when it was opened
        assert batch.source is not None
        place, dtype = decoder.embed_tokens.weight.device, decoder.embed_tokens.weight.dtype
        taken, hidden, choices = (x.to(place) for x in features.read(batch.source.cpu()))
        return Captured(taken.to(dtype), hidden.to(dtype), choices)

    return read
