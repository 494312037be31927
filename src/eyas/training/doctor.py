"""What is looked at before a run: is the data what it should be, and does training see what decoding will?

Each check gives a Finding: "ok", "warn" (the run would work, perhaps not well) or "fail" (it would learn the
wrong thing). Sample rows go through the very functions that training uses, and through the target's plain
forward, one document at a time.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eyas.data.loader import Batch, slice_rows
from eyas.data.store import TokenStore
from eyas.nn.norm import Stream
from eyas.nn.packed import PackedContext
from eyas.targets.decoder import Decoder
from eyas.training.capture import capture
from eyas.training.trainer import Trainer

Status = Literal["ok", "warn", "fail"]
LEAST_COVERAGE = 0.95
"""Share of supervised tokens that a draft vocabulary should name; what it lacks can never be drafted."""
LEAST_OWN = 0.4
"""Share of an answer's tokens that are the target's first choice, below which the answers are hardly its
own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str


def examine(trainer: Trainer, *, rows: int = 2) -> list[Finding]:
    """Every check, on `rows` packed rows where the target has to run."""
    batch = slice_rows(trainer.loader.epoch_rows(0), 0, rows)
    return [
        masks(trainer.store),
        captured_states(trainer, batch),
        teacher(trainer, batch),
        own_words(trainer, batch),
        vocabulary(trainer),
    ]


def masks(store: TokenStore) -> Finding:
    """Documents whose every token is supervised, or none: the loss mask was lost, or the wrong way round.

    The store's writer refuses them; this looks at what is there, whoever wrote it.
    """
    spans = store.spans.astype(np.int64)
    owners = np.repeat(np.arange(store.num_documents), np.diff(store.span_offsets))
    supervised = np.bincount(owners, weights=spans[:, 1] - spans[:, 0], minlength=store.num_documents)
    none, every = supervised == 0, supervised == store.lengths
    share = float(supervised.sum()) / max(int(store.lengths.sum()), 1)
    text = f"{100 * share:.1f} % of {int(store.lengths.sum()):,} tokens are supervised"
    for what, bad in (("no token", none), ("every token", every)):
        if bad.any():
            text += f"; {what} in {int(bad.sum()):,} of {store.num_documents:,} documents"
            text += f" (the first is {int(np.argmax(bad))})"
    return Finding("loss mask", "fail" if (none | every).any() else "ok", text)


def captured_states(trainer: Trainer, batch: Batch) -> Finding:
    """Features of packed rows against those of each document alone, caught by hooks on the layers."""
    decoder, layers = trainer.target.decoder, trainer.model.config.aux_layers
    taken = capture(decoder, batch, layers).features
    worst = 0.0
    for row, begin, end in documents(batch):
        plain = plain_states(decoder, batch.ids[row, begin:end], layers)
        wanted, got = plain.float(), taken[row, begin:end].float()
        worst = max(worst, float((got - wanted).norm() / wanted.norm().clamp_min(1e-12)))
    bound = 1e-3 if trainer.target.dtype == torch.float32 else 5e-2
    text = (
        f"streams entering layers {list(layers)}: packed and plain differ by {worst:.1e} (bound {bound:.0e})"
    )
    return Finding("captured states", "ok" if worst < bound else "fail", text)


def teacher(trainer: Trainer, batch: Batch) -> Finding:
    """The teacher's first choice, of all ids and of the draft vocabulary, against the plain logits'."""
    decoder = trainer.target.decoder
    taken = capture(decoder, batch, trainer.model.config.aux_layers)
    restricted = trainer.vocab_map.to_target((taken.hidden @ trainer.step.teacher_weight.T).argmax(-1))
    known = trainer.step.draft_ids[taken.choices] >= 0
    same, same_restricted, total, total_known = 0, 0, 0, 0
    for row, begin, end in documents(batch):
        place = (row, slice(begin, end))
        plain = plain_logits(decoder, batch.ids[place]).argmax(-1)
        same += int((taken.choices[place] == plain).sum())
        same_restricted += int(((restricted[place] == plain) & known[place]).sum())
        total, total_known = total + end - begin, total_known + int(known[place].sum())
    shares = (same / max(total, 1), same_restricted / max(total_known, 1))
    bound = 0.999 if trainer.target.dtype == torch.float32 else 0.97
    text = (
        f"argmax equals the target's at {100 * shares[0]:.1f} % of {total} positions, within the draft "
        f"vocabulary at {100 * shares[1]:.1f} % of those that it can name"
    )
    return Finding("teacher", "ok" if min(shares) >= bound else "fail", text)


def own_words(trainer: Trainer, batch: Batch) -> Finding:
    """How often the data's supervised tokens are what the target itself would say."""
    choices = capture(trainer.target.decoder, batch, trainer.model.config.aux_layers).choices
    inside = batch.supervised[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1])
    own = (choices[:, :-1] == batch.ids[:, 1:]) & inside
    share = float(own.sum()) / max(float(inside.sum()), 1.0)
    text = f"{100 * share:.1f} % of the supervised tokens are the target's first choice"
    if share < LEAST_OWN:
        return Finding("answers", "warn", text + ": let the target answer the prompts (eyas data regenerate)")
    return Finding("answers", "ok", text)


def vocabulary(trainer: Trainer) -> Finding:
    """Share of supervised tokens that the draft vocabulary can name."""
    size, share = trainer.vocab_map.draft_vocab_size, trainer.coverage
    text = f"{size:,} of {trainer.vocab_map.vocab_size:,} ids cover {100 * share:.2f} % of supervised tokens"
    if share < LEAST_COVERAGE:
        return Finding("draft vocabulary", "warn", text + ": raise head.draft_vocab_size")
    return Finding("draft vocabulary", "ok", text)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, begin, end) of every document of the rows: segments 0 0 2 2 -1 give (0, 0, 2) and (0, 2, 4)."""
    found = []
    for row, segments in enumerate(batch.segments.tolist()):
        begin = 0
        for place in range(1, len(segments) + 1):
            if place == len(segments) or segments[place] != segments[begin]:
                if segments[begin] >= 0:
                    found.append((row, begin, place))
                begin = place
    return found


@torch.no_grad()
def plain_states(decoder: Decoder, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Streams entering `layers` for one document of ids [n], [n, A * D], as hooks on the layers see them."""
    seen: dict[int, Tensor] = {}

    def entering(layer: int) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
            seen[layer] = inputs[0].hidden[0].clone()

        return hook

    def leaving(_module: Any, _inputs: Any, output: Stream) -> None:
        seen[len(decoder.layers)] = output.hidden[0].clone()

    handles = [block.register_forward_pre_hook(entering(k)) for k, block in enumerate(decoder.layers)]
    handles.append(decoder.layers[-1].register_forward_hook(leaving))
    try:
        _alone(decoder, ids)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([seen[layer] for layer in layers], dim=-1)


@torch.no_grad()
def plain_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """The target's logits [n, V] after each token of one document of ids [n]."""
    return decoder.logits(_alone(decoder, ids))[0]


def _alone(decoder: Decoder, ids: Tensor) -> Tensor:
    row = ids.long().unsqueeze(0)
    positions = torch.arange(row.shape[1], device=row.device).unsqueeze(0)
    hidden, _ = decoder(row, positions, PackedContext.of(torch.zeros_like(row, dtype=torch.int32)))
    result: Tensor = hidden
    return result
