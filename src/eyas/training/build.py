"""From a recipe to a head's start: its shape, its vocabulary map, its weights."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from eyas.config.dump import to_plain
from eyas.core.errors import ConfigError
from eyas.core.vocab_map import VocabMap
from eyas.data.vocab_count import TokenCounts, choose_mask_token, draft_vocabulary
from eyas.drafters.artifact import load_head, make_model
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.model import PEagleModel
from eyas.targets.base import Target
from eyas.training.config import Eagle3Section, HeadSection, PEagleSection, TrainConfig
from eyas.training.objectives.base import Objective
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective


def make_objective(
    section: Eagle3Section | PEagleSection, vocab_map: VocabMap, *, staircase: bool = False
) -> Objective:
    """The plug-in that a recipe names, for a head with this map on the target's device.

    `staircase`: attention by ranges (nn/staircase.py).
    """
    if isinstance(section, Eagle3Section):
        return Eagle3Objective(
            section.ttt_steps,
            section.decay,
            section.depth_weights,
            staircase=staircase,
            guess_ids=None if section.teacher_forcing else vocab_map.target_ids,
        )
    return PEagleObjective(
        section.num_depths,
        section.retention,
        section.min_retention,
        section.depth_weights,
        max_anchors=section.max_anchors,
        staircase=staircase,
    )


def with_depths(section: Eagle3Section | PEagleSection, num_depths: int) -> Eagle3Section | PEagleSection:
    """The section of a run that trains `num_depths` steps or depths, with default weights."""
    if isinstance(section, Eagle3Section):
        return replace(section, ttt_steps=num_depths, depth_weights=None)
    return replace(section, num_depths=num_depths, depth_weights=None)


def encoded_depths(config: TrainConfig) -> int:
    """How many depths a recipe gives a vector of their own: all that it trains but depth 0."""
    if not isinstance(config.objective, PEagleSection) or config.head.depth_encoding == "none":
        return 0
    return config.objective.num_depths - 1


def build_head(
    config: TrainConfig, target: Target, counts: TokenCounts, template_ids: frozenset[int]
) -> tuple[Eagle3Model, VocabMap, float]:
    """Head in float32 on the target's device, its vocabulary map, and its coverage of supervised tokens.

    A warm start keeps the old head's map and mask token: making them anew would re-label every row.
    """
    head = config.head
    if head.warm_start is not None:
        return _warm_start(config, target, counts, template_ids)
    size = head.draft_vocab_size or target.config.vocab_size
    vocab_map, coverage = draft_vocabulary(counts, size)
    mask_token = None
    if config.objective.kind == "peagle":
        mask_token = choose_mask_token(
            counts, target.tokenizer, template_ids=template_ids, wanted=head.mask_token_id
        )
    shape = HeadConfig.for_target(
        target.config,
        kind=config.objective.kind,
        num_layers=head.num_layers,
        draft_vocab_size=size,
        intermediate_size=head.intermediate_size,
        aux_layers=head.aux_layers,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        attention_bias=head.attention_bias,
        qk_norm=head.qk_norm,
        trained_embedding=head.train_embeddings == "all",
        mask_token_id=mask_token,
        markov_rank=head.markov_rank,
        markov_form=head.markov_form,
        encoded_depths=encoded_depths(config),
    )
    table = target.decoder.embed_tokens.weight
    model = make_model(shape, table)
    _initialise(model, head, target, vocab_map, seed=config.run.seed)
    model.to(target.device)
    _freeze(model, head)
    return model, vocab_map.to(target.device), coverage


def _initialise(
    model: Eagle3Model, head: HeadSection, target: Target, vocab_map: VocabMap, *, seed: int
) -> None:
    """Normal weights from the seed (on the CPU, so that devices agree), then the wanted exceptions."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.norm.weight.fill_(head.final_norm_scale)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                noise = torch.randn(module.weight.shape, generator=generator)
                module.weight.copy_(head.init_std * noise)
                if module.bias is not None:
                    module.bias.zero_()
        if isinstance(model, PEagleModel):
            model.mask_hidden.copy_(torch.randn(model.mask_hidden.shape, generator=generator))
            model.reset_markov(generator)
        if head.init_lm_head_from_target:
            rows = target.decoder.lm_head_weight[vocab_map.target_ids.to(target.device)]
            model.lm_head.weight.copy_(rows.float())
        for name, parameter in list(model.named_parameters()):
            if parameter.dtype != torch.float32:
                owner = model.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], nn.Parameter(parameter.float()))


def _freeze(model: Eagle3Model, head: HeadSection) -> None:
    """Everything trains but what the recipe says."""
    model.requires_grad_(requires_grad=head.train == "all")
    if not isinstance(model, PEagleModel):
        return
    if head.train == "markov":
        assert model.markov is not None
        model.markov.requires_grad_(requires_grad=True)
    elif head.train_embeddings == "none":
        model.mask_embedding.requires_grad = False


