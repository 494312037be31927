import json
import re
import shutil
from dataclasses import replace

import drafter_rounds
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.core.errors import ConfigError, HeadMismatchError, ModelFormatError
from eyas.core.model_config import TargetIdentity
from eyas.core.vocab_map import VocabMap
from eyas.drafters.artifact import load_head, make_model, save_head
from eyas.drafters.packing import pack_rows

TARGET = drafter_rounds.TARGET
WHO = TargetIdentity("tiny", "ab" * 32)
KINDS = pytest.mark.parametrize("kind", ["eagle3", "peagle"])
FLAGS = {
    "plain": {},
    "every flag": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        "attention_bias": True,
        "qk_norm": True,
        "num_layers": 3,
        "aux_layers": (0, 2, 4, 6),
    },
    "own table": {"trained_embedding": True},
}


def assert_same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()

    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("tables", "markov.out, markov.table"),
        ("hidden", "markov.hidden.bias, markov.hidden.weight, markov.token.weight, markov.up.weight"),
    ],
)
def test_a_markov_head_keeps_its_correction(form, names, tmp_path):
    model, vocab_map = drafter_rounds.head("peagle", markov_rank=6, markov_form=form)
    for packed in (False, True):
        save_head(tmp_path, model, vocab_map, meta={}, identity=WHO, packed=packed)
        loaded = load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)
        assert loaded.config == model.config
        for name, parameter in model.markov.named_parameters():
            read = loaded.model.markov.get_parameter(name)
            torch.testing.assert_close(read, parameter, rtol=0, atol=0.02 * packed)
        assert ("markov.up.weight.scale" in load_file(tmp_path / "model.safetensors")) == (
            packed and form == "hidden"
        )
    edit_config(tmp_path, markov_form="other")
    with pytest.raises(ModelFormatError, match="markov_form='other' is unknown here"):
        load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)
    edit_config(tmp_path, markov_form=..., markov_rank=...)
    with pytest.raises(ModelFormatError, match=f"unknown tensors: {names}"):
        load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)
    edit_config(tmp_path, markov_rank=6, markov_form="tables" if form == "hidden" else "hidden")
    with pytest.raises(ModelFormatError, match=f"missing tensors: markov.*unknown tensors: {names}"):
        load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)


@pytest.mark.parametrize("encoded_depths", [1, 6])
def test_a_head_keeps_its_depth_encoding(encoded_depths, tmp_path):
    model, vocab_map = drafter_rounds.head("peagle", encoded_depths=encoded_depths)
    for packed in (False, True):
        save_head(tmp_path, model, vocab_map, meta={}, identity=WHO, packed=packed)
        loaded = load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)
        assert loaded.config == model.config
        torch.testing.assert_close(
            loaded.model.depth_encoding, model.depth_encoding.detach(), rtol=0, atol=0.02 * packed
        )
    for wrong, match in (
        (encoded_depths + 1, r"depth_encoding has shape .*the config asks for \[" + str(encoded_depths + 1)),
        (..., "unknown tensors: depth_encoding"),
        (-2, "encoded_depths must be"),
        (10**6, "encoded_depths"),
        ("six", "encoded_depths must be"),
    ):
        edit_config(tmp_path, encoded_depths=wrong)
        with pytest.raises(ModelFormatError, match=match):
            load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)
    edit_config(tmp_path, encoded_depths=encoded_depths)
    edit_tensors(tmp_path, lambda t: (t.pop("depth_encoding"), t.pop("depth_encoding.scale", None)))
    with pytest.raises(ModelFormatError, match="missing tensors: depth_encoding"):
        load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)


