import torch
from slot_helpers import make_batch, rollouts

from eyas.training.rows import draft_rows, shift_features, teacher_rows
from eyas.training.slots import guess_index, make_slots


def test_rows_pair_a_token_with_the_feature_before_it():
    batch = make_batch([[5, 4]], 12, prompt=2)
    rows = draft_rows(batch)
    features = torch.arange(12.0).view(1, 12, 1)
    shifted = shift_features(batch, features)
    for j in range(11):
        assert rows.tokens[0, j] == batch.ids[0, j + 1]
        assert shifted[0, j] == features[0, j]
        assert rows.positions[0, j] == batch.positions[0, j]
    assert teacher_rows(features)[0, 3] == 4


def test_rows_never_pair_two_documents():
    batch = make_batch([[5, 4]], 12)
    rows = draft_rows(batch)
    # Rows 4 and 8 hold their documents' last features; there is no next token to pair them with.
    assert rows.segments[0].tolist() == [0, 0, 0, 0, -1, 1, 1, 1, -1, -1, -1, -1]


def test_supervised_iff_the_guessed_token_is_the_assistants():
    batch = make_batch([[6, 5]], 12, prompt=3)
    rows = draft_rows(batch)
    for j in range(12):
        guess = j + 2
        inside = guess < 12 and batch.segments[0, j] >= 0 and batch.segments[0, guess] == batch.segments[0, j]
        assert bool(rows.supervised[0, j]) == bool(inside and batch.supervised[0, guess])
    # Prompt of 3: the last prompt row (2 tokens back) guesses the first answer token and is supervised.
    assert rows.supervised[0].nonzero().flatten().tolist() == [1, 2, 3, 7, 8]


def test_slots_are_supervised_within_their_document_only():
    batch = make_batch([[6, 5], [9]], 12, prompt=2)
    rows = draft_rows(batch)
    anchors = torch.arange(12).repeat(3).expand(2, -1)
    depths = torch.arange(3).repeat_interleave(12)
    slots = make_slots(rows, anchors, depths)
    legal = {(row, anchor, depth) for row, _, anchor, depth in rollouts(batch, 3)}
    place = guess_index(slots, 12)
    for row in range(2):
        for i in range(36):
            anchor, depth = int(anchors[row, i]), int(depths[i])
            wanted = (row, anchor, depth) in legal and bool(batch.supervised[row, anchor + depth + 2])
            assert bool(slots.supervised[row, i]) == wanted
            assert place[row, i] == min(anchor + depth, 11)
