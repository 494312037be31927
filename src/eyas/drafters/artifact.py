"""A head on disk: config.json, model.safetensors and eyas.json in one folder.

    plain     names and shapes that vLLM and SGLang read
    packed    the same names, int8 with a scale a row (packing.py), without what the target has already:
              its rows of the embedding table (head_embedding.py) and an lm_head made of its rows

eyas.json says which target the head was made for (name, fingerprint, shapes) and carries whatever else the
maker knows: recipe, measured acceptance, calibration. Another shape is refused, another fingerprint warns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import TargetConfig, TargetIdentity
from eyas.core.vocab_map import VocabMap
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.files import read_json, read_tensors, write_head
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.head_embedding import full_embedding, own_rows, read_embedding
from eyas.drafters.head_json import read_config, write_plain
from eyas.drafters.head_names import EMBEDDING, LM_HEAD, load_public, rename, to_public
from eyas.drafters.head_target import (
    SHARED_LM_HEAD,
    check_target,
    describe_target,
    read_vocab_map,
    shared_lm_head,
    uses_target_lm_head,
)
from eyas.drafters.packing import PACKED_FORMAT, pack, unpack
from eyas.drafters.peagle.model import PEagleModel

FORMAT_KEY, PACKED_ARCHITECTURE = "eyas_format", "EyasPackedHead"


@dataclass(slots=True)
class LoadedHead:
    """A head ready to draft or to train on."""

    model: Eagle3Model
    vocab_map: VocabMap
    meta: dict[str, Any]
    """eyas.json; empty for heads made elsewhere."""

    @property
    def config(self) -> HeadConfig:
        """Shape and flags."""
        return self.model.config


def make_model(config: HeadConfig, embed_weight: Tensor) -> Eagle3Model:
    """The module of a head's kind, with fresh weights."""
    return PEagleModel(config, embed_weight) if config.kind == "peagle" else Eagle3Model(config, embed_weight)


def save_head(
    folder: str | Path,
    model: Eagle3Model,
    vocab_map: VocabMap,
    *,
    meta: dict[str, Any],
    identity: TargetIdentity | None = None,
    packed: bool = False,
    dtype: torch.dtype | None = None,
    target_embedding: Tensor | None = None,
    target_lm_head: Tensor | None = None,
) -> Path:
    """Write a head; returns its folder.

    `dtype` is that of the plain format's weights (the model's by default). `target_embedding` [V, D] lets a
    packed head with its own table keep only the rows that differ, `target_lm_head` [V, D] lets it leave out
    an lm_head that equals the target's rows; without them everything is kept.
    """
    folder, config = Path(folder), model.config
    values = write_plain(config)
    tensors = to_public(model, both_norm_names=not packed)
    if packed:
        values["architectures"], values[FORMAT_KEY] = [PACKED_ARCHITECTURE], PACKED_FORMAT
        if uses_target_lm_head(tensors[LM_HEAD], target_lm_head, vocab_map):
            del tensors[LM_HEAD]
            values[SHARED_LM_HEAD] = True
        tensors = pack(tensors | own_rows(model, target_embedding))
        # Offsets ascend, so the last is the largest.
        small = int(vocab_map.d2t[-1]) < 2**16
        tensors["d2t"] = vocab_map.d2t.to(torch.uint16 if small else torch.int32)
    else:
        table = full_embedding(model)
        if table is not None:
            tensors[EMBEDDING] = table
        tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
        tensors["d2t"], tensors["t2d"] = vocab_map.d2t, vocab_map.t2d
    about = {"format_version": 1, "kind": config.kind} | meta
    about["target"] = describe_target(config, identity, meta.get("target"))
    write_head(folder, about=about, tensors=tensors, config=values)
    return folder


def load_head(
    folder: str | Path,
    target_config: TargetConfig,
    embed_weight: Tensor,
    *,
    identity: TargetIdentity | None = None,
    lm_head_weight: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LoadedHead:
    """Read a plain, `speculators` or packed head for this target.

    The target's table `embed_weight` [V, D] is shared by reference where the head has no other one and
    device and dtype agree. Raises HeadMismatchError for another target's head, ModelFormatError naming the
    missing, unknown or misshapen tensor; warns where the target's fingerprint is another.
    """
    folder = Path(folder)
    where = str(folder)
    values = read_json(folder / "config.json")
    meta = read_json(folder / "eyas.json") if (folder / "eyas.json").exists() else {}
    made_for = meta.get("target") or {}
    if not isinstance(made_for, dict):
        raise ModelFormatError(f"{folder / 'eyas.json'}: target must be an object, got {made_for!r}"[:300])
    check_target(made_for, target_config, identity, where=where)
    config = read_config(values, target_config, where=where)
    if values.get(FORMAT_KEY, PACKED_FORMAT) != PACKED_FORMAT:
        raise ModelFormatError(f"{where}: {FORMAT_KEY}={values[FORMAT_KEY]!r} is unknown here; update eyas")
    tensors = unpack(rename(read_tensors(folder)), where=where)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelFormatError(f"{where}: tensor {name} holds NaN or infinity; the head is damaged")
    vocab_map = read_vocab_map(tensors, config, where=where)
    if LM_HEAD not in tensors:
        tensors |= shared_lm_head(values, config, vocab_map, lm_head_weight, where=where)
    config, table, mask_row = read_embedding(tensors, config, embed_weight, where=where)
    model = make_model(config, table).to(device=device, dtype=dtype or embed_weight.dtype)
    load_public(model, tensors, where=where)
    if isinstance(model, PEagleModel) and mask_row is not None:
        with torch.no_grad():
            model.mask_embedding.copy_(mask_row)
    return LoadedHead(model.eval().requires_grad_(requires_grad=False), vocab_map.to(device), meta)
