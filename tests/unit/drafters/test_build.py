import drafter_rounds
import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.artifact import save_head
from eyas.drafters.base import Drafter
from eyas.drafters.build import build_drafter
from eyas.drafters.eagle3.propose_tree import Eagle3TreeDrafter
from eyas.drafters.peagle.propose_tree import PEagleTreeDrafter
from tiny import tiny_target


def build(spec, **options):
    target = drafter_rounds.TARGET
    options = {"embed_weight": torch.zeros(target.vocab_size, target.hidden_size), **options}
    return build_drafter(spec, target_config=target, identity=None, **options)


def test_plain_decoding_has_no_drafter():
    assert build(None) is None
    assert build("none") is None


@pytest.mark.parametrize(("kind", "default"), [("eagle3", 3), ("peagle", 7)])
def test_a_folder_knows_its_kind(kind, default, tmp_path):
    model, vocab_map = drafter_rounds.head(kind)
    save_head(tmp_path, model, vocab_map, meta={})
    drafter = build(str(tmp_path), embed_weight=model.embed_weight)

    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.num_draft_tokens) == (kind, default)
    assert drafter.aux_layers == (2, 3, 3)
    assert drafter.kv_layout == model.kv_layout
    assert drafter.tree.is_chain
    assert build(tmp_path, embed_weight=model.embed_weight, num_draft_tokens=5).num_draft_tokens == 5


def test_lookup_and_small_models():
    for name in ("prompt_lookup", "pld"):
        drafter = build(name, num_draft_tokens=4)
        assert isinstance(drafter, Drafter)
        assert (drafter.name, drafter.num_draft_tokens, drafter.kv_layout) == ("prompt_lookup", 4, None)

    asked = []
    drafter = build("small:some/path", load_model=lambda path: asked.append(path) or tiny_target())
    assert isinstance(drafter, Drafter)
    assert asked == ["some/path"]
    assert (drafter.name, drafter.kv_layout.num_layers) == ("small_model", 5)


def test_what_cannot_be_built_is_named():
    with pytest.raises(ConfigError, match="'no/such/head' is not a head folder"):
        build("no/such/head")
    with pytest.raises(ConfigError, match="load_model"):
        build("small:x")
    with pytest.raises(ConfigError, match="write small:PATH"):
        build("small:", load_model=lambda _: tiny_target())
    for wrong in (0, -1, 513, 10**9):
        with pytest.raises(ConfigError, match=f"num_draft_tokens={wrong}: .* 1 to 512"):
            build("pld", num_draft_tokens=wrong)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_trees(kind, tmp_path):
    model, vocab_map = drafter_rounds.head(kind)
    save_head(tmp_path, model, vocab_map, meta={})
    tree = TreeBudget(3, 2, 6)
    drafter = build(tmp_path, embed_weight=model.embed_weight, tree=tree)

    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.num_draft_tokens, drafter.tree) == (kind, 6, tree)
    assert type(drafter) is {"eagle3": Eagle3TreeDrafter, "peagle": PEagleTreeDrafter}[kind]
    wide = TreeBudget(1, 50, 50)
    with pytest.raises(ConfigError, match="knows only 40 tokens"):
        build(tmp_path, embed_weight=model.embed_weight, tree=wide)
    for options, words in (
        ({"num_draft_tokens": 3}, "give one of them"),
        ({"sample_drafts": True}, "sample_drafts must be off"),
    ):
        with pytest.raises(ConfigError, match=f"tree=3x2x6.*{words}"):
            build(tmp_path, embed_weight=model.embed_weight, tree=tree, **options)
    with pytest.raises(ConfigError, match="pld drafts chains"):
        build("pld", tree=tree)
