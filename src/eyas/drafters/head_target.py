"""Is this head for this target? Shapes refuse, a fingerprint warns; and the map between vocabularies."""

import warnings
from typing import Any

import torch
from torch import Tensor

from eyas.core.errors import HeadMismatchError, ModelFormatError
from eyas.core.model_config import TargetConfig, TargetIdentity
from eyas.core.vocab_map import VocabMap
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.head_names import LM_HEAD

SHARED_LM_HEAD = "eyas_shared_lm_head"
_SHAPES = ("hidden_size", "vocab_size", "num_layers")


def describe_target(config: HeadConfig, identity: TargetIdentity | None, given: Any) -> dict[str, Any]:
    """The `target` entry of eyas.json: what the caller said, who the target is, its shapes."""
    who = {} if identity is None else {"name": identity.name, "fingerprint": identity.fingerprint}
    shapes = (config.target_hidden_size, config.vocab_size, config.target_num_layers)
    said = given if isinstance(given, dict) else {}
    return said | who | dict(zip(_SHAPES, shapes, strict=True))


def check_target(
    made_for: dict[str, Any], target: TargetConfig, identity: TargetIdentity | None, *, where: str
) -> None:
    """Hold eyas.json's `target` entry against the target at hand.

    Raises HeadMismatchError with the two values of the first shape that differs.
    """
    name = made_for.get("name", "another target")
    for shape in _SHAPES:
        if shape in made_for and made_for[shape] != getattr(target, shape):
            raise HeadMismatchError(
                f"{where} was made for {name}: {shape} {made_for[shape]}, "
                f"this target has {shape} {getattr(target, shape)}"
            )
    fingerprint = str(made_for.get("fingerprint") or "")
    if identity is not None and fingerprint and fingerprint != identity.fingerprint:
        warnings.warn(
            f"{where} was made for {name} (fingerprint {fingerprint[:12]}), this target is {identity.name} "
            f"({identity.fingerprint[:12]}): output stays exact, but fewer guesses may be accepted",
            stacklevel=3,
        )


def read_vocab_map(tensors: dict[str, Tensor], config: HeadConfig, *, where: str) -> VocabMap:
    """The map in `d2t` and `t2d`; the identity where there is none and the vocabulary is not reduced."""
    d2t = tensors.get("d2t")
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelFormatError(
                f"{where}: missing tensor d2t, which maps its {config.draft_vocab_size} draft ids to the "
                f"target's {config.vocab_size}"
            )
        return VocabMap.identity(config.vocab_size)
    if d2t.numel() != config.draft_vocab_size:
        raise ModelFormatError(
            f"{where}: d2t has {d2t.numel()} entries, draft_vocab_size is {config.draft_vocab_size}"
        )
    t2d = tensors.get("t2d")
    if t2d is not None and t2d.numel() != config.vocab_size:
        raise ModelFormatError(
            f"{where}: t2d has {t2d.numel()} entries, the vocabulary {config.vocab_size} tokens"
        )
    return VocabMap.from_d2t(d2t, config.vocab_size, t2d)


def uses_target_lm_head(lm_head: Tensor, target_lm_head: Tensor | None, vocab_map: VocabMap) -> bool:
    """Whether lm_head [Vd, D] is exactly the target's rows [V, D] of the draft vocabulary."""
    if target_lm_head is None or target_lm_head.shape != (vocab_map.vocab_size, lm_head.shape[1]):
        return False
    rows = target_lm_head.detach()[vocab_map.target_ids.to(target_lm_head.device)]
    return torch.equal(lm_head, rows.to(lm_head.device, lm_head.dtype))


def shared_lm_head(
    values: dict[str, Any], config: HeadConfig, vocab_map: VocabMap, weight: Tensor | None, *, where: str
) -> dict[str, Tensor]:
    """The target's output rows under the name of the head's; {} where the head does not say that it shares.

    A head with the whole vocabulary and no lm_head shares it (vLLM's rule), a packed one says so.
    """
    if not (values.get(SHARED_LM_HEAD) or vocab_map.is_identity):
        return {}
    if weight is None or weight.shape[1] != config.hidden_size:
        width = "none was handed in" if weight is None else f"that is {weight.shape[1]} wide"
        raise ModelFormatError(
            f"{where}: missing tensor {LM_HEAD}; the head (hidden size {config.hidden_size}) uses the "
            f"target's, but {width}"
        )
    return {LM_HEAD: weight.detach()[vocab_map.target_ids.to(weight.device)]}
