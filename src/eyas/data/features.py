"""Captured features on disk: what the target knows of every token of a store, so that it need not run again.

    features/manifest.json           what they were made from, and the shards with sizes and checksums
    features/shard-00000.safetensors tokens begin .. end - 1 of the store, whole documents
        features  [t, A * D]   bfloat16, or float8_e4m3fn with one scale a token
        scales    float32 [t]  only with float8: a token's largest |feature| / 448
        hidden    bfloat16 [t, Dt]  after the final norm; always bfloat16, the teacher's distribution hangs on
        it choices   int32 [t]    the target's greedy token after each

Documents are cut at `seq_len` as the loader cuts them, so features are made for one seq_len. Tokens that no
packed row contains (too short or unsupervised pieces) are zeros. Shards are read by mapping them into memory.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eyas.core.errors import DataError
from eyas.data.files import make_folder, read_manifest, sha256_json, write_json
from eyas.data.loader import Batch, pack_rows, slice_rows
from eyas.data.store import TokenStore

FORMAT = "eyas-features"
SHARD_BYTES = 2**30
KINDS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FP8_LARGEST = 448.0
_BLOCK = 2**24
_DTYPES = {
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "I32": torch.int32,
}

Known = tuple[Tensor, Tensor, Tensor]
"""features [B, n, A * D], hidden [B, n, Dt], choices int64 [B, n]"""


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What a token takes."""

    feature_size: int
    hidden_size: int
    kind: str

    @property
    def token_bytes(self) -> int:
        """Bytes on disk per token: 3 * 576 features in fp8, 576 hidden -> 1728 + 4 + 1152 + 4."""
        wide = self.kind == "bf16"
        return self.feature_size * (2 if wide else 1) + (0 if wide else 4) + 2 * self.hidden_size + 4


def shard_edges(store: TokenStore, token_bytes: int, shard_bytes: int = SHARD_BYTES) -> list[tuple[int, int]]:
    """(first document, document after the last) of every shard; a document is never cut.

    Documents of 3, 4 and 2 tokens at 1 byte, shards of 7 bytes -> (0, 2), (2, 3).
    """
    edges, begin = [], 0
    for document in range(1, store.num_documents + 1):
        full = (store.doc_offsets[document] - store.doc_offsets[begin]) * token_bytes > shard_bytes
        if full and document - 1 > begin:
            edges.append((begin, document - 1))
            begin = document - 1
    return [*edges, (begin, store.num_documents)]


