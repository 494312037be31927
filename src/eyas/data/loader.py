"""Pack documents into rows, hold the rows on the device, hand out batches by (epoch, position).

A row has `seq_len` tokens of several documents, told apart by segment ids; a document longer than a row is
cut, and its pieces are documents of their own. Attention never crosses a segment.

    seq_len 8, documents of 3, 4 and 2 tokens:
        tokens     a0 a1 a2 b0 b1 b2 b3 --      c0 c1 -- ...
        segments    0  0  0  1  1  1  1 -1       0  0 -1 ...
        positions   0  1  2  0  1  2  3  0       0  1  0 ...

Every epoch shuffles documents (and so which of them share a row) from (seed, epoch) alone, so the state
(epoch, batch) resumes exactly.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.core.errors import DataError
from eyas.data.store import TokenStore

MIN_TOKENS = 3
"""Shortest useful piece: one draft row reads two tokens and predicts the third."""
KEPT_EPOCHS = 2
"""Epochs on the device that loaders share."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Batch:
    """B packed rows of n tokens on the device."""

    ids: Tensor
    """int32 [B, n]"""
    segments: Tensor
    """int32 [B, n], -1 for padding"""
    positions: Tensor
    """int32 [B, n], position within the document"""
    supervised: Tensor
    """bool [B, n], tokens that the assistant wrote"""
    source: Tensor | None = None
    """int32 [B, n], each token's number in the store (-1 for padding), where it was asked for"""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where the next batch comes from."""

    epoch: int = 0
    batch: int = 0


def split_documents(
    store: TokenStore, held_out: float, share: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of training and held-out documents, by hash of their ids; stable when data is added.

    Of the training documents only `share` is given, the same ones and more for a larger share.
    """
    place = (store.doc_keys >> np.uint64(11)).astype(np.float64) / 2.0**53
    chosen = place < held_out
    kept = ~chosen if share >= 1.0 else ~chosen & (place < held_out + share * (1.0 - held_out))
    index = np.arange(store.num_documents)
    return index[kept], index[chosen]


def place_pieces(lengths: list[int], seq_len: int) -> tuple[list[int], list[int], int]:
    """Best-fit placement in the given order: (row of each piece, column of each piece, number of rows).

    seq_len 8, lengths [5, 6, 3, 2] -> rows [0, 1, 0, 1], columns [0, 0, 5, 6], 2 rows.
    """
    rows, columns, num_rows = [], [], 0
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]
    gaps = 0  # bit g is set where an open row has g free tokens
    for length in lengths:
        fitting = gaps >> length
        if fitting:
            gap = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[gap].pop()
            if not open_rows[gap]:
                gaps &= ~(1 << gap)
        else:
            gap, row = seq_len, num_rows
            num_rows += 1
        rows.append(row)
        columns.append(seq_len - gap)
        rest = gap - length
        if rest >= MIN_TOKENS:
            open_rows[rest].append(row)
            gaps |= 1 << rest
    return rows, columns, num_rows


