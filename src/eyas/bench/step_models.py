"""What `eyas bench step` and `eyas calibrate` run: targets and heads by path, or by shape."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.core.tree import TreeBudget
from eyas.drafters.artifact import LoadedHead, load_head
from eyas.drafters.base import Drafter
from eyas.drafters.build import head_drafter
from eyas.drafters.shapes import is_shape as is_head_shape
from eyas.drafters.shapes import random_head
from eyas.engine.build import resolve_drafter
from eyas.targets.base import Target
from eyas.targets.load import load_target
from eyas.targets.shapes import is_shape, shape_target


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """Makes drafters over the same weights: each engine needs one of its own, for its own cache."""

    spec: str
    make: Callable[[int | None, TreeBudget | None], Drafter | None]
    """From K (None: the kind's own) or a tree."""
    head: LoadedHead | None
    """None for drafters without a head."""


def open_target(
    name: str, *, device: torch.device | str, dtype: torch.dtype | None, tokenizer: bool = False
) -> Target:
    """The target that a path, a name or "shape:NAME" means."""
    if is_shape(name):
        return shape_target(name, device=device, dtype=dtype)
    return load_target(name, device=device, dtype=dtype, tokenizer=tokenizer)


def open_drafter(spec: str, target: Target) -> DrafterSource:
    """The drafters that a head folder, "shape:...", or any other word after --drafter means."""
    head = _head(spec, target)
    if head is None:
        return DrafterSource(
            spec,
            lambda k, tree: resolve_drafter(spec, target, num_draft_tokens=k, sample_drafts=False, tree=tree),
            None,
        )

    def make(num_draft_tokens: int | None, tree: TreeBudget | None) -> Drafter:
        return head_drafter(head, num_draft_tokens=num_draft_tokens, tree=tree)

    return DrafterSource(spec, make, head)


def _head(spec: str, target: Target) -> LoadedHead | None:
    table = target.decoder.embed_tokens.weight
    if is_head_shape(spec):
        return random_head(spec, target.config, table)
    if not Path(spec).is_dir():
        return None
    return load_head(
        spec,
        target.config,
        table,
        identity=target.identity,
        lm_head_weight=target.decoder.lm_head_weight,
        device=target.device,
        dtype=target.dtype,
    )
