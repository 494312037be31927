"""Shapes of a decoder, shared by targets (which have them) and drafters (which are made for them)."""

from dataclasses import dataclass

MAX_LAYERS, MAX_POSITIONS, MAX_HEAD_DIM = 1024, 2**26, 2**14
"""Most that a config.json may say: so much is allocated before any tensor can contradict it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotary embedding. `kind` is "default", "linear" or "llama3"."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """One decoder of the Llama family; `family` is a key of the table in targets/families.py."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; empty for full attention everywhere."""
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Which target a head was made for: another fingerprint warns, another shape refuses."""

    name: str
    fingerprint: str
    """SHA-256 over config and a sample of the weights, hex."""
