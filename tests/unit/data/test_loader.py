import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.core.errors import DataError
from eyas.data.loader import LoaderState, RowLoader, pack_rows, place_pieces, split_documents
from eyas.data.store import StoreWriter, TokenStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, vocab_size=5000, meta={})
    for number in range(60):
        length = int(rng.integers(4, 40))
        # Ids tell their document and place: 50 * document + position.
        writer.add(f"d{number}", [50 * number + i for i in range(length)], [(2, length)])
    writer.close()
    return TokenStore.load(folder)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3, 16), min_size=1, max_size=80))
def test_pieces_never_overlap_nor_leave_their_row(lengths):
    rows, columns, num_rows = place_pieces(lengths, 16)
    used = np.zeros((num_rows, 16), dtype=int)
    for length, row, column in zip(lengths, rows, columns, strict=True):
        assert column + length <= 16
        used[row, column : column + length] += 1
    assert used.max() == 1
    assert num_rows <= len(lengths)


def test_every_token_stands_once_and_documents_stay_apart(store):
    rows = pack_rows(store, store.mask, np.arange(60), 48, seed=1)
    real = rows.segments >= 0
    assert sorted(rows.ids[real].tolist()) == sorted(store.ids.tolist())
    for row in range(rows.ids.shape[0]):
        for segment in set(rows.segments[row].tolist()) - {-1}:
            place = rows.segments[row] == segment
            ids = rows.ids[row, place]
            assert len({int(i) // 50 for i in ids}) == 1
            assert (ids % 50).tolist() == list(range(len(ids)))
            assert rows.positions[row, place].tolist() == list(range(len(ids)))
            assert rows.supervised[row, place].tolist() == [i >= 2 for i in range(len(ids))]


def test_packing_wastes_little(store):
    rows = pack_rows(store, store.mask, np.arange(60), 64, seed=1)
    assert (rows.segments >= 0).float().mean() > 0.9


def test_long_documents_are_cut_into_pieces_of_their_own(store):
    rows = pack_rows(store, store.mask, np.arange(60), 10, seed=1)
    real = rows.segments >= 0
    ids = rows.ids[real]
    assert len(set(ids.tolist())) == len(ids)
    assert rows.positions.max() < 10
    # A piece starts at position 0 wherever it was cut.
    starts = rows.ids[(rows.positions == 0) & real] % 50
    assert set((starts % 10).tolist()) == {0}


def test_epochs_differ_and_a_state_resumes_exactly(store):
    def loader():
        return RowLoader(store, np.arange(60), seq_len=48, batch_rows=4, seed=7)

    whole = loader()
    batches = [whole.next() for _ in range(14)]
    assert whole.state.epoch >= 1
    again = loader()
    again.state = LoaderState(0, 3)
    for expected in batches[3:]:
        got = again.next()
        for a, b in zip(
            (got.ids, got.segments, got.positions, got.supervised),
            (expected.ids, expected.segments, expected.positions, expected.supervised),
            strict=True,
        ):
            assert torch.equal(a, b)
    first, second = whole.epoch_rows(0).ids, whole.epoch_rows(1).ids
    assert first.shape != second.shape or not torch.equal(first, second)


def test_few_rows_are_padded_to_a_batch(store):
    loader = RowLoader(store, np.arange(2), seq_len=64, batch_rows=8, seed=0)
    batch = loader.next()
    assert batch.ids.shape == (8, 64)
    assert (batch.segments[2:] == -1).all()
    assert loader.state == LoaderState(1, 0)


def test_the_split_goes_by_the_hash_of_the_id(store, tmp_path):
    training, held_out = split_documents(store, 0.3)
    assert sorted([*training, *held_out]) == list(range(60))
    assert 5 < len(held_out) < 35
    writer = StoreWriter(tmp_path, vocab_size=5000, meta={})
    for number in reversed(range(60)):
        writer.add(f"d{number}", [1, 2, 3, 4], [(2, 4)])
    writer.close()
    other = TokenStore.load(tmp_path)
    assert {59 - i for i in split_documents(other, 0.3)[1]} == set(held_out.tolist())


def test_no_supervised_row_is_an_error(store):
    with pytest.raises(DataError, match="no document gives a supervised row"):
        pack_rows(store, np.zeros_like(store.mask), np.arange(60), 48, seed=0)
