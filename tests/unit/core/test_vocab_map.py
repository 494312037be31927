import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.errors import ModelFormatError
from eyas.core.vocab_map import VocabMap


@st.composite
def maps(draw):
    vocab = draw(st.integers(1, 30))
    ids = sorted(draw(st.sets(st.integers(0, vocab - 1), min_size=1)))
    return ids, vocab


def test_docstring_example():
    vocab_map = VocabMap(torch.tensor([1, 2, 5]), 6)
    assert vocab_map.d2t.tolist() == [1, 1, 3]
    assert vocab_map.t2d.tolist() == [False, True, True, False, False, True]


@given(maps())
def test_every_view_against_plain_python(case):
    ids, vocab = case
    vocab_map = VocabMap(torch.tensor(ids), vocab)
    assert vocab_map.draft_vocab_size == len(ids)
    assert [d + int(offset) for d, offset in enumerate(vocab_map.d2t)] == ids
    assert vocab_map.t2d.tolist() == [t in ids for t in range(vocab)]
    assert vocab_map.draft_ids(torch.arange(vocab)).tolist() == [
        ids.index(t) if t in ids else -1 for t in range(vocab)
    ]
    assert vocab_map.to_target(torch.arange(len(ids))).tolist() == ids
    assert vocab_map.is_identity == (len(ids) == vocab)
    logits = torch.arange(vocab, dtype=torch.float32)
    assert vocab_map.restrict(logits).tolist() == ids
    again = VocabMap.from_d2t(vocab_map.d2t, vocab, vocab_map.t2d)
    assert torch.equal(again.target_ids, vocab_map.target_ids)


def test_scatter_leaves_zeros_and_never_renormalises():
    vocab_map = VocabMap(torch.tensor([0, 3]), 5)
    probs = torch.tensor([[[0.25, 0.75]], [[0.5, 0.25]]])
    assert vocab_map.scatter(probs).tolist() == [[[0.25, 0, 0, 0.75, 0]], [[0.5, 0, 0, 0.25, 0]]]


@pytest.mark.parametrize(
    ("d2t", "t2d", "word"),
    [
        ([[0]], None, "vector"),
        ([], None, "vector"),
        ([1, 2, 5], None, "outside"),  # target ids where offsets belong
        ([-1, 0], None, "outside"),
        ([1, 0], None, "ascending"),
        ([2, 0], None, "ascending"),
        ([0, 1], [True, True, False, False, False, False], "disagree"),
    ],
)
def test_bad_maps_are_refused(d2t, t2d, word):
    offsets = torch.tensor(d2t, dtype=torch.int64)
    with pytest.raises((ModelFormatError), match=word):
        VocabMap.from_d2t(offsets, 6, None if t2d is None else torch.tensor(t2d))
