"""Who a target is: a fingerprint that does not depend on file format, folder or dtype.

SHA-256 over the shapes and rotary settings, and over values at fixed places of every tensor, rounded to
bfloat16: the same model in float32 and bfloat16, as a GGUF file or its converted copy, gives the same
digest. It tells models apart; it does not protect against somebody who wants two models to look alike.
"""

import hashlib
import json

import torch

from eyas.core.model_config import TargetConfig
from eyas.targets.decoder import Decoder

_SAMPLES = 64
"""Values taken of each tensor, evenly spaced."""


def fingerprint(decoder: Decoder) -> str:
    """Hex digest of the target's shapes and a sample of its weights."""
    digest = hashlib.sha256(json.dumps(_shape(decoder.config), sort_keys=True).encode())
    for name, tensor in sorted(decoder.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        count = min(_SAMPLES, flat.numel())
        places = torch.arange(count, device=flat.device) * (flat.numel() // count)
        sample = flat[places].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _shape(config: TargetConfig) -> dict[str, object]:
    """What makes two configs the same model; context limits and end tokens do not."""
    rope = config.rope
    return {
        "family": config.family,
        "sizes": [config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers],
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "rope": [rope.kind, f"{rope.theta:.6g}", f"{rope.factor:.6g}"],
        "eps": f"{config.rms_norm_eps:.6g}",
        "windows": list(config.windows),
        "tied": config.tie_word_embeddings,
    }