def _warm_start(
    config: TrainConfig, target: Target, counts: TokenCounts, template_ids: frozenset[int]
) -> tuple[Eagle3Model, VocabMap, float]:
    """Go on from a head of the same kind, or let a P-EAGLE head begin where an EAGLE-3 head ended."""
    assert config.head.warm_start is not None
    loaded = load_head(
        config.head.warm_start,
        target.config,
        target.decoder.embed_tokens.weight,
        identity=target.identity,
        lm_head_weight=target.decoder.lm_head_weight,
        device=target.device,
        dtype=torch.float32,
    )
    kinds = (loaded.config.kind, config.objective.kind)
    if kinds[0] != kinds[1] and kinds != ("eagle3", "peagle"):
        raise ConfigError(
            f"head.warm_start={config.head.warm_start}: that head is {kinds[0]}, the objective is {kinds[1]}"
        )
    chosen = loaded.vocab_map.target_ids.cpu().numpy()
    coverage = float(counts.supervised[chosen].sum()) / max(int(counts.supervised.sum()), 1)
    model = loaded.model
    if kinds == ("eagle3", "peagle"):
        mask_token = choose_mask_token(
            counts, target.tokenizer, template_ids=template_ids, wanted=config.head.mask_token_id
        )
        model = _peagle_from_eagle3(model, config.head, mask_token, seed=config.run.seed)
    if isinstance(model, PEagleModel):
        model.encode_depths(encoded_depths(config))
        _give_markov(model, config, finished=kinds[0] == "peagle")
    mask = model.config.mask_token_id
    if mask is not None and counts.all[mask]:
        raise ConfigError(
            f"head.warm_start: its mask token {mask} stands {counts.all[mask]} times in this data"
        )
    _freeze(model, config.head)
    return model, loaded.vocab_map.to(target.device), coverage


def _give_markov(model: PEagleModel, config: TrainConfig, *, finished: bool) -> None:
    """Give a head the recipe's correction unless it has one, which must be the recipe's then.

    `finished`: it was a P-EAGLE head before.
    """
    head, held = config.head, model.config
    wanted = (head.markov_form, head.markov_rank)
    if model.markov is None and head.markov_rank:
        generator = torch.Generator().manual_seed(config.run.seed)
        model.add_markov(*wanted, generator=generator)
    elif head.markov_rank and wanted != (held.markov_form, held.markov_rank):
        raise ConfigError(
            f"head.markov_form={head.markov_form}, head.markov_rank={head.markov_rank}: the head of "
            f"head.warm_start has a correction already, {held.markov_form} of rank {held.markov_rank}; leave "
            "both out to go on with it, or start from a head without one"
        )
    if head.train == "markov" and (model.markov is None or not finished):
        raise ConfigError(
            "head.train=markov: "
            + (
                "the head of head.warm_start has no correction, and head.markov_rank asks for none"
                if finished
                else "head.warm_start names an eagle3 head, whose mask rows nobody trained"
            )
        )


def _peagle_from_eagle3(old: Eagle3Model, head: HeadSection, mask_token: int, *, seed: int) -> PEagleModel:
    """A P-EAGLE head whose depth 0 guesses what the EAGLE-3 head did: added layers start as identities.

    The old head's layers come first; of each added layer the two matrices that write to the residual
    stream are zero. The mask's vectors are new.
    """
    layers = max(head.num_layers or 4, old.config.num_layers)
    shape = replace(old.config, kind="peagle", num_layers=layers, mask_token_id=mask_token)
    model = PEagleModel(shape, old.embed_weight)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(head.init_std * torch.randn(module.weight.shape, generator=generator))
                if name.endswith(("o_proj", "down_proj")):
                    module.weight.zero_()
        model.mask_hidden.copy_(torch.randn(model.mask_hidden.shape, generator=generator))
        missing, unknown = model.load_state_dict(old.state_dict(), strict=False)
    assert not unknown, unknown
    assert all(name.startswith(("layers.", "mask_")) for name in missing), missing
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.detach().float()))
    return model.to(old.fc.weight.device)


def describe(model: Eagle3Model, coverage: float) -> dict[str, Any]:
    """Facts about the head for the log and for eyas.json: what the recipe's section came to."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = to_plain(model.config)
    return {
        **{key.name: shape[key.name] for key in fields(HeadSection) if key.name in shape},
        **({"depth_encoding": "learned"} if model.config.encoded_depths else {}),
        "num_trained_parameters": trained,
        "draft_vocab_coverage": round(coverage, 5),
    }
