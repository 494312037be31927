import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from eyas.core.capture import default_aux_layers
from eyas.core.errors import ConfigError, ModelFormatError
from eyas.core.model_config import RopeConfig
from eyas.core.vocab_map import VocabMap
from eyas.drafters.artifact import load_head, make_model, save_head
from eyas.drafters.head_config import HeadConfig
from eyas.export.check import check_export
from eyas.export.engines import ENGINES, refusals
from eyas.export.write import export_head, import_head, read_head
from tiny import tiny_target

LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=64)
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def target():
    return tiny_target(num_layers=8, rope=LLAMA3, max_position_embeddings=512)


def write(folder, target, kind="eagle3", *, packed=False, **flags):
    if kind == "peagle":
        flags = {"mask_token_id": 63, "num_layers": 2, **flags}
    torch.manual_seed(1)
    windows = flags.pop("windows", ())
    config = HeadConfig.for_target(target.config, kind=kind, draft_vocab_size=20, **flags)
    config = replace(config, windows=windows)
    model = make_model(config, target.decoder.embed_tokens.weight)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    vocab_map = VocabMap(torch.arange(20) * 3, 64)
    meta = {"recipe": {"steps": 7}}
    save_head(folder, model, vocab_map, meta=meta, identity=target.identity, packed=packed)
    return model


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*((engine, "eagle3") for engine in ENGINES), ("vllm", "peagle"), ("speculators", "peagle")],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_every_format_comes_back_equal(engine, kind, packed, target, tmp_path):
    write(tmp_path / "head", target, kind, packed=packed)
    before = read_head(tmp_path / "head", target)

    export = export_head(tmp_path / "head", target, engine, tmp_path / "out", target_name="owner/tiny")
    import_head(tmp_path / "out", target, tmp_path / "back")

    assert export.check.max_logit_difference == 0
    assert (export.check.missing, export.check.unknown) == ([], [])
    for folder in ("out", "back"):
        after = read_head(tmp_path / folder, target)
        assert after.config == before.config
        assert torch.equal(after.vocab_map.target_ids, before.vocab_map.target_ids)
        assert after.meta["recipe"] == {"steps": 7}
        for name, tensor in before.model.state_dict().items():
            assert torch.equal(after.model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True},
        {"fc_norm": True, "norm_output": True, "num_layers": 3},
        {"aux_layers": (1, 3, 5, 7, 8)},
        {"qk_norm": True},
    ],
)
def test_flags_survive_where_an_engine_takes_them(flags, target, tmp_path):
    write(tmp_path / "head", target, **flags)
    before = read_head(tmp_path / "head", target)
    for engine in ENGINES:
        if refusals(before.config, engine):
            continue
        export_head(tmp_path / "head", target, engine, tmp_path / engine, target_name="owner/tiny")
        assert read_head(tmp_path / engine, target).config == before.config


def test_refusals_name_the_flag_and_who_can(target, tmp_path):
    def refused(engine, match, kind="eagle3", **flags):
        write(tmp_path / "head", target, kind, **flags)
        with pytest.raises(ConfigError, match=match):
            export_head(tmp_path / "head", target, engine, tmp_path / "out", target_name="owner/tiny")
        assert not (tmp_path / "out").exists()

    refused("sglang", "kind=peagle.*can carry it: vllm, speculators", "peagle")
    for engine in ENGINES:
        refused(engine, "markov_rank: it has no correction.*--without-markov", "peagle", markov_rank=4)
        refused(engine, "encoded_depths: it gives every mask slot the same", "peagle", encoded_depths=4)
    refused("sglang", "norm_before_residual: its residual", norm_before_residual=True)
    refused("sglang", "attention_bias", attention_bias=True)
    refused("sglang", "qk_norm", qk_norm=True)
    refused("sglang", "aux_layers", aux_layers=(0, 3, 5))
    refused("speculators", "fc_norm.*norm_output", "peagle", fc_norm=True, norm_output=True)
    refused("eagle", "num_layers", num_layers=2)
    refused("eagle", "aux_layers", aux_layers=(1, 3, 5))
    refused("eagle", "norm_output", norm_output=True)
    refused("tgi", "engine 'tgi' is unknown")


