"""Tiny random targets on the CPU in float32, for every test that needs a model but not a real one."""

from dataclasses import replace
from typing import Any

from eyas.core.model_config import RopeConfig, TargetConfig, TargetIdentity
from eyas.targets.base import Target
from eyas.targets.decoder import random_decoder

_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"windows": (6,) * 5},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 12},
}


def tiny_config(family: str = "llama", **overrides: Any) -> TargetConfig:
    """5 layers, hidden 32, 4 heads over 2 KV heads, vocabulary 64; any field can be overridden."""
    config = TargetConfig(
        family=family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=256,
        eos_token_ids=(0,),
    )
    overrides = {**_FAMILY[family], **overrides}
    if "num_layers" in overrides and "windows" in overrides:
        overrides["windows"] = (overrides["windows"] * overrides["num_layers"])[: overrides["num_layers"]]
    return replace(config, **overrides)


def tiny_target(family: str = "llama", seed: int = 0, *, std: float = 0.3, **overrides: Any) -> Target:
    """Random weights, large enough that greedy output wanders; the same seed gives the same weights."""
    config = tiny_config(family, **overrides)
    return Target(
        decoder=random_decoder(config, std=std, seed=seed),
        config=config,
        tokenizer=None,
        identity=TargetIdentity(name=f"tiny-{family}", fingerprint=f"{seed:064x}"),
        path=None,
    )
