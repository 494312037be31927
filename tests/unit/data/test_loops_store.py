import json

import numpy as np
import pytest

from eyas.cli.main import main
from eyas.core.errors import DataError
from eyas.data.loader import split_documents
from eyas.data.loops import LoopRule, loop_start
from eyas.data.loops_store import trim_store
from eyas.data.store import StoreWriter, TokenStore
from tiny_files import VOCAB, write_target

RULE = LoopRule(ngram=3, window=12, share=0.9, keep=5)
LOOP = [11, 12, 13, 14] * 10


def build(folder, documents=60, vocab_size=300):
    """Every third document ends in a loop, every fifth has one in its first answer."""
    rng = np.random.default_rng(1)
    writer = StoreWriter(folder, vocab_size=vocab_size, meta={"target": "toy"}, shard_bytes=1500)
    for number in range(documents):
        ids, spans = [1, 2], []
        for looping in (number % 5 == 0, number % 3 == 0):
            ids += rng.integers(20, 250, 6).tolist()
            answer = rng.integers(20, 250, rng.integers(3, 30)).tolist() + LOOP * looping
            spans.append((len(ids), len(ids) + len(answer)))
            ids += answer
        writer.add(f"d{number}", ids, spans)
    writer.close()
    return TokenStore.load(folder)


def run(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(list(args))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_documents_are_cut_and_the_rest_is_kept(tmp_path):
    store = build(tmp_path / "a")
    steps = []
    manifest, loops = trim_store(store, tmp_path / "b", RULE, progress=steps.append)
    after = TokenStore.load(tmp_path / "b")
    assert after.num_documents == store.num_documents == steps[-1]
    expected = []
    for number in range(store.num_documents):
        (ids, spans), (new_ids, new_spans) = store.document(number), after.document(number)
        wanted = []
        for begin, end in spans:
            loop = loop_start(ids[begin:end], RULE)
            if loop < end - begin:
                expected.append((number, begin + loop, begin + loop + 5))
            wanted.append((begin, min(end, begin + loop + 5)))
        assert new_spans == wanted
        # Only the document's end may go.
        assert new_ids == ids[: wanted[-1][1]]
    assert loops == expected
    assert len(loops) == 60 // 3 + 60 // 5
    counts = manifest["meta"]["trim"]["counts"]
    assert counts["num_answers"] == 120
    assert counts["num_looping"] == counts["num_cut"] == len(loops)
    assert manifest["num_supervised"] == store.manifest["num_supervised"] - (
        counts["num_looping_tokens"] - 5 * len(loops)
    )
    assert manifest["meta"]["target"] == "toy"
    assert manifest["meta"]["trim"]["store_hash"] == store.manifest["hash"]


def test_the_same_documents_are_held_out(tmp_path):
    store = build(tmp_path / "a")
    trim_store(store, tmp_path / "b", RULE)
    after = TokenStore.load(tmp_path / "b")
    assert np.array_equal(after.doc_keys, store.doc_keys)
    assert np.array_equal(split_documents(after, 0.3)[1], split_documents(store, 0.3)[1])


def test_a_run_that_stopped_begins_anew_and_comes_out_the_same(tmp_path):
    store = build(tmp_path / "a")
    first, _ = trim_store(store, tmp_path / "b", RULE)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trim_store(store, tmp_path / "c", RULE, progress=stop)
    with pytest.raises(DataError, match=r"manifest\.json: there is no such file"):
        TokenStore.load(tmp_path / "c")
    assert trim_store(store, tmp_path / "c", RULE)[0] == first


def test_a_second_trim_finds_nothing(tmp_path):
    trim_store(build(tmp_path / "a"), tmp_path / "b", RULE)
    once = TokenStore.load(tmp_path / "b")
    manifest, loops = trim_store(once, tmp_path / "c", RULE)
    assert loops == []
    assert manifest["num_tokens"] == once.manifest["num_tokens"]


FLAGS = ("--ngram", "3", "--window", "12", "--share", "0.9", "--keep", "5")


def test_the_command_reports(tmp_path, capsys):
    store = build(tmp_path / "a")
    args = ("data", "trim", str(tmp_path / "a"), "--out", str(tmp_path / "b"), *FLAGS)
    status, out, _ = run(capsys, *args, "--json")
    report = json.loads(out)
    assert status == 0
    assert report["before"]["num_tokens"] == store.manifest["num_tokens"]
    assert report["after"]["num_supervised"] < report["before"]["num_supervised"]
    assert (report["ngram"], report["counts"]["num_cut"], report["examples"]) == (3, 32, [])
    assert report["share_cut"] == pytest.approx(
        1 - report["after"]["num_supervised"] / report["before"]["num_supervised"]
    )
    status, out, _ = run(capsys, *args)
    assert status == 0
    assert "32 of 120 answers loop" in out


def test_the_commands_errors_are_one_line(tmp_path, capsys):
    build(tmp_path / "a")
    here = str(tmp_path / "a")
    shard = tmp_path / "a" / "shard-00000.safetensors"
    cases = [
        ((here, "--out", str(tmp_path / "a" / ".." / "a")), "another folder"),
        ((here, "--out", str(shard)), "cannot be made a folder"),
        ((here, "--out", str(tmp_path / "x"), "--show", "3"), "--target"),
        ((here, "--out", str(tmp_path / "x"), "--share", "2"), "share 2"),
        ((here, "--out", str(tmp_path / "x"), "--share", "nan"), "share nan"),
        ((str(tmp_path / "none"), "--out", str(tmp_path / "x")), "none/manifest.json: there is no such file"),
    ]
    for args, words in cases:
        status, out, err = run(capsys, "data", "trim", *args)
        assert (status, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("error: ")
        assert words in last
    assert TokenStore.load(tmp_path / "a").num_documents == 60  # it was not touched
    shard.write_bytes(shard.read_bytes()[:-3])
    status, _, err = run(capsys, "data", "trim", here, "--out", str(tmp_path / "x"))
    assert status == 2
    assert "shard is damaged" in err
    shard.unlink()
    status, _, err = run(capsys, "data", "trim", here, "--out", str(tmp_path / "x"))
    assert status == 2
    assert "shard is missing" in err
    assert not (tmp_path / "x").exists()


def test_loops_are_shown_as_text(tmp_path, capsys):
    target = str(write_target(tmp_path / "target"))
    store = build(tmp_path / "a", vocab_size=VOCAB)
    args = ("data", "trim", str(tmp_path / "a"), "--out", str(tmp_path / "b"), *FLAGS, "--target", target)
    status, out, _ = run(capsys, *args, "--show", "4", "--json")
    examples = json.loads(out)["examples"]
    assert status == 0
    assert len(examples) == 4
    for example in examples:
        ids, _ = store.document(example["document"])
        assert ids[example["loop"] :][:8] in [LOOP[i : i + 8] for i in range(4)]
        assert example["before"]
        assert (len(example["kept"]), len(example["cut"])) == (5, 40 - 4 - 5)
    status, out, _ = run(capsys, *args, "--show", "99")
    assert status == 0
    assert out.count("loop from token") == out.count("[loop]") == out.count("[cut]") == 32
    build(tmp_path / "c")
    status, _, err = run(capsys, "data", "trim", str(tmp_path / "c"), *args[3:])
    assert status == 2
    assert f"vocabulary of 300, the target has {VOCAB}" in err
