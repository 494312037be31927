"""config.json of a Hugging Face checkpoint to TargetConfig, and back."""

import json
from pathlib import Path
from typing import Any

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, RopeConfig, TargetConfig
from eyas.targets.families import FAMILIES, SUPPORTED


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelFormatError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFormatError(f"{path}: no such file; a model folder needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: a JSON object is needed, found {type(value).__name__}")
    return value


class _Fields:
    """Typed look-ups that name the file and the field when they fail."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def integer(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A size; above `most`, which no model comes near, the file is damaged and memory would run out."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.bad(name, value, f"an integer from 1 to {most}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, empty where the field is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.bad(name, value, "an object")
        return value or {}

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.bad(name, value, "a positive number")
        return float(value)

    def refuse(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Settings that would change the computation and are not implemented."""
        if (value := self.values.get(name)) is not None and value not in allowed:
            raise self.bad(name, value, f"one of {allowed} (others are not supported)")

    def bad(self, name: str, value: Any, wanted: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {name} = {value!r}, but it must be {wanted}")


def config_from_hf(
    values: dict[str, Any], path: Path, generation: dict[str, Any] | None = None
) -> TargetConfig:
    """TargetConfig of a parsed config.json; errors name `path`. `generation` is generation_config.json."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelFormatError(f"{path}: model_type {kind!r} is not supported; supported are {SUPPORTED}")
    if "quantization_config" in values:
        method = _Fields(values, path).mapping("quantization_config").get("quant_method", "?")
        raise ModelFormatError(
            f"{path}: weights are quantized ({method}); use the original checkpoint or a GGUF file"
        )
    family, fields = FAMILIES[kind], _Fields(values, path)
    fields.refuse("hidden_act", ("silu", "swish"))
    fields.refuse("mlp_bias", (False,))
    # Only q, k and v may have a bias; these flags would give the output projection one too.
    fields.refuse("attention_bias", (False,) if not family.attention_bias else (True, False))
    rope_values = {**fields.mapping("rope_scaling"), **fields.mapping("rope_parameters")}
    _Fields(rope_values, path).refuse("partial_rotary_factor", (1, 1.0))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers, max_position = (
        fields.integer("num_hidden_layers", most=MAX_LAYERS),
        fields.integer("max_position_embeddings", 2048, most=MAX_POSITIONS),
    )
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    return TargetConfig(
        family=kind,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads, most=MAX_HEAD_DIM),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(values, rope_values, path, max_position),
        max_position_embeddings=max_position,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        windows=_windows(kind, values, fields, num_layers),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(values, generation or {}, fields),
        bos_token_id=values.get("bos_token_id"),
    )


def _rope(values: dict[str, Any], scaling: dict[str, Any], path: Path, max_position: int) -> RopeConfig:
    """Rotary settings, as transformers 5 (rope_parameters) or its predecessors write them."""
    fields = _Fields(scaling, path)
    theta = fields.number("rope_theta", values.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=fields.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position=fields.integer("original_max_position_embeddings", max_position),
        )
    raise fields.bad("rope_type", kind, "default, linear or llama3 (others are not supported)")


def _windows(kind: str, values: dict[str, Any], fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer; () where no layer has one."""
    if kind == "llama" or (kind != "mistral" and not values.get("use_sliding_window")):
        return ()
    if kind == "mistral" and "sliding_window" not in values:
        values = {**values, "sliding_window": 4096}  # the default of Mistral's configuration class
    if values.get("sliding_window") is None:
        return ()
    window = _Fields(values, fields.path).integer("sliding_window")
    if kind == "mistral":
        return (window,) * num_layers
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int:
            raise fields.bad("max_window_layers", first, "an integer")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.bad("layer_types", types, f"a list of {num_layers} entries")
    windows = tuple(window if entry == "sliding_attention" else None for entry in types)
    return windows if any(windows) else ()


def _eos(values: dict[str, Any], generation: dict[str, Any], fields: _Fields) -> tuple[int, ...]:
    """Ids that end a text, from both files: chat models often name the end of a turn in one only."""
    ids: list[int] = []
    for source in (generation, values):
        entry = source.get("eos_token_id")
        ids += [] if entry is None else entry if isinstance(entry, list) else [entry]
    if not all(type(token_id) is int for token_id in ids):
        raise fields.bad("eos_token_id", ids, "an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def config_to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """A config.json that transformers and `config_from_hf` read back to the same model."""
    rope: dict[str, Any] = {"rope_theta": config.rope.theta, "rope_type": config.rope.kind}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope["low_freq_factor"] = config.rope.low_freq_factor
        rope["high_freq_factor"] = config.rope.high_freq_factor
        rope["original_max_position_embeddings"] = config.rope.original_max_position
    values: dict[str, Any] = {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if config.family != "llama":
        values["sliding_window"] = next((w for w in config.windows if w), None)
    if config.family in {"qwen2", "qwen3"}:
        values["use_sliding_window"] = bool(config.windows)
        values["layer_types"] = [
            "sliding_attention" if w else "full_attention"
            for w in config.windows or (None,) * config.num_layers
        ]
    return values
