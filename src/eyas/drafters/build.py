"""From what a user writes after --drafter to a Drafter.

heads/my-head     a head folder; its config says eagle3 or peagle
prompt_lookup     n-gram lookup in the request's own text (alias: pld)
small:PATH        a small model of the target's family
none              no drafter (also None)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.core.errors import ConfigError
from eyas.core.model_config import TargetConfig, TargetIdentity
from eyas.core.tree import TreeBudget
from eyas.drafters.artifact import LoadedHead, load_head
from eyas.drafters.base import Drafter
from eyas.drafters.by_number import ByNumberDrafter
from eyas.drafters.choose import Uniform
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.eagle3.propose_tree import Eagle3TreeDrafter
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.peagle.propose_tree import PEagleTreeDrafter
from eyas.drafters.prompt_lookup.propose import PromptLookupDrafter
from eyas.drafters.small_model.propose import LanguageModel, SmallModelDrafter
from eyas.nn.linear import pack_linears

DEFAULT_NUM_DRAFT_TOKENS = {"eagle3": 3, "peagle": 7, "prompt_lookup": 7, "small_model": 4}
SMALL = "small:"
MAX_NUM_DRAFT_TOKENS = 512
"""Far more than ever pays; a step's memory grows with K times the vocabulary."""


class LoadedModel(Protocol):
    """What `load_model` returns; eyas.targets.base.Target is one."""

    @property
    def decoder(self) -> LanguageModel:
        """The module that runs."""
        ...

    @property
    def config(self) -> TargetConfig:
        """Its shapes."""
        ...


def build_drafter(
    spec: str | Path | None,
    *,
    target_config: TargetConfig,
    identity: TargetIdentity | None,
    embed_weight: Tensor,
    lm_head_weight: Tensor | None = None,
    num_draft_tokens: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    sample_drafts: bool = False,
    tree: TreeBudget | None = None,
    trees: Sequence[TreeBudget] = (),
    uniform: Uniform | None = None,
    load_model: Callable[[str], LoadedModel] | None = None,
) -> Drafter | None:
    """Build the drafter that `spec` names, or None for plain decoding.

    With `tree` heads draft trees, point masses of that budget, instead of chains of K; with `trees` each of
    them in steps of as many drafts, and chains of up to K (where K is given) in others.
    K is `num_draft_tokens`, by default 3 for eagle3, 7 for peagle and prompt_lookup, 4 for a small model.
    Raises ConfigError for a spec that names nothing, and what `load_head` raises.
    """
    name = "" if spec is None else str(spec)
    if name in ("", "none"):
        return None
    if num_draft_tokens is not None and not 1 <= num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
        raise ConfigError(
            f"num_draft_tokens={num_draft_tokens}: drafters guess 1 to {MAX_NUM_DRAFT_TOKENS} tokens a step"
        )
    if tree is not None:
        _check_tree(name, tree, num_draft_tokens, sample_drafts=sample_drafts)
    count = (
        DEFAULT_NUM_DRAFT_TOKENS
        if num_draft_tokens is None
        else dict.fromkeys(DEFAULT_NUM_DRAFT_TOKENS, num_draft_tokens)
    )
    if name in ("prompt_lookup", "pld"):
        return PromptLookupDrafter(count["prompt_lookup"])
    if name.startswith(SMALL):
        if load_model is None:
            raise ConfigError(f"drafter {name!r} needs a way to load models (load_model)")
        if name == SMALL:
            raise ConfigError("drafter 'small:' names no model; write small:PATH")
        small = load_model(name.removeprefix(SMALL))
        return SmallModelDrafter(
            small.decoder,
            count["small_model"],
            small_vocab_size=small.config.vocab_size,
            vocab_size=target_config.vocab_size,
            device=device,
            sample_drafts=sample_drafts,
            uniform=uniform,
        )
    if not Path(name).is_dir():
        raise ConfigError(
            f"drafter {name!r} is not a head folder; write a folder with config.json and model.safetensors, "
            "prompt_lookup, or small:PATH"
        )
    head = load_head(
        name,
        target_config,
        embed_weight,
        identity=identity,
        lm_head_weight=lm_head_weight,
        device=device,
        dtype=dtype,
    )
    if trees:
        return shaped_drafter(head, trees, num_draft_tokens)
    return head_drafter(
        head, num_draft_tokens=num_draft_tokens, tree=tree, sample_drafts=sample_drafts, uniform=uniform
    )


def shaped_drafter(head: LoadedHead, trees: Sequence[TreeBudget], num_draft_tokens: int | None) -> Drafter:
    """Trees of several budgets from one head, and chains of up to `num_draft_tokens` (None: no chains)."""
    drafters = [head_drafter(head, tree=tree) for tree in trees]
    if num_draft_tokens is None and len(drafters) == 1:
        return drafters[0]
    chain = None if num_draft_tokens is None else head_drafter(head, num_draft_tokens=num_draft_tokens)
    return ByNumberDrafter(drafters, chain)


def head_drafter(
    head: LoadedHead,
    *,
    num_draft_tokens: int | None = None,
    tree: TreeBudget | None = None,
    sample_drafts: bool = False,
    uniform: Uniform | None = None,
) -> Drafter:
    """The drafter that runs a head: trees of a budget, or chains of K (by default the kind's own)."""
    model, kind = head.model, head.config.kind
    pack_linears(model)
    if tree is not None:
        return _tree_drafter(head, tree)
    count = DEFAULT_NUM_DRAFT_TOKENS[kind] if num_draft_tokens is None else num_draft_tokens
    if isinstance(model, PEagleModel):
        return PEagleDrafter(model, head.vocab_map, count, sample_drafts=sample_drafts, uniform=uniform)
    return Eagle3Drafter(model, head.vocab_map, count, sample_drafts=sample_drafts, uniform=uniform)


def _check_tree(name: str, tree: TreeBudget, num_draft_tokens: int | None, *, sample_drafts: bool) -> None:
    """Raise ConfigError where a tree makes no sense."""
    if num_draft_tokens is not None:
        raise ConfigError(f"tree={tree} and num_draft_tokens={num_draft_tokens}: give one of them")
    if sample_drafts:
        raise ConfigError(
            f"tree={tree}: the nodes of a tree are its likeliest tokens, so sample_drafts must be off"
        )
    if name in ("prompt_lookup", "pld") or name.startswith(SMALL):
        raise ConfigError(f"tree={tree}: {name} drafts chains; trees come from EAGLE-3 and P-EAGLE heads")


def _tree_drafter(head: LoadedHead, tree: TreeBudget) -> Drafter:
    if tree.top_k > head.vocab_map.draft_vocab_size:
        raise ConfigError(f"tree={tree}: the head knows only {head.vocab_map.draft_vocab_size} tokens")
    if isinstance(head.model, PEagleModel):
        return PEagleTreeDrafter(head.model, head.vocab_map, tree)
    return Eagle3TreeDrafter(head.model, head.vocab_map, tree)
