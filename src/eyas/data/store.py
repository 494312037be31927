"""The token store: documents as ids with supervised spans, in safetensors shards of at most 16 MiB.

    store/manifest.json           counts, target identity, shards with their SHA-256, `hash` over all of it
    store/shard-00000.safetensors
        ids           uint16 [T] (uint32 where V > 65535)    token ids of all documents, end to end
        doc_offsets   int64 [N + 1]                          where each document begins and ends in ids
        spans         int32 [S, 2]                           supervised tokens, half-open, within the document
        span_offsets  int64 [N + 1]                          spans of document i
        doc_keys      uint64 [N]                             hash of the prompt's id (a~v1: of a), for splits

Example, two documents [5, 6, 7] (7 supervised) and [5, 8, 9, 2] (8 and 9 supervised):
    ids [5, 6, 7, 5, 8, 9, 2]  doc_offsets [0, 3, 7]  spans [[2, 3], [1, 3]]  span_offsets [0, 1, 2]
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from eyas.core.errors import DataError
from eyas.data.files import (
    key_of,
    make_folder,
    read_manifest,
    sha256_file,
    sha256_json,
    write_bytes,
    write_json,
)
from eyas.data.template import Span, check_spans

FORMAT = "eyas-token-store"
SHARD_BYTES = 15 * 2**20
"""Payload of a shard; 1 MiB below the limit of 16 for the header."""


@dataclass(frozen=True, slots=True)
class TokenStore:
    """All documents of a store in memory (a document of 500 tokens takes about 1 KB)."""

    ids: NDArray[Any]
    doc_offsets: NDArray[np.int64]
    spans: NDArray[np.int32]
    span_offsets: NDArray[np.int64]
    doc_keys: NDArray[np.uint64]
    manifest: dict[str, Any]

    @property
    def num_documents(self) -> int:
        """N."""
        return len(self.doc_offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 [N]."""
        return np.diff(self.doc_offsets)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which tokens the assistant wrote, bool [T]."""
        starts = self.doc_offsets[:-1].repeat(np.diff(self.span_offsets))
        edges = np.zeros(len(self.ids) + 1, dtype=np.int32)
        np.add.at(edges, starts + self.spans[:, 0], 1)
        np.add.at(edges, starts + self.spans[:, 1], -1)
        return edges[:-1].cumsum() > 0

    def document(self, index: int) -> tuple[list[int], list[Span]]:
        """Ids and supervised spans of document `index`."""
        ids = self.ids[self.doc_offsets[index] : self.doc_offsets[index + 1]]
        spans = self.spans[self.span_offsets[index] : self.span_offsets[index + 1]]
        return ids.tolist(), [(int(a), int(b)) for a, b in spans]

    @classmethod
    def load(cls, folder: Path) -> "TokenStore":
        """Read a store; raises DataError where a shard is missing or does not have the recorded hash."""
        manifest = read_manifest(folder / "manifest.json", FORMAT)
        if manifest.get("hash") != sha256_json({k: v for k, v in manifest.items() if k != "hash"}):
            raise DataError(f"{folder / 'manifest.json'}: damaged or edited by hand; build the store again")
        parts: dict[str, list[NDArray[Any]]] = {}
        for shard in manifest["shards"]:
            path = folder / shard["name"]
            if not path.exists():
                raise DataError(f"{path}: the shard is missing; build the store again")
            if sha256_file(path) != shard["sha256"]:
                raise DataError(
                    f"{path}: the shard is damaged (its hash is not the manifest's); build it again"
                )
            for name, array in load(path.read_bytes()).items():
                parts.setdefault(name, []).append(array)
        if not parts:
            raise DataError(f"{folder}: the store has no documents")
        return cls(
            ids=np.concatenate(parts["ids"]),
            doc_offsets=_join_offsets(parts["doc_offsets"]),
            spans=np.concatenate(parts["spans"]),
            span_offsets=_join_offsets(parts["span_offsets"]),
            doc_keys=np.concatenate(parts["doc_keys"]),
            manifest=manifest,
        )


def _join_offsets(parts: list[NDArray[Any]]) -> NDArray[np.int64]:
    """[0, 3, 7] and [0, 2] -> [0, 3, 7, 9]."""
    return np.concatenate([[0], *(np.diff(part) for part in parts)]).cumsum().astype(np.int64)


class StoreWriter:
    """Collects documents and writes shards; the manifest comes last, so a store without one is unfinished."""

    def __init__(
        self, folder: Path, *, vocab_size: int, meta: dict[str, Any], shard_bytes: int = SHARD_BYTES
    ) -> None:
        make_folder(folder)
        if (folder / "manifest.json").exists():
            read_manifest(folder / "manifest.json", FORMAT)  # only a store may be replaced
        for old in (folder / "manifest.json", *folder.glob("shard-*.safetensors")):
            old.unlink(missing_ok=True)
        self.folder, self.vocab_size, self.meta, self.shard_bytes = folder, vocab_size, meta, shard_bytes
        self.dtype: Any = np.uint16 if vocab_size <= 0xFFFF else np.uint32
        self.shards: list[dict[str, Any]] = []
        self.num_supervised = 0
        self._reset()

    def _reset(self) -> None:
        self._ids: list[NDArray[Any]] = []
        self._spans: list[tuple[Span, ...]] = []
        self._keys: list[int] = []
        self._bytes = 0

    def add(
        self,
        name: str,
        ids: list[int] | tuple[int, ...],
        spans: list[Span] | tuple[Span, ...],
        *,
        key: int | None = None,
    ) -> None:
        """Add a document; `name`, or a key from another store, decides its split.

        Raises DataError for bad ids or spans.
        """
        check_spans(ids, spans, name)
        array = np.asarray(ids, dtype=np.int64)
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise DataError(
                f"{name}: ids run from {array.min()} to {array.max()}, outside the target's vocabulary "
                f"of {self.vocab_size}: was the data made with another tokenizer?"
            )
        size = array.size * np.dtype(self.dtype).itemsize + 24 + 8 * len(spans)
        if size > self.shard_bytes:
            raise DataError(f"{name}: a document of {array.size} tokens does not fit into one shard")
        if self._bytes + size > self.shard_bytes:
            self._flush()
        self._ids.append(array.astype(self.dtype))
        self._spans.append(tuple(spans))
        self._keys.append(key_of(name) if key is None else key)
        self._bytes += size
        self.num_supervised += sum(end - begin for begin, end in spans)

    def _flush(self) -> None:
        if not self._ids:
            return
        name = f"shard-{len(self.shards):05d}.safetensors"
        flat = [span for spans in self._spans for span in spans]
        tensors = {
            "ids": np.concatenate(self._ids),
            "doc_offsets": np.cumsum([0, *map(len, self._ids)], dtype=np.int64),
            "spans": np.asarray(flat, dtype=np.int32).reshape(-1, 2),
            "span_offsets": np.cumsum([0, *map(len, self._spans)], dtype=np.int64),
            "doc_keys": np.asarray(self._keys, dtype=np.uint64),
        }
        write_bytes(self.folder / name, save(tensors))
        self.shards.append(
            {
                "name": name,
                "sha256": sha256_file(self.folder / name),
                "num_documents": len(self._ids),
                "num_tokens": int(tensors["ids"].size),
            }
        )
        self._reset()

    def close(self) -> dict[str, Any]:
        """Write the last shard and the manifest; returns the manifest."""
        self._flush()
        if not self.shards:
            raise DataError(f"{self.folder}: nothing to store, no document was added")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": 1,
            "vocab_size": self.vocab_size,
            "num_documents": sum(shard["num_documents"] for shard in self.shards),
            "num_tokens": sum(shard["num_tokens"] for shard in self.shards),
            "num_supervised": self.num_supervised,
            "meta": self.meta,
            "shards": self.shards,
        }
        manifest["hash"] = sha256_json(manifest)
        write_json(self.folder / "manifest.json", manifest)
        return manifest
