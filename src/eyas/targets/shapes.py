"""Targets with the shape of a public model and random weights: what a step costs needs no checkpoint.

Time, memory and launches of a step depend on shapes alone; what is said does not matter. Without a
tokenizer, and without any file. `shape:tiny` is for tests.
"""

import torch

from eyas.core.errors import ConfigError
from eyas.core.model_config import RopeConfig, TargetConfig, TargetIdentity
from eyas.nn.random_weights import fill
from eyas.targets.base import Target
from eyas.targets.decoder import Decoder
from eyas.targets.load import check_device

PREFIX = "shape:"
WEIGHT_STD = 0.02
"""As models are initialized; keeps bfloat16 activations finite through 80 layers."""

_LLAMA_3 = {
    "family": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "num_kv_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=500000.0, kind="llama3", factor=8.0),
    "max_position_embeddings": 131072,
}

SHAPES: dict[str, TargetConfig] = {
    "llama-3.1-8b": TargetConfig(
        **_LLAMA_3,  # type: ignore[arg-type]
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
    ),
    "llama-3.3-70b": TargetConfig(
        **_LLAMA_3,  # type: ignore[arg-type]
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
    ),
    "qwen2.5-0.5b": TargetConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        max_position_embeddings=32768,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": TargetConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "tiny": TargetConfig(
        family="llama",
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=4096,
    ),
}
"""Name -> shape, from the models' published config.json."""


def is_shape(name: str) -> bool:
    """Whether a user's word names a shape and not a model."""
    return name.startswith(PREFIX)


def shape_config(name: str) -> TargetConfig:
    """The shape that "shape:NAME" names; ConfigError lists the names."""
    config = SHAPES.get(name.removeprefix(PREFIX))
    if config is None:
        raise ConfigError(f"{name!r} is no shape; there are {', '.join(PREFIX + known for known in SHAPES)}")
    return config


def num_parameters(config: TargetConfig) -> int:
    """Weights of a target, its embedding table included."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def shape_target(
    name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", seed: int = 0
) -> Target:
    """A frozen target of a named shape, its weights drawn on `device` in `dtype`.

    dtype is float32 on the CPU and bfloat16 on CUDA unless given. Raises ConfigError for an unknown name
    and where the weights do not fit into the GPU's free memory.
    """
    config, device = shape_config(name), check_device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if device.type == "cuda":
        needed, free = num_parameters(config) * dtype.itemsize, torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise ConfigError(
                f"{name} in {str(dtype).removeprefix('torch.')} takes {needed / 2**30:.0f} GiB of weights, "
                f"and {free / 2**30:.0f} GiB are free on {device}: choose a smaller shape"
            )
    with torch.device("meta"):
        decoder = Decoder(config)
    fill(decoder, device=device, dtype=dtype, std=WEIGHT_STD, seed=seed)
    decoder.rotary.to(device)
    decoder.pack()
    return Target(decoder, config, None, TargetIdentity(name, ""), None)
