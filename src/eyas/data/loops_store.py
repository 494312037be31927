"""A token store without the looping ends of its answers, from another one."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eyas.core.errors import DataError
from eyas.data.loops import LoopRule, trim_document
from eyas.data.store import StoreWriter, TokenStore

_REPORT_EVERY = 512


def trim_store(
    store: TokenStore,
    out: Path,
    rule: LoopRule,
    *,
    source: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Write `store` to `out` with loops trimmed; returns the manifest and the loops found.

    A loop is (document, its first token in it, the first token that is cut or no longer supervised).
    Documents keep their order and their keys, so the same ones are held out. `source` is the folder of
    `store`, which may not be written over. What was done stands in the manifest's meta under "trim".
    """
    if source is not None and out.resolve() == source.resolve():
        raise DataError(f"{out}: is the store that is read; write the trimmed one to another folder")
    counts: dict[str, Any] = {
        "num_answers": len(store.spans),
        "num_looping": 0,
        "num_cut": 0,
        "num_looping_tokens": 0,
    }
    about = {**asdict(rule), "store_hash": store.manifest["hash"]}
    meta = {**store.manifest["meta"], "trim": {**about, "counts": counts}}
    writer = StoreWriter(out, vocab_size=int(store.manifest["vocab_size"]), meta=meta)
    found: list[tuple[int, int, int]] = []
    for number in range(store.num_documents):
        ids, spans = store.document(number)
        size, kept, loops = trim_document(np.asarray(ids), spans, rule)
        for answer, begin in loops:
            counts["num_looping_tokens"] += spans[answer][1] - begin
            counts["num_cut"] += kept[answer] != spans[answer]
            found.append((number, begin, kept[answer][1]))
        writer.add(
            f"{source or 'store'}: document {number}", ids[:size], kept, key=int(store.doc_keys[number])
        )
        if progress is not None and (number + 1) % _REPORT_EVERY == 0:
            progress(number + 1)
    counts["num_looping"] = len(found)
    if progress is not None:
        progress(store.num_documents)
    return writer.close(), found
