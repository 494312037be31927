"""GGUF files: block formats, row order, converted copies, and damage of every kind."""

import os

import gguf
import numpy as np
import pytest
import torch
import transformers

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import RopeConfig
from eyas.nn.rotary import inverse_frequencies
from eyas.targets.families import FAMILIES
from eyas.targets.gguf_config import config_from_gguf
from eyas.targets.gguf_tokenizer import tokenizer_from_gguf
from eyas.targets.load import load_target
from eyas.targets.weights.convert import _shards
from eyas.targets.weights.gguf import unpermute
from eyas.targets.weights.gguf_file import GGUFFile
from gguf_files import permute, write_gguf
from model_files import random_state, write_folder
from tiny import tiny_config

VOCAB = 64


def load(path, **options):
    return load_target(path, tokenizer=False, **options)


def make(folder, family="llama", *, kind="F32", **options):
    """One random model in both formats: (GGUF path, Hugging Face folder)."""
    overrides = {"hidden_size": 64, "intermediate_size": 96} if kind != "F32" else {}
    config = tiny_config(family, vocab_size=VOCAB, **overrides)
    state = random_state(config)
    path = folder / "tiny.gguf"
    write_gguf(path, config, state, kind=kind, **options)
    return path, write_folder(folder / "model", config, state)


def assert_same_weights(first, second, tolerance=0.0):
    theirs = second.decoder.state_dict()
    for name, tensor in first.decoder.state_dict().items():
        assert torch.allclose(tensor, theirs[name], atol=tolerance), name


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_folder_it_was_made_from(family, tmp_path):
    path, folder = make(tmp_path, family)
    target, original = load(path), load(folder)
    assert_same_weights(target, original)
    assert target.config.windows == original.config.windows
    assert target.config.family == family
    assert target.identity.fingerprint == original.identity.fingerprint
    assert target.identity.name == "tiny"
    assert target.config.eos_token_ids == (6,)


def test_converted_copy_is_used_again(tmp_path, private_cache):
    path, _ = make(tmp_path)
    first = load(path)
    (copy,) = (private_cache / "converted").iterdir()
    before = (copy / "model.safetensors").stat().st_mtime_ns
    again = load(path)
    assert (copy / "model.safetensors").stat().st_mtime_ns == before
    assert again.identity == first.identity
    assert load(copy).identity == first.identity
    load(path, dtype=torch.bfloat16)
    os.utime(path, (1, 1))
    load(path)
    assert len(list((private_cache / "converted").iterdir())) == 3


def test_converted_copy_loads_in_transformers(tmp_path, private_cache):
    path, _ = make(tmp_path, "mistral")
    target = load(path)
    (copy,) = (private_cache / "converted").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(copy)
    assert model.config.sliding_window == 6
    assert torch.equal(model.model.embed_tokens.weight, target.decoder.embed_tokens.weight)


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFormatError, match="set EYAS_CACHE"):
        load(make(tmp_path)[0])