def write_features(
    store: TokenStore,
    folder: Path,
    *,
    run: Callable[[Batch], Known],
    shape: FeatureShape,
    seq_len: int,
    batch_rows: int,
    meta: dict[str, Any],
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[tuple[int, int]]:
    """Capture the store shard by shard; yields (tokens done, tokens in all) and goes on where it was stopped.

    `run` is the target over packed rows. `meta` says what the features depend on (target, layers); a folder
    of other features is refused. The manifest comes last.
    """
    make_folder(folder)
    about = {
        "seq_len": seq_len,
        "kind": shape.kind,
        "feature_size": shape.feature_size,
        "hidden_size": shape.hidden_size,
        "store_hash": store.manifest["hash"],
        **meta,
    }
    _same_run(folder / "started.json", about)
    total, shards = int(store.doc_offsets[-1]), []
    for number, (first, last) in enumerate(shard_edges(store, shape.token_bytes, shard_bytes)):
        begin, end = int(store.doc_offsets[first]), int(store.doc_offsets[last])
        path = folder / f"shard-{number:05d}.safetensors"
        if not path.exists():
            tensors = _capture(store, np.arange(first, last), run, shape, seq_len, batch_rows, device)
            temporary = folder / f".{path.name}.tmp"
            try:
                save_file(tensors, temporary)
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                temporary.unlink(missing_ok=True)
                raise DataError(
                    f"{path}: could not be written ({error}); make room and run again, finished shards stay"
                ) from None
        shards.append(
            {"name": path.name, "begin": begin, "end": end, "bytes": path.stat().st_size, "crc32": _crc(path)}
        )
        yield end, total
    manifest = {"format": FORMAT, **about, "shards": shards}
    write_json(folder / "manifest.json", {**manifest, "hash": sha256_json(manifest)})
    (folder / "started.json").unlink()


def _same_run(path: Path, about: dict[str, Any]) -> None:
    """Shards that are there must be of this capture."""
    finished = path.parent / "manifest.json"
    for there in (path, finished):
        if there.exists():
            stored = json.loads(there.read_text(encoding="utf-8"))
            changed = [key for key, value in about.items() if stored.get(key) != value]
            if changed:
                raise DataError(
                    f"{path.parent}: holds features with another {', '.join(changed)}; use another folder"
                )
    write_json(path, about)


def _capture(
    store: TokenStore,
    documents: NDArray[np.int64],
    run: Callable[[Batch], Known],
    shape: FeatureShape,
    seq_len: int,
    batch_rows: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """One shard's tensors."""
    begin = int(store.doc_offsets[documents[0]])
    size = int(store.doc_offsets[documents[-1] + 1]) - begin
    tensors = {
        "features": torch.zeros(size, shape.feature_size, dtype=KINDS[shape.kind]),
        "hidden": torch.zeros(size, shape.hidden_size, dtype=torch.bfloat16),
        "choices": torch.zeros(size, dtype=torch.int32),
    }
    if shape.kind == "fp8":
        tensors["scales"] = torch.zeros(size, dtype=torch.float32)
    try:
        rows = pack_rows(store, store.mask, documents, seq_len, seed=0, with_source=True)
    except DataError:
        return tensors  # no piece of these documents is ever trained on
    assert rows.source is not None
    for first in range(0, rows.ids.shape[0], batch_rows):
        batch = slice_rows(rows, first, first + batch_rows)
        assert batch.source is not None
        there = batch.source >= 0
        place = batch.source[there].long() - begin
        features, hidden, choices = (x.cpu() for x in run(_on(batch, device)))
        tensors["hidden"][place] = hidden[there].to(torch.bfloat16)
        tensors["choices"][place] = choices[there].to(torch.int32)
        taken = features[there].float()
        if shape.kind == "fp8":
            scales = (taken.abs().amax(-1) / FP8_LARGEST).clamp_min(1e-12)
            tensors["scales"][place] = scales
            taken = taken / scales[:, None]
        # Bytes, because few operations know float8.
        tensors["features"].view(torch.uint8)[place] = taken.to(KINDS[shape.kind]).view(torch.uint8)
    return tensors


def _on(batch: Batch, device: torch.device | str) -> Batch:
    return Batch(*(x.to(device) for x in (batch.ids, batch.segments, batch.positions, batch.supervised)))


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


class FeatureStore:
    """Features of a token store, read by token number; raises DataError where they are of another run."""

    def __init__(self, folder: Path, store: TokenStore, *, seq_len: int, meta: dict[str, Any]) -> None:
        self.folder = folder
        manifest = read_manifest(folder / "manifest.json", FORMAT)
        if manifest.get("hash") != sha256_json({k: v for k, v in manifest.items() if k != "hash"}):
            raise DataError(f"{folder / 'manifest.json'}: damaged or edited by hand; capture again")
        wanted = {"seq_len": seq_len, "store_hash": store.manifest["hash"], **meta}
        for key, value in wanted.items():
            if manifest.get(key) != value:
                raise DataError(
                    f"{folder}: features were captured with {key} {manifest.get(key)!r}, "
                    f"the run has {value!r}"
                )
        self.manifest = manifest
        self.shards = [self._open(shard) for shard in manifest["shards"]]
        self.ends = torch.tensor([shard["end"] for shard in manifest["shards"]])
        self.begins = [int(shard["begin"]) for shard in manifest["shards"]]

    def _open(self, shard: dict[str, Any]) -> dict[str, Tensor]:
        """A shard's tensors as views of the mapped file; its checksum is looked at first."""
        path = self.folder / shard["name"]
        if not path.exists():
            raise DataError(f"{path}: the shard is missing; capture again (finished shards stay)")
        if path.stat().st_size != shard["bytes"] or _crc(path) != shard["crc32"]:
            raise DataError(f"{path}: the shard is damaged; remove it and capture again")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        mapped = np.memmap(path, dtype=np.uint8, mode="c")
        tensors = {}
        for name, about in header.items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                data = torch.from_numpy(mapped[8 + size + first : 8 + size + last])
                tensors[name] = data.view(_DTYPES[about["dtype"]]).view(about["shape"])
        return tensors

    def read(self, source: Tensor) -> Known:
        """Features, hidden and choices of tokens int [B, n] of the store (-1: zeros), on the CPU."""
        flat = source.reshape(-1).long()
        shape = (flat.numel(), self.manifest["feature_size"])
        features = torch.zeros(shape, dtype=torch.bfloat16)
        hidden = torch.zeros(flat.numel(), self.manifest["hidden_size"], dtype=torch.bfloat16)
        choices = torch.zeros(flat.numel(), dtype=torch.int64)
        owners = torch.searchsorted(self.ends, flat, right=True)
        for number in sorted(set(owners[flat >= 0].tolist())):
            places = ((owners == number) & (flat >= 0)).nonzero().squeeze(-1)
            tensors, local = self.shards[number], flat[places] - self.begins[number]
            taken = tensors["features"]
            taken = taken.view(torch.uint8)[local].view(taken.dtype)
            if "scales" in tensors:
                taken = taken.float() * tensors["scales"][local][:, None]
            features[places] = taken.to(torch.bfloat16)
            hidden[places] = tensors["hidden"][local]
            choices[places] = tensors["choices"][local].long()
        return tuple(x.view(*source.shape, *x.shape[1:]) for x in (features, hidden, choices))  # type: ignore[return-value]
