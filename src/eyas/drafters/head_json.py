"""config.json of a head: the plain format of vLLM and SGLang, the `speculators` format, and ours.

Plain: one flat decoder config; `vocab_size` is the target's. Speculators: head fields at the top, the decoder
under `transformer_layer_config`. Flags missing from a speculators config take that format's defaults
(norm_before_residual is true for eagle3 and false for peagle), from a plain config false.

Ids of captured layers have two meanings in the wild: the residual stream ENTERING layer k (top-level
`eagle_aux_hidden_state_layer_ids`, ours) or the OUTPUT of layer k, one less for the same stream
(`eagle_config`, as SGLang reads it). None are written for the default three layers, where all agree.
"""

import math
from dataclasses import replace
from typing import Any

from eyas.core.capture import default_aux_layers
from eyas.core.errors import ConfigError, HeadMismatchError, ModelFormatError
from eyas.core.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, RopeConfig, TargetConfig
from eyas.drafters.head_config import MAX_ENCODED_DEPTHS, HeadConfig, HeadKind, MarkovForm

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_ID_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_config(values: dict[str, Any], target: TargetConfig, *, where: str) -> HeadConfig:
    """HeadConfig of a parsed config.json for this target; embedding ownership is decided by the loader.

    Raises ModelFormatError naming the field, or HeadMismatchError where the shapes are another target's.
    """
    try:
        return _read(values, target, where)
    except ConfigError as error:
        raise ModelFormatError(f"{where}: {error}") from None