def test_shards_of_a_large_model():
    gigabyte = 1 << 30
    shapes = {"a": (gigabyte // 4,), "b": (gigabyte // 4,), "c": (3 * gigabyte // 4,), "d": (1,)}
    assert [list(shard) for shard in _shards(shapes, 4)] == [["a", "b"], ["c"], ["d"]]


def test_unpermute_is_the_inverse():
    weight = np.arange(48 * 3, dtype=np.float32).reshape(48, 3)
    stored = permute(weight, 4)
    assert not np.array_equal(stored, weight)
    assert torch.equal(unpermute(torch.from_numpy(stored), 4), torch.from_numpy(weight))
    bias = torch.tensor([0, 3, 1, 4, 2, 5])
    assert unpermute(bias, 1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_block_formats(kind, tmp_path):
    """Within the format's step of the original: catches wrong shapes, swapped rows, forgotten scales."""
    path, folder = make(tmp_path, "qwen2", kind=kind)
    tolerance = {"F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.01}.get(kind, 0.16)
    assert_same_weights(load(path), load(folder), tolerance)


def half(raw):
    return float(np.frombuffer(bytes(raw), np.float16)[0])


def naive_q4_k(block):
    """256 values: 8 groups of 32, 6-bit scale and minimum for each, packed into 12 bytes."""
    d, low, packed, quants = half(block[:2]), half(block[2:4]), block[4:16], block[16:144]
    out = []
    for j in range(8):
        if j < 4:
            scale, minimum = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
            minimum = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)
        for i in range(32):
            byte = quants[32 * (j // 2) + i]
            out.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - low * minimum)
    return out


def naive_q5_k(block):
    """As Q4_K, with a fifth bit for each value in 32 bytes between scales and quants."""
    high, quants = block[16:48], block[48:176]
    out = naive_q4_k([*block[:16], *quants])
    d, packed = half(block[:2]), block[4:16]
    for j in range(8):
        scale = packed[j] & 63 if j < 4 else (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
        for i in range(32):
            out[32 * j + i] += d * scale * 16 * (high[i] >> j & 1)
    return out


def naive_q6_k(block):
    """256 values: 4 low bits, 2 high bits, an 8-bit scale for each 16."""
    low, high, scales, d = block[:128], block[128:192], block[192:208], half(block[208:210])
    out = []
    for i in range(256):
        part, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        byte = low[64 * part + 32 * (quarter % 2) + column]
        four = byte >> 4 if quarter >= 2 else byte & 15
        two = high[32 * part + column] >> (2 * quarter) & 3
        scale = scales[i // 16] - 256 if scales[i // 16] > 127 else scales[i // 16]
        out.append(d * scale * ((four | two << 4) - 32))
    return out


@pytest.mark.parametrize(
    ("kind", "naive", "halves"),
    [("Q4_K", naive_q4_k, (0, 2)), ("Q5_K", naive_q5_k, (0, 2)), ("Q6_K", naive_q6_k, (208,))],
)
def test_k_blocks_against_loops(kind, naive, halves, tmp_path):
    block = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[block]
    raw = np.random.default_rng(0).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    for start in (0, size):
        for place in halves:
            raw[:, start + place : start + place + 2] = np.array([0.03], np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("x", raw, raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "x.gguf").read("x")
    assert got.shape == (3, 512)
    for row in range(3):
        want = naive(raw[row, :size].tolist()) + naive(raw[row, size:].tolist())
        assert np.allclose(got[row], want, atol=1e-3)


def test_llama3_scaling_is_recognised(tmp_path):
    """GGUF stores factors for each pair; a file whose factors are not Llama 3's is refused."""
    rope = RopeConfig(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    config = tiny_config("llama", rope=rope, head_dim=16)
    factors = (inverse_frequencies(RopeConfig(), 16) / inverse_frequencies(rope, 16)).numpy()
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    write_gguf(good, config, random_state(config), factors=factors)
    write_gguf(bad, config, random_state(config), factors=factors * 1.1)
    assert config_from_gguf(GGUFFile(good)).rope == rope
    with pytest.raises(ModelFormatError, match="rope_freqs"):
        config_from_gguf(GGUFFile(bad))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "bert"}, "architecture 'bert' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"tokenizer.ggml.pre": "martian"}, r"tokenizer\.ggml\.pre 'martian' is not supported"),
    ],
)
def test_files_that_are_refused(extra, message, tmp_path, monkeypatch):
    """The metadata is changed as it is read, since the writer accepts each key only once."""
    path, _ = make(tmp_path)
    read = GGUFFile._read_header
    monkeypatch.setattr(GGUFFile, "_read_header", lambda self: (read(self), self.metadata.update(extra)))
    with pytest.raises(ModelFormatError, match=message) as caught:
        load(path)
    assert "tiny.gguf" in str(caught.value)


def test_missing_tensor(tmp_path):
    path, _ = make(tmp_path, skip=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelFormatError, match=r"tensor blk\.1\.ffn_up\.weight is missing"):
        load(path)


def test_cut_off_anywhere(tmp_path, private_cache):
    """Whatever the length, an error that names the file; near the end it names the tensor."""
    path, _ = make(tmp_path)
    whole = path.read_bytes()
    cuts = [0, 3, 4, 10, 30, *range(100, len(whole) - 1, len(whole) // 40), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFormatError, match=r"tiny\.gguf"):
            load(path)
    with pytest.raises(ModelFormatError, match=r"tensor .*\.weight ends at byte"):
        load(path)
    assert not list(private_cache.glob("converted/*"))


def test_damaged_header(tmp_path):
    """Random bytes in the header: it loads or it is refused, nothing else; 200 tries, fixed seed."""
    path, _ = make(tmp_path)
    whole = path.read_bytes()
    header = min(tensor.begin for tensor in GGUFFile(path).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for place in rng.integers(0, header, 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            config_from_gguf(GGUFFile(path))
        except ModelFormatError as error:
            assert "tiny.gguf" in str(error)  # noqa: PT017 - either outcome is right
            refused += 1
    assert refused > 20


ODD_VALUES = (None, 0, -1, 1.5, float("nan"), 10**12, "x", True, [], [1, 2], ["a"], ["a b", "c"])


def test_metadata_of_another_type_or_size(tmp_path):
    """Every key with every odd value: it is read, or refused by an error that names the file."""
    path, _ = make(tmp_path, "mistral")
    whole = GGUFFile(path)
    keys = [*whole.metadata, "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count"]
    keys += [f"tokenizer.ggml.{name}" for name in ("bos_token_id", "unknown_token_id", "add_bos_token")]
    refused = 0
    for key in keys:
        before = whole.metadata.get(key)
        for value in ODD_VALUES:
            whole.metadata[key] = value
            for read in (config_from_gguf, tokenizer_from_gguf):
                try:
                    read(whole)
                except ModelFormatError as error:
                    assert "tiny.gguf" in str(error)  # noqa: PT017 - either outcome is right
                    refused += 1
        whole.metadata[key] = before
    assert refused > 100


def test_a_damaged_merge_is_named(tmp_path):
    """One byte of the metadata: `a b` becomes `a z`, which is no token."""
    path, _ = make(tmp_path)
    raw = path.read_bytes()
    assert raw.count(b"a b") == 1
    path.write_bytes(raw.replace(b"a b", b"a z"))
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf: the tokenizer's metadata .* is damaged"):
        load_target(path)


def test_not_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFormatError, match="not a GGUF file"):
        load(path)


def test_folder_with_one_gguf_file(tmp_path):
    path, folder = make(tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    path.rename(alone / path.name)
    assert load(alone).identity.fingerprint == load(folder).identity.fingerprint
