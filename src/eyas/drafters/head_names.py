"""Names of a head's tensors: ours (one matrix for q, k, v) and those of the public checkpoints.

    ours                              public
    layers.0.self_attn.qkv_proj       layers.0.self_attn.{q,k,v}_proj, one after the other
    layers.0.mlp.gate_up_proj         layers.0.mlp.{gate,up}_proj, one after the other
    layers.1.input_layernorm          layers.1.input_layernorm (vLLM) and
                                      layers.1.hidden_norm (SGLang), the same tensor
    mask_hidden [A * Dt]              mask_hidden [1, 1, A * Dt]
    embed_weight, mask_embedding      embed_tokens with the mask row in its place
    everything else                   the same name

Public heads call layer 0 `midlayer` or `layers.0`; per-layer feature norms are `fc_norm.{0,1,2}` or
`aux_norm_{low,mid,high}`. Beside the weights stand `d2t` (offsets) and `t2d` (known target ids).
"""

import re

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.head_config import HeadConfig

EMBEDDING, LM_HEAD, MASK_HIDDEN = "embed_tokens.weight", "lm_head.weight", "mask_hidden"
NOT_WEIGHTS = ("d2t", "t2d")
_OURS_ONLY = ("embed_weight", "mask_embedding")
_RENAMES = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^(?:.*\.)?mask_hidden(?:\.weight)?$"), MASK_HIDDEN),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
# Tables that an old exporter may leave behind, and the teacher's parts of speculators checkpoints.
_IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^verifier_(lm_head|norm)\.weight$")
_OUTPUT_BIAS = re.compile(r"^layers\.\d+\.self_attn\.o_proj\.bias$")
_UPPER_NORM = re.compile(r"^layers\.([1-9]\d*)\.input_layernorm\.weight$")


def public_parts(name: str, config: HeadConfig) -> list[tuple[str, int | None]]:
    """Public names that our tensor `name` is the rows of, each with its row count (None for all)."""
    if ".qkv_proj." in name:
        kv = config.num_kv_heads * config.head_dim
        rows = (("q_proj", config.num_heads * config.head_dim), ("k_proj", kv), ("v_proj", kv))
        return [(name.replace("qkv_proj", part), count) for part, count in rows]
    if ".gate_up_proj." in name:
        size = config.intermediate_size
        return [(name.replace("gate_up_proj", part), size) for part in ("gate_proj", "up_proj")]
    return [(name, None)]


def to_public(model: Eagle3Model, *, both_norm_names: bool = True) -> dict[str, Tensor]:
    """Weights of the head under their public names, without embedding and vocabulary map."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in _OURS_ONLY:
            continue
        if name == MASK_HIDDEN:
            tensors[name] = tensor.reshape(1, 1, -1)
            continue
        parts = public_parts(name, model.config)
        if len(parts) == 1:
            tensors[name] = tensor
        else:
            pieces = tensor.split([rows for _, rows in parts if rows is not None])
            tensors.update({part: piece for (part, _), piece in zip(parts, pieces, strict=True)})
        if both_norm_names and _UPPER_NORM.match(name):
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensor.clone()
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of this file; leftovers of other tools are dropped."""
    renamed = {}
    for name, tensor in tensors.items():
        if _IGNORED.search(name):
            continue
        new = name
        for pattern, replacement in _RENAMES:
            new = pattern.sub(replacement, new)
        renamed[new] = tensor
    return renamed


def load_public(model: Eagle3Model, tensors: dict[str, Tensor], *, where: str) -> None:
    """Copy public tensors (after `rename`) into the head; embedding and vocabulary map are not looked at.

    Raises ModelFormatError that names every missing and unknown tensor, or the first of a wrong shape.
    """
    left = {name: t for name, t in tensors.items() if name not in (*NOT_WEIGHTS, EMBEDDING)}
    for name in [name for name in left if _OUTPUT_BIAS.match(name)]:
        # vLLM's Llama layer has this bias wherever q, k and v have theirs; ours has none.
        if bool(left.pop(name).any()):
            raise ModelFormatError(f"{where}: tensor {name} is not 0; a bias of o_proj is not supported")
    missing: list[str] = []
    with torch.no_grad():
        for name, ours in model.state_dict().items():
            if name in _OURS_ONLY:
                continue
            upper = _UPPER_NORM.match(name)
            other = name.replace("input_layernorm", "hidden_norm") if upper else name
            if upper and name not in left and other in left:
                left[name] = left[other]
            if upper:
                left.pop(other, None)
            parts = public_parts(name, model.config)
            absent = [part for part, _ in parts if part not in left]
            if absent:
                missing += absent
                continue
            pieces = []
            for part, rows in parts:
                piece = left.pop(part)
                piece = piece.reshape(-1) if part == MASK_HIDDEN else piece
                wanted = list(ours.shape) if rows is None else [rows, *ours.shape[1:]]
                if list(piece.shape) != wanted:
                    raise ModelFormatError(
                        f"{where}: tensor {part} has shape {list(piece.shape)}, the config asks for {wanted}"
                    )
                pieces.append(piece.to(ours.device, ours.dtype))
            ours.copy_(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    if missing or left:
        raise ModelFormatError(
            f"{where} is not the head that its config.json describes"
            + (f"; missing tensors: {', '.join(missing)}" if missing else "")
            + (f"; unknown tensors: {', '.join(sorted(left))}" if left else "")
        )
