"""`eyas export`: a head in the format of an engine, checked after writing.

All formats are safetensors and config.json; they differ in names (names.py), in what they can carry
(engines.py) and in the shape of config.json:

    vllm, sglang   plain config, architecture LlamaForCausalLMEagle3 (Eagle3Qwen3ForCausalLM with q/k norm)
    speculators    the decoder nested under transformer_layer_config, and who the target is
    eagle          plain config, architecture LlamaForCausalLM, layer 0 named midlayer
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.drafters.artifact import LoadedHead, load_head, save_head
from eyas.drafters.build import DEFAULT_NUM_DRAFT_TOKENS, MAX_NUM_DRAFT_TOKENS
from eyas.drafters.files import refuse_foreign, write_head
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.head_embedding import full_embedding
from eyas.drafters.head_json import AUX_IDS, FLAGS, decoder_fields, write_plain
from eyas.drafters.head_names import EMBEDDING, to_public
from eyas.drafters.head_target import describe_target
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.probe import probe
from eyas.export.check import ExportCheck, check_export
from eyas.export.engines import Engine, check_engine
from eyas.export.names import has_output_bias
from eyas.targets.base import Target

SPECULATORS_VERSION = "0.9.0"
_TARGET_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Export:
    """What was written, and how it compares with the head it came from."""

    folder: Path
    engine: Engine
    num_bytes: int
    check: ExportCheck
    serve: dict[str, Any]
    """Speculative settings to start the engine with."""
    left_out: str | None = None
    """What of the head was not written, because the caller said so."""


def export_head(
    head_folder: str | Path,
    target: Target,
    engine: str,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    num_draft_tokens: int | None = None,
    target_name: str | None = None,
    without_markov: bool = False,
) -> Export:
    """Write the head in `engine`'s format to `out_dir` and check it.

    `without_markov` leaves a correction by the token before out, which no engine knows; the base head is
    complete by itself, and what is checked is that head.

    `num_draft_tokens` is the K that a speculators config carries; `target_name` is the target's repository
    id there (vLLM refuses local paths). In float32 the reloaded head must give the same logits bit for bit.

    Raises ConfigError naming the flags that the engine cannot honour, ModelFormatError for a head or a
    written file that is not what it should be.
    """
    head = read_head(head_folder, target)
    left_out = _remove_markov(head) if without_markov else None
    config = head.config
    known = check_engine(config, engine)
    out_dir = Path(out_dir)
    if out_dir.exists() and out_dir.resolve() == Path(head_folder).resolve():
        raise ConfigError(f"{out_dir} is the head itself; choose another folder to export to")
    refuse_foreign(out_dir)
    if num_draft_tokens is None:
        num_draft_tokens = DEFAULT_NUM_DRAFT_TOKENS[config.kind]
    elif not 1 <= num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
        raise ConfigError(f"num_draft_tokens={num_draft_tokens} must be 1 to {MAX_NUM_DRAFT_TOKENS}")
    if known == "speculators":
        name = _repository(target_name or target.identity.name)
        values = speculators_config(config, target, name, num_draft_tokens)
    else:
        values = engine_config(config, known)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    tensors = engine_tensors(head, target, known, dtype)
    about = {"format_version": 1, "kind": config.kind} | head.meta
    if left_out is not None:
        about["left_out"] = left_out
    # The target that the head was made for, which may be another than the one at hand.
    identity = None if (head.meta.get("target") or {}).get("fingerprint") else target.identity
    about["target"] = describe_target(config, identity, head.meta.get("target"))
    write_head(out_dir, about=about, tensors=tensors, config=values)
    check = check_export(out_dir, head, target, known, dtype=dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    serve = serve_settings(config, known, out_dir, num_draft_tokens)
    return Export(out_dir, known, size, check, serve, left_out)


def _remove_markov(head: LoadedHead) -> str | None:
    """Take the correction off a head that has one; says what it was."""
    model, config = head.model, head.config
    if not isinstance(model, PEagleModel) or model.markov is None:
        return None
    model.remove_markov()
    return f"the correction by the token before (markov_form {config.markov_form}, rank {config.markov_rank})"


@dataclass(frozen=True, slots=True)
class Import:
    """What `import_head` wrote."""

    folder: Path
    kind: str
    max_logit_difference: float
    """Between the head that was read and the one that was written, float32; above 0 only if packed."""


def import_head(folder: str | Path, target: Target, out_dir: str | Path, *, packed: bool = False) -> Import:
    """Read a head of any known format, write it as a head folder of ours, and compare the two.

    Raises ModelFormatError naming tensors that are missing, unknown or of another shape, and where a head
    that was not packed comes back with other logits.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and out_dir.resolve() == Path(folder).resolve():
        raise ConfigError(f"{out_dir} is the head itself; choose another folder to import to")
    refuse_foreign(out_dir)
    head = read_head(folder, target)
    save_head(
        out_dir,
        head.model,
        head.vocab_map,
        meta=head.meta,
        # An own entry in eyas.json stays; a head from elsewhere is taken to be for the target at hand.
        identity=None if head.meta.get("target") else target.identity,
        packed=packed,
        target_embedding=target.decoder.embed_tokens.weight.detach(),
        target_lm_head=target.decoder.lm_head_weight.detach(),
    )
    again = read_head(out_dir, target)
    difference = float((probe(again.model) - probe(head.model)).abs().max())
    if difference > 0 and not packed:
        raise ModelFormatError(f"{out_dir}: logits of the imported head differ by {difference:.3g}")
    return Import(out_dir, head.config.kind, difference)


