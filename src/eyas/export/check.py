"""Hold an exported head against the one it came from.

Names and shapes are compared with the literal table of names.py, then the folder is loaded again and both
heads run on the same random rows, several depths deep, through whole-sequence attention.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.core.errors import ModelFormatError
from eyas.drafters.artifact import LoadedHead, load_head
from eyas.drafters.files import read_tensors
from eyas.drafters.probe import probe
from eyas.export.engines import Engine
from eyas.export.names import expected_tensors
from eyas.targets.base import Target


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """Result of `check_export`."""

    missing: list[str]
    unknown: list[str]
    max_logit_difference: float
    """Largest absolute difference of logits between the head and the reloaded export, float32."""
    num_tensors: int


def check_export(
    folder: Path, head: LoadedHead, target: Target, engine: Engine, *, dtype: torch.dtype = torch.float32
) -> ExportCheck:
    """Compare; raises ModelFormatError for missing, unknown or misshapen tensors and for other logits.

    A float32 export must agree bit for bit; narrower types only have their difference reported.
    """
    missing, unknown = compare_names(folder, head, engine)
    if missing or unknown:
        raise ModelFormatError(
            f"{folder} is not a complete {engine} head; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    table = target.decoder.embed_tokens.weight.detach().float().cpu()
    again = load_head(folder, target.config, table)
    if not torch.equal(again.vocab_map.target_ids, head.vocab_map.target_ids):
        raise ModelFormatError(f"{folder}: the vocabulary map changed in the export")
    if again.config.aux_layers != head.config.aux_layers:
        raise ModelFormatError(
            f"{folder}: captured layers {again.config.aux_layers} are not the head's {head.config.aux_layers}"
        )
    difference = float((probe(again.model) - probe(head.model)).abs().max())
    if difference > 0 and dtype == torch.float32:
        raise ModelFormatError(
            f"{folder}: logits of the exported head differ from the head's by {difference:.3g}"
        )
    return ExportCheck(missing, unknown, difference, len(read_tensors(folder)))


def compare_names(folder: Path, head: LoadedHead, engine: Engine) -> tuple[list[str], list[str]]:
    """(missing, unknown) tensor names of a folder; a tensor of another shape counts as both."""
    expected = expected_tensors(head.config, engine)
    found = {name: list(tensor.shape) for name, tensor in read_tensors(folder).items()}
    missing = sorted(name for name, shape in expected.items() if found.get(name) != shape)
    unknown = sorted(name for name, shape in found.items() if expected.get(name) != shape)
    return missing, unknown
