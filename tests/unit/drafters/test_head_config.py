from dataclasses import replace

import drafter_rounds
import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.drafters.artifact import make_model
from eyas.drafters.head_config import HeadConfig
from eyas.drafters.peagle.propose import PEagleDrafter

TARGET = drafter_rounds.TARGET


def test_shapes_follow_the_target():
    eagle3 = HeadConfig.for_target(TARGET)
    peagle = HeadConfig.for_target(TARGET, kind="peagle", mask_token_id=9)

    assert (eagle3.num_layers, peagle.num_layers) == (1, 4)
    assert eagle3.aux_layers == (2, 3, 3)
    assert eagle3.feature_size == 96
    assert eagle3.draft_vocab_size == 64
    assert eagle3.has_default_aux_layers
    assert peagle.kv_layout.num_layers == 4


def test_values_out_of_range_are_named():
    config = HeadConfig.for_target(TARGET)
    for changes, match in (
        ({"kind": "medusa"}, "kind='medusa'"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": 3}, "num_kv_heads=3.*divisor of 4"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65"),
        ({"aux_layers": (7,)}, r"aux_layers=\(7,\).*0 .. 6"),
        ({"aux_layers": ()}, "aux_layers"),
        ({"windows": (4, 4)}, "windows"),
        ({"hidden_size": 16}, "trained_embedding=False"),
        ({"mask_token_id": 3}, "mask_token_id=3"),
        ({"encoded_depths": 3}, "encoded_depths=3.*0 for eagle3"),
        ({"kind": "peagle", "mask_token_id": 5, "encoded_depths": -1}, "encoded_depths=-1"),
        ({"kind": "peagle"}, "mask_token_id=None"),
        ({"kind": "peagle", "mask_token_id": 64}, "mask_token_id=64.*below the vocabulary"),
    ):
        with pytest.raises(ConfigError, match=match):
            replace(config, **changes)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_targets_table_is_shared_and_not_trained(kind):
    table = torch.randn(64, 32)
    extra = {"mask_token_id": 63} if kind == "peagle" else {}

    model = make_model(HeadConfig.for_target(TARGET, kind=kind, **extra), table)
    assert model.embed_weight.data_ptr() == table.data_ptr()
    assert "embed_weight" not in dict(model.named_parameters())
    assert "embed_weight" not in model.state_dict()

    own = make_model(HeadConfig.for_target(TARGET, kind=kind, trained_embedding=True, **extra), table)
    assert own.embed_weight.data_ptr() != table.data_ptr()
    assert "embed_weight" in dict(own.named_parameters())


@pytest.mark.parametrize("encoded_depths", [0, 3])
def test_the_fused_mask_follows_its_weights(encoded_depths):
    model, vocab_map = drafter_rounds.head("peagle", fc_norm=True, encoded_depths=encoded_depths)
    drafter = PEagleDrafter(model, vocab_map, 4)
    sim = drafter_rounds.Rounds(drafter, lengths=[5])
    sim.prefill(4)
    first = drafter._fused_mask.get()[0]
    before, place = first.clone(), first.data_ptr()
    with torch.no_grad():
        (model.depth_encoding if encoded_depths else model.fc_norm[1].weight).mul_(2.0)
    sim.round([1], 4)

    assert drafter._fused_mask.get()[0].data_ptr() == place  # a captured graph reads the same memory
    assert torch.equal(drafter._fused_mask.get()[0], model.fused_mask())
    assert not torch.equal(drafter._fused_mask.get()[0], before)
