"""Hugging Face folders: what loads, what is refused, and that every refusal names file and tensor."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.targets.families import FAMILIES, hf_parts, hf_shapes
from eyas.targets.load import find, load_target, read_config
from model_files import random_state, write_folder
from tiny import tiny_config


def load(path, **options):
    return load_target(path, tokenizer=False, **options)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_lands_in_its_place(family, tied, tmp_path):
    config = tiny_config(family, tie_word_embeddings=tied)
    state = random_state(config)
    target = load(write_folder(tmp_path / "model", config, state))
    assert target.config == config
    used = []
    for name, tensor in target.decoder.state_dict().items():
        parts = hf_parts(name)
        assert torch.equal(tensor, torch.cat([torch.from_numpy(state[part]) for part in parts]))
        used += parts
    assert sorted(used) == sorted(hf_shapes(config))
    assert not any(parameter.requires_grad for parameter in target.decoder.parameters())


def test_dtype(tiny_folder):
    target = load(tiny_folder, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert all(p.dtype == torch.bfloat16 for p in target.decoder.parameters())
    assert target.decoder.rotary.cos.dtype == torch.float32


def test_unused_tensors_are_ignored(tiny_folder):
    """Old checkpoints carry rotary tables; they are computed here."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(tiny_folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(tiny_folder)


def test_missing_tensor(tiny_folder):
    name = "model.layers.2.mlp.up_proj.weight"
    change_tensors(tiny_folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelFormatError, match=rf"model: tensor {name} is missing"):
        load(tiny_folder)


def test_wrong_shape(tiny_folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    change_tensors(tiny_folder, lambda tensors: tensors.update({name: torch.zeros(3, 32)}))
    with pytest.raises(ModelFormatError, match=rf"{name} has shape \[3, 32\].*\[16, 32\]"):
        load(tiny_folder)


def test_integer_weights(tiny_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(tiny_folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelFormatError, match=rf"{name} is torch.int8"):
        load(tiny_folder)


def test_cut_off_file(tiny_folder):
    path = tiny_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: not a complete safetensors file"):
        load(tiny_folder)


def shard(folder):
    """Split the folder's tensors over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_and_a_missing_one(tiny_folder):
    whole = load(tiny_folder)
    shard(tiny_folder)
    parts = load(tiny_folder)
    assert parts.identity == whole.identity
    (tiny_folder / "two.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"two\.safetensors: shard is missing; .* holds "):
        load(tiny_folder)


def test_index_that_points_outside(tiny_folder):
    shard(tiny_folder)
    path = tiny_folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("two.safetensors", "../two.safetensors"))
    with pytest.raises(ModelFormatError, match="outside of the folder"):
        load(tiny_folder)


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_unopened(tiny_folder, name):
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ModelFormatError, match=rf"{name}: pickled weights .* never read"):
        load(tiny_folder)
    with pytest.raises(ModelFormatError, match=rf"{name}: pickled weights .* never read"):
        load(tiny_folder / name)


def test_empty_folder(tmp_path):
    with pytest.raises(ModelFormatError, match=r"config\.json: no such file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gemma3"}, r"'gemma3' is not supported; supported are llama .*mistral.*qwen2.*qwen3"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor = None"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
        ({"quantization_config": "awq"}, "quantization_config = 'awq', but it must be an object"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": 7},
            "layer_types = 7, but it must be a list of 5 entries",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": None,
                "max_window_layers": "x",
            },
            "max_window_layers = 'x', but it must be an integer",
        ),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'"),
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers = 1000000000000, but it must be an integer from 1",
        ),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings = "),
        ({"head_dim": 10**12}, "head_dim = "),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x', but it must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id = .*list of integers"),
        ({"eos_token_id": {}}, "eos_token_id = "),
    ],
)
def test_configs_that_are_refused(tiny_folder, values, message):
    change_config(tiny_folder, **values)
    with pytest.raises(ModelFormatError, match=message) as caught:
        load(tiny_folder)
    assert "config.json" in str(caught.value)


def test_config_that_is_no_json(tiny_folder):
    (tiny_folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"config\.json: not readable as JSON"):
        load(tiny_folder)


def test_config_that_is_nested_without_end(tiny_folder):
    (tiny_folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFormatError, match=r"config\.json: not readable as JSON"):
        load(tiny_folder)


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", "[" * 100_000])
def test_damaged_tokenizers(tiny_folder, text):
    (tiny_folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFormatError, match="the tokenizer cannot be loaded") as caught:
        load_target(tiny_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "message"),
    [("foo", "'foo' is unknown"), ("mps", "'mps' is not supported"), ("cpu:9", "there is one CPU device")],
)
def test_devices_that_are_not_there(tiny_folder, device, message):
    with pytest.raises(ConfigError, match=message):
        load(tiny_folder, device=device)


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_dtypes_that_are_none(tiny_folder, dtype):
    with pytest.raises(ConfigError, match=f"dtype={dtype!r} is not supported; use torch.float32"):
        load(tiny_folder, dtype=dtype)


@pytest.mark.parametrize("name", [None, 5])
def test_what_is_no_name(name):
    with pytest.raises(ConfigError, match=f"{name} names no target"):
        load(name)


def test_end_tokens_of_both_files(tiny_folder):
    change_config(tiny_folder, eos_token_id=[7, 3])
    (tiny_folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(tiny_folder).eos_token_ids == (9, 7, 3)


def test_names_that_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFormatError, match=r"no such file or folder.*smollm2-135m"):
        find(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no target is named"):
        find("")
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(ModelFormatError, match=r"give a \.gguf file or the folder"):
        find(tmp_path / "readme.md")


def test_fingerprint(tmp_path):
    """The same for every dtype and folder; another for another weight or another shape."""
    config = tiny_config()
    state = random_state(config)
    base = load(write_folder(tmp_path / "a", config, state))
    half = load(write_folder(tmp_path / "b", config, state, torch.bfloat16))
    cast = load(tmp_path / "a", dtype=torch.bfloat16)
    assert base.identity.fingerprint == half.identity.fingerprint == cast.identity.fingerprint
    assert (base.identity.name, half.identity.name) == ("a", "b")
    other = {**state, "model.norm.weight": state["model.norm.weight"] + 0.1}
    changed = load(write_folder(tmp_path / "c", config, other))
    assert changed.identity.fingerprint != base.identity.fingerprint
