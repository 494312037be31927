"""Whose embedding table a head reads, and how little of it has to be stored.

Engines want a table wherever it is not the target's; P-EAGLE always has one, because the row of its mask
token is learned. A packed head stores `embed_rows.weight` and `embed_rows.ids`: only the rows that differ
from the target's, and the mask row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.head_names import EMBEDDING
from eyas.drafters.peagle.model import PEagleModel

ROWS, ROW_IDS = "embed_rows.weight", "embed_rows.ids"


def full_embedding(model: Eagle3Model) -> Tensor | None:
    """Table [V, D] for the engines: the head's own, mask row included; None if it is the target's."""
    if isinstance(model, PEagleModel):
        table = model.embed_weight.detach().clone()
        table[model.mask_token_id] = model.mask_embedding.detach().to(table.dtype)
        return table
    return model.embed_weight.detach() if model.config.trained_embedding else None


def own_rows(model: Eagle3Model, target_embedding: Tensor | None) -> dict[str, Tensor]:
    """Rows that are not the target's, ascending by id; {} if all are. Without a target table: all."""
    mask_id = model.config.mask_token_id
    if not model.config.trained_embedding:
        if not isinstance(model, PEagleModel):
            return {}
        row = model.mask_embedding.detach()[None]
        return {ROWS: row, ROW_IDS: torch.tensor([mask_id], dtype=torch.int32)}
    table = full_embedding(model)
    assert table is not None
    changed = torch.ones(table.shape[0], dtype=torch.bool, device=table.device)
    if target_embedding is not None and target_embedding.shape == table.shape:
        changed = (table != target_embedding.to(table.device, table.dtype)).any(1)
    if mask_id is not None:
        changed[mask_id] = True
    ids = changed.nonzero().squeeze(1)
    return {ROWS: table[ids], ROW_IDS: ids.to(torch.int32)}


def read_embedding(
    tensors: dict[str, Tensor], config: HeadConfig, embed_weight: Tensor, *, where: str
) -> tuple[HeadConfig, Tensor, Tensor | None]:
    """Take the table out of unpacked `tensors`; `embed_weight` is the target's.

    Returns (config that says who owns the table, the table [V, D] to build the head on, the mask row [D]).
    The table is `embed_weight` itself where no row but the mask's differs.
    """
    shape, mask_id = [config.vocab_size, config.hidden_size], config.mask_token_id
    table = tensors.pop(EMBEDDING, None)
    ids, rows = tensors.pop(ROW_IDS, None), tensors.pop(ROWS, None)
    if (ids is None) != (rows is None):
        raise ModelFormatError(f"{where}: {ROWS} and {ROW_IDS} come together, one of them is missing")
    if rows is not None and ids is not None:
        ids = ids.long()
        inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
        if not inside or list(rows.shape) != [ids.numel(), config.hidden_size]:
            raise ModelFormatError(f"{where}: {ROWS} {list(rows.shape)} does not fit a table {shape}")
        if ids.tolist() == [mask_id]:
            return config, embed_weight, rows[0]
        complete = ids.numel() == config.vocab_size
        base = torch.empty(shape) if complete else embed_weight.detach().float().cpu().clone()
        table = base.index_copy(0, ids, rows.float())
    shared = config.hidden_size == config.target_hidden_size
    if table is None:
        if not shared:
            raise ModelFormatError(
                f"{where}: missing tensor {EMBEDDING}; a head of hidden size {config.hidden_size} cannot "
                f"share the target's table of {config.target_hidden_size}"
            )
        return config, embed_weight, None
    if list(table.shape) != shape:
        raise ModelFormatError(f"{where}: tensor {EMBEDDING} has shape {list(table.shape)}, not {shape}")
    mask_row = None if mask_id is None else table[mask_id]
    if shared and _same_but(table, embed_weight, mask_id):
        return config, embed_weight, mask_row
    return replace(config, trained_embedding=True), table, mask_row


def _same_but(table: Tensor, target: Tensor, row: int | None) -> bool:
    """Whether two tables agree in every row but `row`, in the less precise of their types."""
    mine, theirs = table.to(target.device), target.detach()
    narrow = mine.dtype if mine.dtype.itemsize < theirs.dtype.itemsize else theirs.dtype
    differs = (mine.to(narrow) != theirs.to(narrow)).any(1)
    if row is not None:
        differs[row] = False
    return not bool(differs.any())