def test_files_of_a_head_without_depth_encoding_do_not_mention_it(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle")
    save_head(tmp_path, model, vocab_map, meta={}, identity=WHO)
    assert "encod" not in (tmp_path / "config.json").read_text()
    assert not any("encod" in name for name in load_file(tmp_path / "model.safetensors"))


def test_depths_gain_vectors_without_changing_a_guess():
    """New ones are zeros, or the last that there was, which deeper depths read already."""
    plain, _ = drafter_rounds.head("peagle")
    before = plain.masked_states(torch.tensor([[1, 4]]))
    plain.encode_depths(3)
    assert plain.config.encoded_depths == 3
    torch.testing.assert_close(plain.masked_states(torch.tensor([[1, 4]])), before)
    encoded, _ = drafter_rounds.head("peagle", encoded_depths=2)
    depths = torch.arange(1, 8)[None]
    before = encoded.masked_states(depths)
    encoded.encode_depths(5)
    torch.testing.assert_close(encoded.masked_states(depths), before)
    encoded.encode_depths(4)
    assert encoded.config.encoded_depths == len(encoded.depth_encoding) == 5
    assert torch.equal(encoded.depth_encoding[2:], encoded.depth_encoding[1].expand(3, -1))


def test_markov_heads_of_before_are_read_as_tables(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle", markov_rank=6)
    save_head(tmp_path, model, vocab_map, meta={}, identity=WHO)
    edit_config(tmp_path, markov_form=...)
    assert load_head(tmp_path, TARGET, model.embed_weight, identity=WHO).config == model.config


def test_a_config_out_of_range_is_named_with_its_folder(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle", markov_rank=6)
    save_head(tmp_path, model, vocab_map, meta={}, identity=WHO)
    edit_config(tmp_path, markov_rank=10**6)
    with pytest.raises(ModelFormatError, match=rf"{re.escape(str(tmp_path))}: head markov_rank=1000000: it "):
        load_head(tmp_path, TARGET, model.embed_weight, identity=WHO)


def test_eagle3_has_no_markov_correction():
    with pytest.raises(ConfigError, match="markov_rank=6: it must be 0 for eagle3"):
        drafter_rounds.head("eagle3", markov_rank=6)


@KINDS
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_plain_round_trip_is_exact(kind, flags, tmp_path):
    model, vocab_map = drafter_rounds.head(kind, **flags)
    target_table = torch.randn(64, 32) if flags.get("trained_embedding") else model.embed_weight
    save_head(tmp_path, model, vocab_map, meta={"recipe": {"lr": 1e-3}}, identity=WHO)

    head = load_head(tmp_path, TARGET, target_table, identity=WHO)

    assert_same_weights_but_mask_row(model, head.model)
    assert head.config == model.config
    assert torch.equal(head.vocab_map.target_ids, vocab_map.target_ids)
    assert head.meta["recipe"] == {"lr": 1e-3}
    assert head.meta["target"]["fingerprint"] == WHO.fingerprint
    shared = head.model.embed_weight.data_ptr() == target_table.data_ptr()
    assert shared == (not flags.get("trained_embedding"))
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def assert_same_weights_but_mask_row(one, other):
    """A table that P-EAGLE owns comes back with the mask row in it, which is where it belongs."""
    if one.config.kind == "peagle" and one.config.trained_embedding:
        with torch.no_grad():
            one.embed_weight[one.mask_token_id] = one.mask_embedding
    assert_same_weights(one, other)


@KINDS
def test_packed_round_trip_stays_within_half_a_step(kind, tmp_path):
    model, vocab_map = drafter_rounds.head(kind, fc_norm=True)
    save_head(tmp_path, model, vocab_map, meta={}, packed=True)
    head = load_head(tmp_path, TARGET, model.embed_weight)

    assert head.model.embed_weight.data_ptr() == model.embed_weight.data_ptr()
    for name, tensor in model.state_dict().items():
        loaded = head.model.state_dict()[name]
        if tensor.ndim < 2:
            assert torch.equal(loaded, tensor), name
        else:
            half_step = tensor.abs().amax(1, keepdim=True) / 127 / 2
            assert bool(((loaded - tensor).abs() <= half_step * 1.001).all()), name
            assert float((loaded - tensor).abs().max()) > 0, name
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert stored["d2t"].dtype == torch.uint16
    assert "embed_tokens.weight" not in stored
    assert ("embed_rows.weight" in stored) == (kind == "peagle")


@pytest.mark.parametrize(("first", "kind"), [(65535, torch.uint16), (65536, torch.int32)])
def test_packed_offsets_are_small_where_they_fit(first, kind, tmp_path):
    model, vocab_map = drafter_rounds.head("eagle3")
    count = len(vocab_map.target_ids)
    far = VocabMap(torch.arange(first, first + count), first + count)
    save_head(tmp_path, model, far, meta={}, packed=True)
    stored = load_file(tmp_path / "model.safetensors")["d2t"]
    assert stored.dtype == kind
    assert stored.tolist() == [first] * count


def test_unpacked_rows_get_their_own_scales_again():
    """Any scale, also one that no division by 127 gives: CUDA multiplies by 1 / 127 instead."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (20_000, 48), generator=generator)
    codes[:, 7] = 127
    scale = torch.rand(20_000, generator=generator) * 3 + 1e-4
    weight = codes.float() * scale[:, None]
    assert int((weight.abs().amax(1) / 127 != scale).sum()) > 100
    again, found = pack_rows(weight)
    assert torch.equal(again, codes.to(torch.int8))
    assert torch.equal(found, scale)


def test_packed_again_changes_nothing(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle")
    save_head(tmp_path / "a", model, vocab_map, meta={}, packed=True)
    first = load_head(tmp_path / "a", TARGET, model.embed_weight)
    save_head(tmp_path / "b", first.model, first.vocab_map, meta={}, packed=True)

    for name, tensor in load_file(tmp_path / "a" / "model.safetensors").items():
        if tensor.dtype == torch.int8:
            assert torch.equal(tensor, load_file(tmp_path / "b" / "model.safetensors")[name]), name


def test_packed_keeps_only_rows_that_were_trained(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle", trained_embedding=True)
    table = model.embed_weight.detach().clone()
    with torch.no_grad():
        model.embed_weight[[3, 17]] += 1.0
    save_head(tmp_path, model, vocab_map, meta={}, packed=True, target_embedding=table)

    stored = load_file(tmp_path / "model.safetensors")
    assert stored["embed_rows.ids"].tolist() == [3, 17, 63]
    head = load_head(tmp_path, TARGET, table)
    assert head.config.trained_embedding
    untouched = [i for i in range(64) if i not in (3, 17, 63)]
    assert torch.equal(head.model.embed_weight[untouched], table[untouched])
    assert float((head.model.embed_weight[[3, 17]] - model.embed_weight[[3, 17]]).abs().max()) < 0.02


def test_packed_leaves_out_an_lm_head_that_is_the_targets(tmp_path):
    model, vocab_map = drafter_rounds.head("eagle3")
    lm_head = torch.randn(64, 32)
    with torch.no_grad():
        model.lm_head.weight.copy_(lm_head[vocab_map.target_ids])
    save_head(tmp_path, model, vocab_map, meta={}, packed=True, target_lm_head=lm_head)

    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    head = load_head(tmp_path, TARGET, model.embed_weight, lm_head_weight=lm_head)
    assert torch.equal(head.model.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ModelFormatError, match=r"lm_head.weight; .* uses the target's"):
        load_head(tmp_path, TARGET, model.embed_weight)


@pytest.fixture
def saved(tmp_path):
    model, vocab_map = drafter_rounds.head("eagle3", num_layers=2)
    save_head(tmp_path / "head", model, vocab_map, meta={}, identity=WHO)
    return model, tmp_path / "head"


def test_old_names_are_read(saved):
    model, folder = saved

    def rename(tensors):
        for name in list(tensors):
            if name.startswith("layers.0."):
                tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
        del tensors["layers.1.input_layernorm.weight"]  # as SGLang names it: hidden_norm
        del tensors["t2d"]
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(folder, rename)
    assert_same_weights(load_head(folder, TARGET, model.embed_weight).model, model)


def test_speculators_format_has_its_own_defaults(saved):
    model, folder = saved
    plain = json.loads((folder / "config.json").read_text())
    top = {"draft_vocab_size": plain["draft_vocab_size"], "speculators_model_type": "eagle3"}
    body = {k: v for k, v in plain.items() if k not in (*top, "norm_before_residual")}
    rope = {"rope_theta": body.pop("rope_theta"), "rope_type": "default"}
    body["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(top | {"transformer_layer_config": body}))

    head = load_head(folder, TARGET, model.embed_weight)
    assert head.config == replace(model.config, norm_before_residual=True)

    top["norm_before_residual"] = False
    (folder / "config.json").write_text(json.dumps(top | {"transformer_layer_config": body}))
    assert load_head(folder, TARGET, model.embed_weight).config == model.config

    window = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(top | {"transformer_layer_config": body | window}))
    assert load_head(folder, TARGET, model.embed_weight).config.windows == (9, None)


def test_ids_of_captured_layers(saved):
    model, folder = saved

    def layers(**config):
        edit_config(folder, **config)
        return load_head(folder, TARGET, model.embed_weight).config.aux_layers

    ids = "eagle_aux_hidden_state_layer_ids"
    assert layers() == (2, 3, 3)
    assert layers(eagle_config={ids: [1, 2, 2]}) == (2, 3, 3)  # leaving layers
    assert layers(eagle_config={ids: [2, 3, 3]}) == (2, 3, 3)  # entering layers
    assert layers(**{ids: [1, 2, 4]}) == (1, 2, 4)  # the top level wins
    edit_config(folder, **{ids: ...}, eagle_config={ids: [1, 3, 4]})
    with pytest.raises(ModelFormatError, match="entering or leaving"):
        load_head(folder, TARGET, model.embed_weight)


def test_a_head_for_another_target_shows_both_values(saved):
    model, folder = saved
    table = model.embed_weight

    def refused(target, match):
        with pytest.raises(HeadMismatchError, match=match):
            load_head(folder, target, table)

    refused(replace(TARGET, num_layers=12), "num_layers 6, this target has num_layers 12")
    refused(replace(TARGET, vocab_size=100), "vocab_size 64, this target has vocab_size 100")
    refused(replace(TARGET, hidden_size=48), "hidden_size 32, this target has hidden_size 48")
    (folder / "eyas.json").unlink()
    refused(replace(TARGET, vocab_size=100), "vocabulary 64, this target has 100")
    refused(replace(TARGET, hidden_size=48), "target hidden size 32, this target has 48")
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[2, 15, 27])
    refused(TARGET, r"layers \[2, 15, 27\], the target has 6 layers")
    with pytest.raises(HeadMismatchError, match=r"\[64, 32\], the table has \[10, 32\]"):
        make_model(model.config, torch.zeros(10, 32))


def test_a_target_entry_that_is_no_object(saved):
    model, folder = saved
    (folder / "eyas.json").write_text('{"target": ["tiny"]}')
    with pytest.raises(ModelFormatError, match=r"eyas\.json: target must be an object"):
        load_head(folder, TARGET, model.embed_weight)


def test_another_fingerprint_only_warns(saved):
    model, folder = saved
    with pytest.warns(UserWarning, match="fingerprint abababababab"):
        load_head(folder, TARGET, model.embed_weight, identity=TargetIdentity("other", "cd" * 32))


def test_broken_tensors_are_named(saved, tmp_path):
    model, good = saved

    def refused(match, change=None, **config):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        edit_tensors(folder, change or (lambda _: None))
        edit_config(folder, **config)
        with pytest.raises(ModelFormatError, match=match):
            load_head(folder, TARGET, model.embed_weight)

    refused("missing tensors: fc.weight", lambda t: t.pop("fc.weight"))
    refused("missing tensors: layers.1.mlp.up_proj.weight", lambda t: t.pop("layers.1.mlp.up_proj.weight"))
    refused("missing tensors: layers.1.input_layernorm", lambda t: [t.pop(n) for n in list(t) if "s.1." in n])
    refused("unknown tensors: strange", lambda t: t.update(strange=torch.ones(2)))
    refused("unknown tensors: input_norm.weight", lambda t: t.update({"input_norm.weight": torch.ones(96)}))
    refused(r"fc.weight has shape \[3, 4\]", lambda t: t.update({"fc.weight": torch.ones(3, 4)}))
    refused("tensor fc.weight holds NaN", lambda t: t["fc.weight"][0, 0].fill_(float("nan")))
    refused("missing tensor d2t", lambda t: t.pop("d2t"))
    refused("missing tensors: lm_head.weight", lambda t: t.pop("lm_head.weight"))
    refused("d2t has 3 entries", lambda t: t.update(d2t=torch.zeros(3, dtype=torch.int64)))
    refused("d2t points outside", lambda t: t.update(d2t=t["d2t"] + 40))
    refused("disagree", lambda t: t.update(t2d=~t["t2d"]))
    refused("t2d has 9 entries", lambda t: t.update(t2d=t["t2d"][:9]))
    refused("embed_tokens.weight has shape", lambda t: t.update({"embed_tokens.weight": torch.ones(5, 32)}))
    refused("hidden_size must be an integer from 1 to 2147483647, got None", hidden_size=...)
    refused(
        "num_hidden_layers must be an integer from 1 to 1024, got 1000000000000", num_hidden_layers=10**12
    )
    refused("max_position_embeddings must be", max_position_embeddings=10**12)
    refused("head_dim must be an integer", head_dim="x")
    refused("draft_vocab_size must be an integer", draft_vocab_size="x")
    refused("rms_norm_eps must be a positive number", rms_norm_eps="small")
    refused("rope_theta must be a positive number", rope_theta="x")
    refused("rope_scaling must be an object", rope_scaling="x")
    refused("mask_token_id must be a token id, got 'x'", mask_token_id="x")
    refused("layer_ids must be a list of layer ids", eagle_aux_hidden_state_layer_ids=["x"])
    refused("eagle_config must be an object", eagle_config=[1])
    refused('rope type "yarn"', rope_scaling={"rope_type": "yarn", "factor": 32})
    refused("logit_scale=0.5", logit_scale=0.5)
    refused("num_aux_hidden_states=5", num_aux_hidden_states=5)
    refused("fc.weight has shape", num_aux_hidden_states=2, eagle_aux_hidden_state_layer_ids=[1, 2])
    refused("eyas_format='int3'", eyas_format="int3")
    refused("needs fc.weight.scale", lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}))


def test_files_that_are_not_a_head(saved):
    model, folder = saved
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelFormatError, match=r"model\.safetensors cannot be read"):
        load_head(folder, TARGET, model.embed_weight)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin is a pickle"):
        load_head(folder, TARGET, model.embed_weight)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match="cannot be read as JSON"):
        load_head(folder, TARGET, model.embed_weight)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFormatError, match="cannot be read as JSON"):
        load_head(folder, TARGET, model.embed_weight)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFormatError, match=r"config\.json is missing"):
        load_head(folder, TARGET, model.embed_weight)


def test_shards_and_what_is_wrong_with_them(saved):
    model, folder = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert_same_weights(load_head(folder, TARGET, model.embed_weight).model, model)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"part-1\.safetensors cannot be read"):
        load_head(folder, TARGET, model.embed_weight)
    for wrong in ({}, {"weight_map": ["part-0.safetensors"]}, {"weight_map": {"fc.weight": 3}}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(ModelFormatError, match=r"index\.json: weight_map must give the file"):
            load_head(folder, TARGET, model.embed_weight)


def test_peagle_needs_its_mask(tmp_path):
    model, vocab_map = drafter_rounds.head("peagle")
    save_head(tmp_path, model, vocab_map, meta={})
    edit_config(tmp_path, mask_token_id=..., pard_token=...)
    assert load_head(tmp_path, TARGET, model.embed_weight).config.mask_token_id == 63  # ptd_token_id is left
    edit_tensors(tmp_path, lambda t: t.pop("mask_hidden"))
    with pytest.raises(ModelFormatError, match="missing tensors: mask_hidden"):
        load_head(tmp_path, TARGET, model.embed_weight)


def test_a_full_vocabulary_needs_no_map(tmp_path):
    model, _ = drafter_rounds.head("eagle3", draft_vocab_size=64)
    save_head(tmp_path, model, VocabMap.identity(64), meta={}, dtype=torch.bfloat16)
    edit_tensors(tmp_path, lambda t: [t.pop("d2t"), t.pop("t2d")])
    head = load_head(tmp_path, TARGET, model.embed_weight)

    assert head.vocab_map.is_identity
    assert torch.equal(head.model.fc.weight, model.fc.weight.bfloat16().float())
