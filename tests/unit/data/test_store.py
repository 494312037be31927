import json

import numpy as np
import pytest

from eyas.core.errors import ConfigError, DataError
from eyas.data.build import build_store
from eyas.data.files import key_of
from eyas.data.store import StoreWriter, TokenStore
from eyas.data.vocab_count import TokenCounts, choose_mask_token, count_tokens, draft_vocabulary

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


def build(folder, *, documents=40, vocab_size=300, shard_bytes=2000, seed=0):
    rng = np.random.default_rng(seed)
    kept = []
    writer = StoreWriter(folder, vocab_size=vocab_size, meta={"from": "test"}, shard_bytes=shard_bytes)
    for number in range(documents):
        ids = rng.integers(0, vocab_size - 1, rng.integers(5, 60)).tolist()
        spans = [(2, 4)] if number % 3 else [(1, 2), (3, len(ids))]
        writer.add(f"d{number}", ids, spans)
        kept.append((ids, spans))
    return kept, writer.close()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, np.uint16), (70000, np.uint32)])
def test_documents_come_back_from_several_shards(tmp_path, vocab_size, dtype):
    kept, manifest = build(tmp_path, vocab_size=vocab_size)
    assert len(manifest["shards"]) > 1
    assert all((tmp_path / shard["name"]).stat().st_size <= 2000 + 1000 for shard in manifest["shards"])
    store = TokenStore.load(tmp_path)
    assert store.ids.dtype == dtype
    assert [store.document(i) for i in range(store.num_documents)] == kept
    mask = np.concatenate(
        [[any(a <= i < b for a, b in spans) for i in range(len(ids))] for ids, spans in kept]
    )
    assert np.array_equal(store.mask, mask)
    assert manifest["num_supervised"] == mask.sum()


def test_variations_are_held_out_with_their_prompt(tmp_path):
    names = ["a", "a~v1", "a~v2~v10", "a~v1/1", "~v1", "", "a~v", "a~v1b", "a~1", "b~v1", "b"]
    lines = [{"id": name, "messages": MESSAGES, "token_ids": [1, 2], "spans": [[1, 2]]} for name in names]
    lines[3]["prompt_id"] = "a~v1"  # its second answer
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_store(tmp_path / "c.jsonl", tmp_path / "s", vocab_size=9, template=None, meta={})
    sides = ["a", "a", "a", "a", "", "", "a~v", "a~v1b", "a~1", "b", "b"]
    assert TokenStore.load(tmp_path / "s").doc_keys.tolist() == [key_of(side) for side in sides]


def test_the_hash_depends_on_the_content_alone(tmp_path):
    first = build(tmp_path / "a")[1]["hash"]
    assert build(tmp_path / "b")[1]["hash"] == first
    assert build(tmp_path / "c", seed=1)[1]["hash"] != first


def test_damage_is_named(tmp_path):
    build(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors: the shard is damaged"):
        TokenStore.load(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors: the shard is missing"):
        TokenStore.load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: there is no such file"):
        TokenStore.load(tmp_path)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    writer = StoreWriter(tmp_path, vocab_size=10, meta={})
    with pytest.raises(DataError, match="outside the target's vocabulary of 10"):
        writer.add("x", [1, 10, 3], [(1, 2)])


def test_draft_vocabulary_takes_the_most_frequent_supervised_ids():
    counts = TokenCounts(all=np.array([9, 5, 1, 5, 7, 0]), supervised=np.array([0, 5, 1, 5, 0, 0]))
    vocab_map, coverage = draft_vocabulary(counts, 2)
    assert vocab_map.target_ids.tolist() == [1, 3]
    assert coverage == pytest.approx(10 / 11)
    # The rest is filled up by what stands anywhere: 0 (9 times), then 4 (7 times).
    assert draft_vocabulary(counts, 4)[0].target_ids.tolist() == [0, 1, 2, 3]
    assert draft_vocabulary(counts, 5)[0].target_ids.tolist() == [0, 1, 2, 3, 4]
    assert draft_vocabulary(counts, 6)[0].is_identity
    with pytest.raises(ConfigError, match="draft_vocab_size=7"):
        draft_vocabulary(counts, 7)


def test_counts_and_the_mask_token(tmp_path):
    from toy_tokenizer import toy_tokenizer

    tokenizer = toy_tokenizer()
    writer = StoreWriter(tmp_path, vocab_size=len(tokenizer), meta={})
    writer.add("x", [1, 50, 60, 2], [(2, 4)])
    writer.close()
    counts = count_tokens(TokenStore.load(tmp_path))
    assert counts.all[[1, 2, 50, 60]].tolist() == [1, 1, 1, 1]
    assert counts.supervised[[1, 2, 50, 60]].tolist() == [0, 1, 0, 1]
    used = frozenset({1, 2})
    unused = tokenizer.convert_tokens_to_ids("<unused>")
    assert choose_mask_token(counts, tokenizer, template_ids=used, wanted=None) == unused
    assert choose_mask_token(counts, tokenizer, template_ids=used, wanted=unused) == unused
    for wanted in (60, 1, tokenizer.eos_token_id, tokenizer.bos_token_id):
        with pytest.raises(DataError, match=f"mask_token_id={wanted} is in use"):
            choose_mask_token(counts, tokenizer, template_ids=used, wanted=wanted)
    # Rows of the table that the tokenizer cannot produce come first.
    wide = TokenCounts(np.append(counts.all, [0]), np.append(counts.supervised, [0]))
    assert choose_mask_token(wide, tokenizer, template_ids=used, wanted=None) == len(tokenizer)


def test_a_store_replaces_only_a_store(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "eyas-regeneration"}')
    with pytest.raises(DataError, match=r"manifest\.json: expected a manifest"):
        StoreWriter(tmp_path, vocab_size=9, meta={})
    assert (tmp_path / "manifest.json").exists()
    (tmp_path / "manifest.json").unlink()
    build(tmp_path)
    build(tmp_path, documents=3)
    assert TokenStore.load(tmp_path).num_documents == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made a folder"):
        StoreWriter(tmp_path / "file", vocab_size=9, meta={})


@pytest.mark.parametrize("edit", [{"shards": None}, {"shards": [{}]}, {"vocab_size": 5}, {"hash": None}])
def test_a_manifest_that_was_edited(tmp_path, edit):
    build(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(DataError, match=r"manifest\.json: damaged or edited by hand"):
        TokenStore.load(tmp_path)
