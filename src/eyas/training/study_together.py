"""Several variants in turn, step by step, so that what they have in common is done once.

Variants that train on the same batches need the same answers of the frozen target, which is a third of a
step of a small head: the first of them to come to a batch asks, the others read. Validation rows are asked
once for all. Records and weights are those of variants trained alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eyas.data.loader import Batch
from eyas.targets.decoder import Decoder
from eyas.training.capture import Captured, CaptureFn
from eyas.training.trainer import Trainer


class SharedCapture:
    """What the target said last to each kind of batch, and to all validation rows."""

    def __init__(self) -> None:
        self.newest: dict[Any, tuple[Any, Captured]] = {}
        self.held_out: dict[Any, Captured] = {}

    def join(self, trainer: Trainer) -> None:
        """Have `trainer` read what others asked before it. Runs of captured features need no target."""
        data, run, step = trainer.config.data, trainer.config.run, trainer.step
        if data.features is not None or trainer.world.size > 1:
            return
        target, store = trainer.target.identity.fingerprint, trainer.store.manifest["hash"]
        common = (target, store, data.held_out, trainer.model.config.aux_layers)
        # With accumulation a step has several batches, and the loader stands behind the last of them.
        if run.accumulation == 1:
            source = (*common, data.seq_len, data.share, run.batch_rows, run.seed)
            step.capture_with(self._latest(source, lambda: trainer.loader.state, step.capture_fn))
        rows = (*common, trainer.validate_seq_len, run.validate_rows)
        trainer.examined.capture_held_out = self._kept(rows, trainer.examined.capture_held_out)

    def _latest(self, source: Any, state: Callable[[], Any], ask: CaptureFn) -> CaptureFn:
        def read(decoder: Decoder, batch: Batch, aux_layers: tuple[int, ...]) -> Captured:
            place = state()
            kept = self.newest.get(source)
            if kept is None or kept[0] != place:
                kept = self.newest[source] = (place, ask(decoder, batch, aux_layers))
            return kept[1]

        return read

    def _kept(self, rows: Any, ask: CaptureFn) -> CaptureFn:
        def read(decoder: Decoder, batch: Batch, aux_layers: tuple[int, ...]) -> Captured:
            key = (*rows, batch.ids.storage_offset(), batch.ids.shape[0])
            if key not in self.held_out:
                self.held_out[key] = ask(decoder, batch, aux_layers)
            return self.held_out[key]

        return read


def in_turn(runs: Sequence[Iterator[Any]]) -> None:
    """Advance every iterator by one, again and again, until all are done."""
    left = list(runs)
    while left:
        left = [run for run in left if next(run, _END) is not _END]


_END = object()