def read_head(folder: str | Path, target: Target) -> LoadedHead:
    """Load a head on the CPU in float32."""
    return load_head(
        folder,
        target.config,
        target.decoder.embed_tokens.weight.detach().float().cpu(),
        identity=target.identity,
        lm_head_weight=target.decoder.lm_head_weight.detach().float().cpu(),
    )


def engine_tensors(head: LoadedHead, target: Target, engine: Engine, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors under the engine's names; integers keep their types."""
    tensors = to_public(head.model, both_norm_names=engine != "speculators")
    table = full_embedding(head.model)
    if table is None and engine == "speculators":
        table = target.decoder.embed_tokens.weight.detach()
    if table is not None:
        tensors[EMBEDDING] = table
    if has_output_bias(head.config, engine):
        for index in range(head.config.num_layers):
            tensors[f"layers.{index}.self_attn.o_proj.bias"] = torch.zeros(head.config.hidden_size)
    if engine == "eagle":
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return tensors | {"d2t": head.vocab_map.d2t, "t2d": head.vocab_map.t2d}


def engine_config(config: HeadConfig, engine: Engine) -> dict[str, Any]:
    """config.json in the plain format."""
    values = write_plain(config)
    if engine == "eagle":
        values["architectures"] = ["LlamaForCausalLM"]
    return values


def speculators_config(
    config: HeadConfig, target: Target, target_name: str, num_draft_tokens: int
) -> dict[str, Any]:
    """config.json in the speculators format; every flag is written, because defaults differ by reader."""
    values: dict[str, Any] = {
        "architectures": ["PEagleSpeculator" if config.kind == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": config.kind,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "target_hidden_size": config.target_hidden_size,
        AUX_IDS: list(config.aux_layers),
        "embed_requires_grad": config.trained_embedding or config.kind == "peagle",
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **decoder_fields(config),
            # Of these fields vLLM hands on what it knows, and only from here how many streams there are.
            "num_aux_hidden_states": len(config.aux_layers),
        },
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {
                "name_or_path": target_name,
                "architectures": [_TARGET_ARCHITECTURES.get(target.config.family, "LlamaForCausalLM")],
            },
        },
    }
    if config.mask_token_id is not None:
        values["mask_token_id"] = config.mask_token_id
    return values


def serve_settings(config: HeadConfig, engine: Engine, folder: Path, num_draft_tokens: int) -> dict[str, Any]:
    """Speculative settings for the engine's command line; chains in both."""
    if engine == "sglang":
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(folder),
            "speculative_num_steps": num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": num_draft_tokens + 1,
        }
    if engine == "eagle":
        return {"ea_model_path": str(folder), "depth": num_draft_tokens - 1}
    settings = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_draft_tokens}
    return settings | ({"parallel_drafting": True} if config.kind == "peagle" else {})


def _repository(name: str) -> str:
    """Hold a target name to what vLLM's speculators loader accepts: a repository id, not a path."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise ConfigError(
            f"target name {name!r} is not a repository id (owner/name), which the speculators format needs "
            "and vLLM checks; give one with --target-name"
        )
    return name
