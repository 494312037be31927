"""Captured features: written, read back by token, stopped and gone on with, refused where they are of another
run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.core.errors import DataError
from eyas.data.features import FeatureShape, FeatureStore, shard_edges, write_features
from eyas.data.loader import RowLoader
from eyas.data.store import StoreWriter, TokenStore

META = {"target": "t", "fingerprint": "f", "aux_layers": [1, 2]}
SEQ = 8


@pytest.fixture
def store(tmp_path):
    writer = StoreWriter(tmp_path / "store", vocab_size=100, meta={})
    rng = np.random.default_rng(0)
    for number, length in enumerate([5, 19, 8, 3, 12]):
        writer.add(f"doc-{number}", rng.integers(1, 99, length).tolist(), [(1, length)])
    writer.close()
    return TokenStore.load(tmp_path / "store")


def fake_target(batch):
    """Numbers that depend on the token and on its position in its piece, as a causal target's would."""
    x = batch.ids.float() + batch.positions / 16
    return (
        x.unsqueeze(-1) * torch.tensor([1.0, -2.0, 0.5, 3.0]),
        x.unsqueeze(-1) * torch.ones(3),
        batch.ids.long() + 1,
    )


def shape(kind):
    return FeatureShape(feature_size=4, hidden_size=3, kind=kind)


def capture(store, folder, kind="bf16", run=fake_target, **options):
    options = {"shard_bytes": 400, "meta": META, "seq_len": SEQ, "batch_rows": 2} | options
    return list(write_features(store, folder, run=run, shape=shape(kind), **options))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_every_epoch_s_rows_read_what_the_target_would_say(kind, store, tmp_path):
    done = capture(store, tmp_path / "out", kind)
    assert len(done) > 1
    assert done[-1] == (47, 47)
    features = FeatureStore(tmp_path / "out", store, seq_len=SEQ, meta=META)
    loader = RowLoader(store, np.arange(5), seq_len=SEQ, batch_rows=3, seed=3, with_source=True)
    for _ in range(2 * loader.batches_per_epoch()):
        batch = loader.next()
        there = batch.segments >= 0
        assert torch.equal(there, batch.source >= 0)
        got, wanted = features.read(batch.source), fake_target(batch)
        tolerance = 2**-8 if kind == "bf16" else 2**-3
        torch.testing.assert_close(got[0][there].float(), wanted[0][there], rtol=tolerance, atol=0.1)
        torch.testing.assert_close(got[1][there].float(), wanted[1][there], rtol=2**-8, atol=0)
        assert torch.equal(got[2][there], wanted[2][there])
        assert not got[0][~there].any()


def test_sizes_are_what_the_files_have(store, tmp_path):
    for kind in ("bf16", "fp8"):
        capture(store, tmp_path / kind, kind)
        tensors = [load_file(path) for path in (tmp_path / kind).glob("shard-*")]
        size = sum(t.numel() * t.element_size() for shard in tensors for t in shard.values())
        assert size == 47 * shape(kind).token_bytes
    assert shape("fp8").token_bytes < shape("bf16").token_bytes + 1


def test_shards_hold_whole_documents(store):
    edges = shard_edges(store, 10, 200)
    assert edges == [(0, 1), (1, 2), (2, 4), (4, 5)]
    assert shard_edges(store, 10, 10**6) == [(0, 5)]


def test_a_capture_that_was_stopped_goes_on_where_it_was(store, tmp_path):
    capture(store, tmp_path / "whole")
    calls = []

    def stops(batch):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fake_target(batch)

    with pytest.raises(KeyboardInterrupt):
        capture(store, tmp_path / "cut", run=stops)
    with pytest.raises(DataError, match=r"manifest.json: there is no such file"):
        FeatureStore(tmp_path / "cut", store, seq_len=SEQ, meta=META)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("shard-*")}
    assert kept
    capture(store, tmp_path / "cut")
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "cut"))
    assert first == second


def test_features_of_another_run_are_refused(store, tmp_path):
    capture(store, tmp_path / "out")
    with pytest.raises(DataError, match="captured with seq_len 8, the run has 16"):
        FeatureStore(tmp_path / "out", store, seq_len=16, meta=META)
    with pytest.raises(DataError, match=r"captured with aux_layers \[1, 2\], the run has \[1, 3\]"):
        FeatureStore(tmp_path / "out", store, seq_len=SEQ, meta=META | {"aux_layers": [1, 3]})
    other = replace(store, manifest=store.manifest | {"hash": "other"})
    with pytest.raises(DataError, match="captured with store_hash"):
        FeatureStore(tmp_path / "out", other, seq_len=SEQ, meta=META)
    with pytest.raises(DataError, match="holds features with another kind"):
        capture(store, tmp_path / "out", "fp8")


def test_a_bad_shard_is_named(store, tmp_path):
    capture(store, tmp_path / "out")
    path = tmp_path / "out" / "shard-00001.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 4
    path.write_bytes(bytes(body))
    with pytest.raises(DataError, match=r"shard-00001.safetensors: the shard is damaged; remove it"):
        FeatureStore(tmp_path / "out", store, seq_len=SEQ, meta=META)
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00001.safetensors: the shard is missing"):
        FeatureStore(tmp_path / "out", store, seq_len=SEQ, meta=META)
    capture(store, tmp_path / "out")
    FeatureStore(tmp_path / "out", store, seq_len=SEQ, meta=META)