def pack_rows(
    store: TokenStore,
    mask: NDArray[np.bool_],
    documents: NDArray[np.int64],
    seq_len: int,
    *,
    seed: int,
    with_source: bool = False,
) -> Batch:
    """Pack `documents` in a random order into rows of seq_len (on the CPU); row order is random too.

    Pieces in which no draft row would be supervised are left out. Raises DataError if nothing is left.
    """
    rng = np.random.default_rng(seed)
    documents = rng.permutation(documents)
    starts, lengths = store.doc_offsets[documents], store.lengths[documents]
    num_pieces = -(-lengths // seq_len)
    which = np.repeat(np.arange(len(documents)), num_pieces)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    begin = starts[which] + nth * seq_len
    size = np.minimum(seq_len, lengths[which] - nth * seq_len)
    total = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    keep = (size >= MIN_TOKENS) & (total[begin + size] > total[np.minimum(begin + 2, begin + size)])
    begin, size = begin[keep], size[keep]
    if not len(size):
        raise DataError(
            f"no document gives a supervised row of {seq_len} tokens; is the split or the data empty?"
        )
    rows, columns, num_rows = place_pieces(size.tolist(), seq_len)
    shuffled = rng.permutation(num_rows)
    row, column = shuffled[np.asarray(rows)], np.asarray(columns)
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    source = np.repeat(begin, size) + within
    place = np.repeat(row * seq_len + column, size) + within

    def scatter(values: NDArray[np.generic], fill: int, kind: type) -> Tensor:
        flat: NDArray[Any] = np.full(num_rows * seq_len, fill, dtype=kind)
        flat[place] = values
        return torch.from_numpy(flat.reshape(num_rows, seq_len))

    # Segment = the column where the piece starts: distinct within a row, and needs no counting.
    return Batch(
        ids=scatter(store.ids[source], 0, np.int32),
        segments=scatter(np.repeat(column, size), -1, np.int32),
        positions=scatter(within, 0, np.int32),
        supervised=scatter(mask[source], 0, np.bool_),
        source=scatter(source, -1, np.int32) if with_source else None,
    )


def once(shared: dict[Any, Any] | None, key: Any, make: Callable[[], Made]) -> Made:
    """`make()`, or what it made the last time where `shared` has it under `key`."""
    if shared is None:
        return make()
    if key not in shared:
        shared[key] = make()
    made: Made = shared[key]
    return made


class RowLoader:
    """Endless batches of packed rows; `state` says which comes next and may be set to resume."""

    def __init__(
        self,
        store: TokenStore,
        documents: NDArray[np.int64],
        *,
        seq_len: int,
        batch_rows: int,
        seed: int,
        device: torch.device | str = "cpu",
        with_source: bool = False,
        shared: dict[Any, Any] | None = None,
    ) -> None:
        """`shared` keeps the mask and the newest epochs for other loaders that are given the same one."""
        self.with_source, self.shared = with_source, shared
        self.store, self.documents = store, documents
        self.mask = once(shared, ("mask", store.manifest["hash"]), lambda: store.mask)
        self.seq_len, self.batch_rows, self.seed, self.device = seq_len, batch_rows, seed, device
        self.state = LoaderState()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._packed: dict[int, Future[Batch]] = {}
        self._rows: tuple[int, Batch] | None = None

    def _pack(self, epoch: int) -> Batch:
        seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        rows = pack_rows(
            self.store, self.mask, self.documents, self.seq_len, seed=seed, with_source=self.with_source
        )
        missing = self.batch_rows - rows.ids.shape[0]
        return rows if missing <= 0 else _pad(rows, missing)

    def epoch_rows(self, epoch: int) -> Batch:
        """All rows of an epoch on the device; the next epoch is packed in the background meanwhile."""
        if self._rows is None or self._rows[0] != epoch:
            self._rows = None
            if self.shared is not None:
                self._rows = (epoch, self._shared_rows(epoch, self.shared))
                return self._rows[1]
            future = self._packed.pop(epoch, None)
            rows = future.result() if future is not None else self._pack(epoch)
            self._rows = (epoch, _to(rows, self.device))
            self._packed = {epoch + 1: self._worker.submit(self._pack, epoch + 1)}
        return self._rows[1]

    def _shared_rows(self, epoch: int, shared: dict[Any, Any]) -> Batch:
        kept: dict[Any, Batch] = shared.setdefault("epochs", {})
        place = (self.store.manifest["hash"], self.documents.tobytes(), str(self.device), self.with_source)
        key = (*place, self.seq_len, self.batch_rows, self.seed, epoch)
        while key not in kept and len(kept) >= KEPT_EPOCHS:
            del kept[next(iter(kept))]
        return once(kept, key, lambda: _to(self._pack(epoch), self.device))

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Whole batches of an epoch; rows left over wait for another epoch's shuffle."""
        return int(self.epoch_rows(epoch).ids.shape[0]) // self.batch_rows

    def next(self) -> Batch:
        """The batch at `state`, which moves on by one."""
        epoch, batch = self.state.epoch, self.state.batch
        rows = self.epoch_rows(epoch)
        first = batch * self.batch_rows
        out = slice_rows(rows, first, first + self.batch_rows)
        last = batch + 1 >= self.batches_per_epoch(epoch)
        self.state = LoaderState(epoch + 1, 0) if last else LoaderState(epoch, batch + 1)
        return out

    def close(self) -> None:
        """Drop the epoch that is being packed ahead."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def slice_rows(rows: Batch, begin: int, end: int) -> Batch:
    """Rows begin .. end - 1, without copying."""
    return _each(rows, lambda tensor, _: tensor[begin:end])


def _to(rows: Batch, device: torch.device | str) -> Batch:
    return _each(rows, lambda tensor, _: tensor.to(device))


def _pad(rows: Batch, missing: int) -> Batch:
    """Empty rows below, so that a small data set still fills a batch."""
    fills = {"segments": -1, "source": -1}
    return _each(
        rows,
        lambda tensor, name: torch.cat(
            [tensor, tensor.new_full((missing, tensor.shape[1]), fills.get(name, 0))]
        ),
    )


def _each(rows: Batch, change: Callable[[Tensor, str], Tensor]) -> Batch:
    """The batch with every tensor changed."""
    tensors: dict[str, Any] = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return Batch(**{name: change(x, name) for name, x in tensors.items() if x is not None})