@pytest.mark.parametrize("form", ["tables", "hidden"])
def test_without_its_correction_a_head_exports_as_its_base(form, target, tmp_path):
    base = write(tmp_path / "base", target, "peagle")
    model = write(tmp_path / "head", target, "peagle", markov_rank=4, markov_form=form)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            model.get_parameter(name).copy_(parameter)
    save_head(tmp_path / "head", model, VocabMap(torch.arange(20) * 3, 64), meta={"recipe": {"steps": 7}})
    for engine in ("vllm", "speculators"):
        one, other = (
            export_head(
                tmp_path / name, target, engine, tmp_path / f"{name}-{engine}", **more, target_name="o/t"
            )
            for name, more in (("base", {}), ("head", {"without_markov": True}))
        )
        assert one.left_out is None
        assert other.left_out == f"the correction by the token before (markov_form {form}, rank 4)"
        assert json.loads((other.folder / "eyas.json").read_text())["left_out"] == other.left_out
        files = [(export.folder / "config.json").read_text() for export in (one, other)]
        assert files[0] == files[1]
        before, after = (load_file(export.folder / "model.safetensors") for export in (one, other))
        assert list(before) == list(after)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_sglang_would_replace_a_trained_table(target, tmp_path):
    model = write(tmp_path / "head", target, trained_embedding=True)
    with torch.no_grad():
        model.embed_weight[5] += 1
    save_head(tmp_path / "head", model, VocabMap(torch.arange(20) * 3, 64), meta={})
    with pytest.raises(ConfigError, match="trained_embedding: it replaces"):
        export_head(tmp_path / "head", target, "sglang", tmp_path / "out")
    export_head(tmp_path / "head", target, "vllm", tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"], model.embed_weight
    )


def vllm_layers(config, num_layers):
    """Streams ENTERING these layers: the top level first, then eagle_config, then the default."""
    ids = config.get(IDS) or (config.get("eagle_config") or {}).get(IDS)
    return tuple(ids) if ids else default_aux_layers(num_layers)


def sglang_layers(config, num_layers):
    """Only eagle_config is read; its ids are OUTPUTS of layers, one less for the same stream."""
    ids = (config.get("eagle_config") or {}).get(IDS)
    return tuple(i + 1 for i in ids) if ids else default_aux_layers(num_layers)


def test_both_engines_capture_the_same_streams(target, tmp_path):
    for aux in (default_aux_layers(8), (1, 3, 8), (1, 2, 4, 6)):
        write(tmp_path / "head", target, aux_layers=aux)
        for engine in ("vllm", "sglang"):
            export_head(tmp_path / "head", target, engine, tmp_path / "out")
            config = json.loads((tmp_path / "out/config.json").read_text())

            assert vllm_layers(config, 8) == sglang_layers(config, 8) == aux
            text = (tmp_path / "out/config.json").read_text()
            assert (IDS in text) == (aux != default_aux_layers(8))
            assert config.get("num_aux_hidden_states", 3) == len(aux)


