import pytest
import torch

from eyas.core.capture import default_aux_layers, shift_by_one
from eyas.core.outputs import RequestStats


@pytest.mark.parametrize(
    ("layers", "ids"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (24, (2, 12, 21)), (36, (2, 18, 33))]
)
def test_known_targets(layers, ids):
    assert default_aux_layers(layers) == ids


@pytest.mark.parametrize("layers", range(2, 100))
def test_ids_are_in_order_and_inside(layers):
    ids = default_aux_layers(layers)
    assert list(ids) == sorted(ids)
    assert ids[0] > 0
    assert ids[-1] < layers


def test_shift_pairs_a_token_with_the_feature_before_it():
    ids = torch.tensor([[10, 11, 12, 13]])
    features = torch.arange(4.0).reshape(1, 4, 1)  # the feature AT position i is i
    tokens, kept = shift_by_one(ids, features)
    assert tokens.tolist() == [[11, 12, 13]]
    assert kept.flatten().tolist() == [0, 1, 2]


def test_acceptance_length_counts_the_bonus_token():
    assert RequestStats(steps=5, draft_steps=4, accepted=6).acceptance_length == 2.5
    assert RequestStats(steps=5).acceptance_length == 1.0
    assert RequestStats().acceptance_length == 0.0
