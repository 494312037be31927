"""Targets and drafters from what users give: paths, names, or the objects themselves."""

from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.core.device import device_name
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.calibrated import Schedule, schedule_of
from eyas.targets.base import Target


def resolve_target(
    model: str | Path | Target, *, dtype: torch.dtype | None, device: torch.device | str | None
) -> Target:
    """Load a target, or check that a loaded one is what was asked for."""
    from eyas.targets.load import check_device, load_target

    if isinstance(model, Target):
        if dtype is not None and dtype != model.dtype:
            raise ConfigError(f"dtype={dtype}, but the target given was loaded as {model.dtype}")
        if device is not None and check_device(device).type != model.device.type:
            raise ConfigError(f"device={device}, but the target given is on {model.device}")
        return model
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_target(model, dtype=dtype, device=device)


def resolve_schedule(
    drafter: str | Path | Drafter | None, target: Target, max_num_seqs: int, *, sample_drafts: bool
) -> Schedule | None:
    """What a head folder says about drafts by batch size, if it was calibrated on this device."""
    if not isinstance(drafter, str | Path) or not str(drafter) or not Path(drafter).is_dir():
        return None
    schedule = schedule_of(
        Path(drafter),
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        max_num_seqs=max_num_seqs,
    )
    if schedule is not None and schedule.trees and sample_drafts:
        return None  # measured for something else: nodes of a tree are never sampled
    return schedule


def resolve_drafter(
    drafter: str | Path | Drafter | None,
    target: Target,
    *,
    num_draft_tokens: int | None,
    sample_drafts: bool,
    tree: TreeBudget | None = None,
    trees: Sequence[TreeBudget] = (),
) -> Drafter | None:
    """Build a drafter for this target, or pass a built one through."""
    if drafter is None or str(drafter) in {"", "none"}:
        if num_draft_tokens:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens} needs a drafter, and none was given")
        if tree is not None:
            raise ConfigError(f"tree={tree} needs a drafter, and none was given")
        return None
    if not isinstance(drafter, str | Path):
        if not hasattr(drafter, "propose"):
            raise ConfigError(
                f"drafter={drafter!r}: give a head folder, prompt_lookup, small:PATH or a Drafter"
            )
        if num_draft_tokens not in (None, drafter.num_draft_tokens):
            raise ConfigError(
                f"num_draft_tokens={num_draft_tokens}, but the drafter given was built for "
                f"{drafter.num_draft_tokens}"
            )
        if tree is not None and tree != drafter.tree:
            raise ConfigError(f"tree={tree}, but the drafter given was built for another shape")
        return drafter
    from eyas.drafters.build import build_drafter
    from eyas.kernels.reference.random import uniform
    from eyas.targets.load import load_target

    def load_model(name: str) -> Target:
        return load_target(name, dtype=target.dtype, device=target.device, tokenizer=False)

    return build_drafter(
        drafter,
        target_config=target.config,
        identity=target.identity,
        embed_weight=target.decoder.embed_tokens.weight,
        lm_head_weight=target.decoder.lm_head_weight,
        num_draft_tokens=num_draft_tokens,
        device=target.device,
        dtype=target.dtype,
        sample_drafts=sample_drafts,
        tree=tree,
        trees=trees,
        uniform=uniform,
        load_model=load_model,
    )
