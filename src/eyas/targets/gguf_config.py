"""Metadata of a GGUF file to TargetConfig."""

from typing import Any

import torch

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, RopeConfig, TargetConfig
from eyas.nn.rotary import inverse_frequencies
from eyas.targets.families import FAMILIES
from eyas.targets.weights.gguf_file import GGUFFile


def config_from_gguf(file: GGUFFile) -> TargetConfig:
    """TargetConfig of the model in `file`; ModelFormatError names the metadata key that is missing or bad."""
    arch = file.metadata.get("general.architecture")
    names = sorted({family.gguf_name for family in FAMILIES.values()})
    if arch not in names:
        raise ModelFormatError(
            f"{file.path}: architecture {arch!r} is not supported; supported are {', '.join(names)}"
        )
    reader = _Metadata(file, str(arch))
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    kv_heads = reader.integer("attention.head_count_kv", heads)
    head_dim = reader.integer("attention.key_length", hidden // heads, most=MAX_HEAD_DIM)
    if reader.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelFormatError(f"{file.path}: {arch}.rope.dimension_count is not head_dim = {head_dim}")
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise ModelFormatError(f"{file.path}: {arch}.attention.value_length is not head_dim = {head_dim}")
    if reader.get("expert_count"):
        raise ModelFormatError(f"{file.path}: mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing; the file is incomplete")
    # Mistral's files call themselves llama; only the sliding window tells.
    window = None
    if arch == "llama" and reader.get("attention.sliding_window"):
        window = reader.integer("attention.sliding_window")
    family = "mistral" if window else str(arch)
    num_layers = reader.integer("block_count", most=MAX_LAYERS)
    eos, bos = (_token_id(file, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "bos"))
    return TargetConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=reader.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_short(reader.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(reader, head_dim),
        max_position_embeddings=reader.integer("context_length", most=MAX_POSITIONS),
        attention_bias=FAMILIES[family].attention_bias,
        qk_norm=FAMILIES[family].qk_norm,
        windows=(window,) * num_layers if window else (),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=() if eos is None else (eos,),
        bos_token_id=bos,
    )


def _token_id(file: GGUFFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ModelFormatError(f"{file.path}: {key} = {value!r}, but it must be a token id")
    return value


class _Metadata:
    """Look-ups below the architecture's prefix."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A size; above `most`, which no model comes near, the file is damaged and memory would run out."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.bad(key, value, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(key, value, "a positive number")
        return float(value)

    def bad(self, key: str, value: Any, wanted: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file.path}: {self.arch}.{key} = {value!r}, but it must be {wanted}")


def _rope(reader: _Metadata, head_dim: int) -> RopeConfig:
    """Rotary settings. GGUF stores Llama 3's scaling as one factor a pair, not as its four parameters."""
    theta = _short(reader.number("rope.freq_base", 10000.0))
    kind = reader.get("rope.scaling.type") or "none"
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=reader.number("rope.scaling.factor"))
    if kind != "none":
        raise reader.bad("rope.scaling.type", kind, "none or linear")
    if "rope_freqs.weight" not in reader.file.tensors:
        return RopeConfig(theta=theta)
    stored = torch.from_numpy(reader.file.read("rope_freqs.weight").copy())
    original = int(reader.get("rope.scaling.original_context_length") or 8192)
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(stored.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=original,
    )
    wanted = inverse_frequencies(RopeConfig(theta=theta), head_dim) / stored
    if stored.shape != wanted.shape or not torch.allclose(
        inverse_frequencies(rope, head_dim), wanted, rtol=1e-4
    ):
        raise ModelFormatError(
            f"{reader.file.path}: tensor rope_freqs.weight is not Llama 3's frequency scaling"
        )
    return rope


def _short(value: float) -> float:
    """The shortest decimal that float32 would store like this: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")