def test_plain_config_says_what_engines_ask_for(target, tmp_path):
    write(tmp_path / "head", target, "peagle")
    export = export_head(tmp_path / "head", target, "vllm", tmp_path / "out", num_draft_tokens=5)
    config = json.loads((tmp_path / "out/config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["mask_token_id"] == config["pard_token"] == config["ptd_token_id"] == 63
    assert config["max_position_embeddings"] == 512
    assert config["vocab_size"] == 64
    assert config["draft_vocab_size"] == 20
    assert config["tie_word_embeddings"] is False
    assert export.serve["parallel_drafting"] is True
    assert export.serve["num_speculative_tokens"] == 5
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert torch.equal(tensors["layers.1.input_layernorm.weight"], tensors["layers.1.hidden_norm.weight"])
    assert tensors["d2t"].dtype == torch.int64
    # transformers, which the engines parse config.json with, must see the same rotary settings.
    rope = LlamaConfig.from_dict(config).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 5e5, 8.0)


def test_speculators_config_names_the_target(target, tmp_path):
    write(tmp_path / "head", target, "peagle")
    for bad in (None, "./local", "a/b/c"):
        with pytest.raises(ConfigError, match="repository id"):
            export_head(tmp_path / "head", target, "speculators", tmp_path / "out", target_name=bad)
    export_head(
        tmp_path / "head", target, "speculators", tmp_path / "out", target_name="o/t", num_draft_tokens=6
    )
    config = json.loads((tmp_path / "out/config.json").read_text())

    assert config["speculators_config"]["verifier"]["name_or_path"] == "o/t"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert config["norm_before_residual"] is False
    assert config["mask_token_id"] == 63
    assert "layers.1.hidden_norm.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_a_bias_after_o_proj_is_written_as_0_where_vllm_would_leave_it_to_chance(target, tmp_path):
    model = write(tmp_path / "head", target, attention_bias=True)
    with torch.no_grad():
        model.layers[0].self_attn.qkv_proj.bias.add_(0.5)
    save_head(tmp_path / "head", model, VocabMap(torch.arange(20) * 3, 64), meta={})
    for engine in ("vllm", "speculators"):
        export_head(tmp_path / "head", target, engine, tmp_path / engine, target_name="o/t")
        tensors = load_file(tmp_path / engine / "model.safetensors")
        assert not tensors["layers.0.self_attn.o_proj.bias"].any()
        assert tensors["layers.0.self_attn.q_proj.bias"].any()
    tensors["layers.0.self_attn.o_proj.bias"][3] = 1.0
    save_file(tensors, tmp_path / "vllm/model.safetensors")
    with pytest.raises(ModelFormatError, match=r"o_proj\.bias is not 0"):
        read_head(tmp_path / "vllm", target)
    write(tmp_path / "qwen", target, attention_bias=True, qk_norm=True)
    export_head(tmp_path / "qwen", target, "vllm", tmp_path / "out")
    assert "layers.0.self_attn.o_proj.bias" not in load_file(tmp_path / "out/model.safetensors")


def test_windows_survive_in_transformers_config(target, tmp_path):
    for flags, config_class in (({}, LlamaConfig), ({"qk_norm": True}, Qwen3Config)):
        write(tmp_path / "head", target, num_layers=2, windows=(8, None), **flags)
        export_head(tmp_path / "head", target, "vllm", tmp_path / "out")
        parsed = config_class.from_dict(json.loads((tmp_path / "out/config.json").read_text()))
        assert parsed.sliding_window == 8
        assert list(parsed.layer_types) == ["sliding_attention", "full_attention"]
        assert read_head(tmp_path / "out", target).config.windows == (8, None)
    with pytest.raises(ConfigError, match="one size"):
        write(tmp_path / "head", target, num_layers=2, windows=(8, 16))


def test_speculators_says_how_many_streams_are_captured(target, tmp_path):
    write(tmp_path / "head", target, aux_layers=(1, 3, 5, 7))
    export_head(tmp_path / "head", target, "speculators", tmp_path / "out", target_name="o/t")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config[IDS] == [1, 3, 5, 7]
    # vLLM's Llama head looks for the number in the decoder's part alone, and takes 3 without it.
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_the_check_sees_what_engines_do_not(target, tmp_path):
    write(tmp_path / "head", target, num_layers=2)
    head = read_head(tmp_path / "head", target)
    export_head(tmp_path / "head", target, "vllm", tmp_path / "out")
    good = load_file(tmp_path / "out/model.safetensors")

    def refused(match, **changes):
        tensors = {k: v for k, v in (good | changes).items() if v is not None}
        save_file(tensors, tmp_path / "out/model.safetensors")
        with pytest.raises(ModelFormatError, match=match):
            check_export(tmp_path / "out", head, target, "vllm")

    refused("missing: fc.weight;", **{"fc.weight": None})
    refused("missing: layers.1.hidden_norm.weight", **{"layers.1.hidden_norm.weight": None})
    refused("missing: t2d", t2d=None)
    refused("unknown: extra", extra=torch.ones(1))
    refused("logits of the exported head differ", **{"norm.weight": good["norm.weight"] * 1.001})
    refused("vocabulary map changed", d2t=good["d2t"] * 0, t2d=torch.arange(64) < 20)
    save_file(good, tmp_path / "out/model.safetensors")
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {IDS: [1, 3, 5]}))
    with pytest.raises(ModelFormatError, match="captured layers"):
        check_export(tmp_path / "out", head, target, "vllm")


def test_narrow_types_report_their_difference(target, tmp_path):
    write(tmp_path / "head", target, "peagle")
    export = export_head(tmp_path / "head", target, "vllm", tmp_path / "out", dtype=torch.bfloat16)

    assert 0 < export.check.max_logit_difference < 0.1
    again = load_head(tmp_path / "out", target.config, target.decoder.embed_tokens.weight)
    assert again.model.embed_weight.data_ptr() == target.decoder.embed_tokens.weight.data_ptr()


def test_a_head_is_not_overwritten_by_its_export(target, tmp_path):
    write(tmp_path / "head", target)
    with pytest.raises(ConfigError, match="is the head itself"):
        export_head(tmp_path / "head", target, "vllm", tmp_path / "head")


def test_an_export_destroys_nothing_of_others(target, tmp_path):
    write(tmp_path / "head", target)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"holds a config\.json that eyas did not write"):
        export_head(tmp_path / "head", target, "vllm", model)
    assert (model / "model.safetensors").read_bytes() == b"weights"
    for _ in range(2):  # an export may be written again
        export_head(tmp_path / "head", target, "vllm", tmp_path / "out")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be made a folder"):
            export_head(tmp_path / "head", target, "vllm", out)


@pytest.mark.parametrize("num_draft_tokens", [0, -1, 513])
def test_an_export_needs_a_possible_k(num_draft_tokens, target, tmp_path):
    write(tmp_path / "head", target)
    with pytest.raises(ConfigError, match=f"num_draft_tokens={num_draft_tokens} "):
        export_head(tmp_path / "head", target, "vllm", tmp_path / "out", num_draft_tokens=num_draft_tokens)
    assert not (tmp_path / "out").exists()