def _read(values: dict[str, Any], target: TargetConfig, where: str) -> HeadConfig:
    """As `read_config`; a value that HeadConfig refuses is a ConfigError here."""
    speculators = "transformer_layer_config" in values
    body = values["transformer_layer_config"] if speculators else values
    if not isinstance(body, dict):
        raise ModelFormatError(f"{where}: transformer_layer_config must be an object")
    kind = _kind(values, where)
    hidden_size = _integer(body, "hidden_size", where)
    vocab_size = _integer(body, "vocab_size", where)
    target_hidden = values.get("target_hidden_size") or hidden_size
    _match(where, "target hidden size", target_hidden, target.hidden_size)
    _match(where, "vocabulary", vocab_size, target.vocab_size)
    if values.get("logit_scale") not in (None, 1, 1.0):
        raise ModelFormatError(f"{where}: logit_scale={values['logit_scale']} is not supported")
    if body.get("hidden_act") not in (None, "silu", "swish"):
        raise ModelFormatError(f"{where}: hidden_act={body['hidden_act']!r} is not supported, only silu")
    num_heads = _integer(body, "num_attention_heads", where)
    num_layers = _integer(body, "num_hidden_layers", where, 1, most=MAX_LAYERS)
    flags = {flag: bool(values.get(flag, False)) for flag in FLAGS}
    if speculators and kind == "eagle3" and values.get("norm_before_residual") is None:
        flags["norm_before_residual"] = True
    aux_layers = _aux_layers(values, target, where=where)
    markov_rank, markov_form = _markov(values, where)
    return HeadConfig(
        kind=kind,
        hidden_size=hidden_size,
        intermediate_size=_integer(body, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(body, "num_key_value_heads", where, num_heads),
        head_dim=_integer(body, "head_dim", where, hidden_size // num_heads, most=MAX_HEAD_DIM),
        rms_norm_eps=_number(body, "rms_norm_eps", where, 1e-6),
        rope=read_rope(body, where=where),
        # The engine may draft up to the target's limit, whatever length the head was trained at.
        max_position_embeddings=max(
            _integer(body, "max_position_embeddings", where, 1, most=MAX_POSITIONS),
            target.max_position_embeddings,
        ),
        vocab_size=vocab_size,
        draft_vocab_size=_integer(values, "draft_vocab_size", where, vocab_size),
        target_hidden_size=int(target_hidden),
        target_num_layers=target.num_layers,
        aux_layers=aux_layers,
        attention_bias=bool(body.get("attention_bias", False)),
        qk_norm=bool(body.get("qk_norm", False)) or body.get("model_type") == "qwen3",
        windows=_windows(body, num_layers, where),
        trained_embedding=hidden_size != target_hidden,
        mask_token_id=_mask_token_id(values, kind, where),
        markov_rank=markov_rank,
        markov_form=markov_form,
        encoded_depths=_encoded_depths(values, where),
        **flags,
    )


def write_plain(config: HeadConfig) -> dict[str, Any]:
    """config.json in the plain format; `read_config` of it gives the head back."""
    values: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **decoder_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
    values.update(aux_fields(config))
    if config.mask_token_id is not None:
        values.update(dict.fromkeys(MASK_ID_KEYS, config.mask_token_id))
    if config.markov_rank:
        values["markov_rank"] = config.markov_rank
        values["markov_form"] = config.markov_form
    if config.encoded_depths:
        values["encoded_depths"] = config.encoded_depths
    return values


def decoder_fields(config: HeadConfig) -> dict[str, Any]:
    """What both formats say about the head's own layers."""
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **write_rope(config.rope),
    }
    if any(config.windows):
        fields["sliding_window"] = next(window for window in config.windows if window)
        # transformers drops a Qwen3 config's window without it.
        fields["use_sliding_window"] = True
        fields["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ]
    return fields


def aux_fields(config: HeadConfig) -> dict[str, Any]:
    """Captured layers for both readers; empty for the default three.

    Target of 12 layers, aux (1, 4, 7, 9): top level [1, 4, 7, 9], eagle_config [0, 3, 6, 8], count 4.
    """
    if config.has_default_aux_layers:
        return {}
    ids = list(config.aux_layers)
    fields: dict[str, Any] = {AUX_IDS: ids, "num_aux_hidden_states": len(ids)}
    if min(ids) >= 1:
        outputs = [layer - 1 for layer in ids]
        fields["eagle_config"] = {"use_aux_hidden_state": True, AUX_IDS: outputs}
    return fields


def read_rope(body: dict[str, Any], *, where: str) -> RopeConfig:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    scaling = _mapping(body, "rope_parameters", where) or _mapping(body, "rope_scaling", where)
    theta = _number(scaling, "rope_theta", where, _number(body, "rope_theta", where, 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelFormatError(
            f'{where}: rope type "{kind}" is not supported; known are default, linear and llama3'
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    rope = RopeConfig(theta=theta, kind=kind, factor=_number(scaling, "factor", where, 1.0))
    if kind == "linear":
        return rope
    return replace(
        rope,
        low_freq_factor=_number(scaling, "low_freq_factor", where, 1.0),
        high_freq_factor=_number(scaling, "high_freq_factor", where, 4.0),
        original_max_position=_integer(scaling, "original_max_position_embeddings", where, 8192),
    )


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every engine version reads."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _kind(values: dict[str, Any], where: str) -> HeadKind:
    if values.get("speculators_model_type") in ("eagle3", "peagle"):
        kind: HeadKind = values["speculators_model_type"]
        return kind
    return "eagle3" if _first_mask_id(values, where) is None else "peagle"


def _first_mask_id(values: dict[str, Any], where: str) -> int | None:
    nested = _mapping(values, "dflash_config", where)
    found = [(nested, "mask_token_id"), *((values, key) for key in MASK_ID_KEYS)]
    for source, key in found:
        value = source.get(key)
        if value is not None:
            if type(value) is not int or value < 0:
                raise ModelFormatError(f"{where}: {key} must be a token id, got {value!r}")
            return value
    return None


def _mask_token_id(values: dict[str, Any], kind: HeadKind, where: str) -> int | None:
    if kind == "eagle3":
        return None
    mask_token_id = _first_mask_id(values, where)
    if mask_token_id is None:
        raise ModelFormatError(f"{where}: a peagle head needs one of {', '.join(MASK_ID_KEYS)}")
    return mask_token_id


def _markov(values: dict[str, Any], where: str) -> tuple[int, MarkovForm]:
    """Rank and form of the correction by the token before; heads that name no form have the first one."""
    if not values.get("markov_rank"):
        return 0, "tables"
    form: MarkovForm = values.get("markov_form") or "tables"
    if form not in ("tables", "hidden"):
        raise ModelFormatError(f"{where}: markov_form={form!r} is unknown here; update eyas")
    return _integer(values, "markov_rank", where), form


def _encoded_depths(values: dict[str, Any], where: str) -> int:
    """How many depths have a vector of their own; heads that do not say have none."""
    if not values.get("encoded_depths"):
        return 0
    return _integer(values, "encoded_depths", where, most=MAX_ENCODED_DEPTHS)


def _aux_layers(values: dict[str, Any], target: TargetConfig, *, where: str) -> tuple[int, ...]:
    default = default_aux_layers(target.num_layers)
    ids = _layer_ids(values, where)
    if ids is None:
        ids = _layer_ids(_mapping(values, "eagle_config", where), where)
        if ids is not None and ids != default:
            if tuple(layer + 1 for layer in ids) != default:
                raise ModelFormatError(
                    f"{where}: eagle_config.{AUX_IDS}={list(ids)} can mean streams entering or leaving these "
                    f"layers. Write {AUX_IDS} at the top level: ids of the layers that the streams ENTER."
                )
            ids = default
    aux_layers = default if ids is None else ids
    if not all(0 <= layer <= target.num_layers for layer in aux_layers):
        raise HeadMismatchError(
            f"{where}: the head reads layers {list(aux_layers)}, the target has {target.num_layers} layers"
        )
    count = values.get("num_aux_hidden_states")
    if count is not None and count != len(aux_layers):
        raise ModelFormatError(
            f"{where}: num_aux_hidden_states={count}, but {len(aux_layers)} layers are captured: "
            f"{list(aux_layers)}"
        )
    return aux_layers


def _windows(body: dict[str, Any], num_layers: int, where: str) -> tuple[int | None, ...]:
    types = body.get("layer_types")
    if not body.get("sliding_window") or not types or body.get("use_sliding_window") is False:
        return ()
    size = _integer(body, "sliding_window", where)
    if not isinstance(types, list):
        raise ModelFormatError(f"{where}: layer_types must be a list, got {types!r}")
    windows = tuple(size if kind == "sliding_attention" else None for kind in types[:num_layers])
    return windows if any(windows) else ()


def _integer(
    body: dict[str, Any], name: str, where: str, default: int | None = None, *, most: int = 2**31 - 1
) -> int:
    """A size; above `most`, which no head comes near, the file is damaged and memory would run out."""
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= most:
        raise ModelFormatError(f"{where}: {name} must be an integer from 1 to {most}, got {value!r}")
    return value


def _number(body: dict[str, Any], name: str, where: str, default: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelFormatError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


def _mapping(body: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelFormatError(f"{where}: {name} must be an object, got {value!r}")
    return value or {}


def _layer_ids(body: dict[str, Any], where: str) -> tuple[int, ...] | None:
    ids = body.get(AUX_IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise ModelFormatError(f"{where}: {AUX_IDS} must be a list of layer ids, got {ids!r}")
    return tuple(ids)


def _match(where: str, what: str, head: Any, target: int) -> None:
    if head != target:
        raise HeadMismatchError(
            f"{where} was made for another target: {what} {head}, this target has {target}"
        )
