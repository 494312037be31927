"""How many drafts pay at which batch size: what `eyas calibrate` wrote into a head's eyas.json.

    {"calibration": {"device": "NVIDIA H200", "dtype": "bfloat16", "by_batch":
        [{"max_batch": 1, "k": 7, "tree": null}, {"max_batch": 16, "k": 3, "tree": null}, ...]}}

Batches up to `max_batch` take that entry, larger ones than all the last entry; k = 0 decodes plainly. A step
knows its shape by its number of drafts (drafters/by_number): where a tree has as many nodes as a chain here
has drafts, or as another tree, its entry's `chain_k` counts, the fastest chain there (without one, a chain
of its depth).

Measurements hold for the device and dtype that they were made on; elsewhere they are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.core.tree import MAX_ROWS, TreeBudget
from eyas.drafters.build import MAX_NUM_DRAFT_TOKENS
from eyas.drafters.files import read_json


@dataclass(frozen=True, slots=True)
class Schedule:
    """Drafts by batch size: (largest batch, number of drafts), smallest batch first."""

    drafts: tuple[tuple[int, int], ...]
    trees: tuple[TreeBudget, ...] = ()
    """What is a tree among them: the number of nodes tells which. Every other number is K of a chain."""

    @property
    def most(self) -> int:
        """Largest number of drafts."""
        return max(number for _, number in self.drafts)

    @property
    def longest_chain(self) -> int:
        """Largest K, 0 where all are trees."""
        nodes = {tree.num_draft_tokens for tree in self.trees}
        return max((number for _, number in self.drafts if number not in nodes), default=0)

    def num_drafts(self, batch_size: int) -> int:
        """Drafts of a step: ((1, 7), (16, 3)) gives 7 for 1, 3 for 2 and 3 for 64."""
        for largest, number in self.drafts:
            if batch_size <= largest:
                return number
        return self.drafts[-1][1]


def schedule_of(folder: Path, *, device: str, dtype: str, max_num_seqs: int) -> Schedule | None:
    """The schedule of a head folder for this device and dtype; None if it has none.

    ModelFormatError naming the file and field where it cannot be read.
    """
    path = folder / "eyas.json"
    found = read_json(path).get("calibration") if path.exists() else None
    if found is None:
        return None
    where = f"{path}: calibration"
    if not isinstance(found, dict):
        raise ModelFormatError(f"{where} must be an object")
    if (found.get("device"), found.get("dtype")) != (device, dtype):
        return None
    entries = found.get("by_batch")
    if not isinstance(entries, list) or not entries:
        raise ModelFormatError(f"{where}.by_batch must be a list of at least one entry")
    return _schedule([_entry(entry, where) for entry in entries], max_num_seqs)


def _entry(entry: Any, where: str) -> tuple[int, int, TreeBudget | None]:
    """(max_batch, K of the chain, tree) of one entry."""
    good = (
        isinstance(entry, dict)
        and type(entry.get("chain_k", 0)) is int
        and 0 <= entry.get("chain_k", 0) <= MAX_NUM_DRAFT_TOKENS
        and type(entry.get("max_batch")) is int
        and type(entry.get("k")) is int
        and isinstance(entry.get("tree"), str | None)
        and entry["max_batch"] >= 1
        and 0 <= entry["k"] <= MAX_NUM_DRAFT_TOKENS
    )
    if not good:
        raise ModelFormatError(
            f"{where}.by_batch: an entry has max_batch (1 or more), k, chain_k (0 to {MAX_NUM_DRAFT_TOKENS}) "
            f"and tree (text or null), not {entry!r}; run `eyas calibrate` again"
        )
    if not entry["tree"]:
        return entry["max_batch"], entry["k"], None
    try:
        tree = TreeBudget.parse(entry["tree"])
    except ConfigError as error:
        raise ModelFormatError(f"{where}.by_batch: {error}; run `eyas calibrate` again") from None
    return entry["max_batch"], entry.get("chain_k", tree.depth), tree


def _schedule(entries: Sequence[tuple[int, int, TreeBudget | None]], max_num_seqs: int) -> Schedule:
    entries = sorted(entries, key=lambda entry: entry[0])
    # Entries for batches that this engine never has do not matter.
    needed = [entry for i, entry in enumerate(entries) if i == 0 or entries[i - 1][0] < max_num_seqs]
    shapes: list[int | TreeBudget] = [k if tree is None else tree for _, k, tree in needed]
    if max(k for _, k, _ in needed) >= MAX_ROWS:  # more than a tree's rows can hold
        shapes = [k for _, k, _ in needed]
    while (clash := _clash(shapes)) is not None:
        shapes[clash] = needed[clash][1]
    trees = dict.fromkeys(shape for shape in shapes if isinstance(shape, TreeBudget))
    sizes = [largest for largest, _, _ in needed]
    return Schedule(tuple(zip(sizes, map(_number, shapes), strict=True)), tuple(trees))


def _number(shape: int | TreeBudget) -> int:
    """Drafts of a chain or a tree."""
    return shape if isinstance(shape, int) else shape.num_draft_tokens


def _clash(shapes: Sequence[int | TreeBudget]) -> int | None:
    """Place of a tree that its number of nodes does not tell from another shape; None if there is none."""
    for place, shape in enumerate(shapes):
        same = [other for other in shapes if _number(other) == _number(shape)]
        if isinstance(shape, TreeBudget) and any(other != shape for other in same):
            return place
    return None
