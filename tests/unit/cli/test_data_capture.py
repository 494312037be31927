import pytest

from eyas.cli.main import main
from eyas.data.store import StoreWriter, TokenStore
from tiny_files import VOCAB, write_target


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target that reads 64 tokens, and three documents of which two are longer."""
    folder = tmp_path_factory.mktemp("capture")
    writer = StoreWriter(folder / "store", vocab_size=VOCAB, meta={})
    for number, size in enumerate((40, 65, 200)):
        writer.add(f"d{number}", [5] * size, [(10, size)])
    writer.close()
    return folder / "store", write_target(folder / "target", max_position_embeddings=64)


def run(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["data", "capture", *map(str, args), "--device", "cpu", "--yes", "--json"])
    return int(end.value.code or 0), *capsys.readouterr()


def test_rows_longer_than_the_target_reads_are_refused(files, tmp_path, capsys):
    store, target = files
    status, out, err = run(capsys, store, "--target", target, "--out", tmp_path / "f", "--seq-len", 65)
    assert (status, out) == (2, "")
    assert "--seq-len 65: the target reads at most 64 tokens, 2 of 3 documents are longer" in err
    assert not (tmp_path / "f").exists()


def test_longer_documents_are_cut_into_pieces(files, tmp_path, capsys):
    store, target = files
    status, out, _ = run(capsys, store, "--target", target, "--out", tmp_path / "f", "--seq-len", 64)
    assert status == 0
    assert f'"tokens": {TokenStore.load(store).manifest["num_tokens"]}' in out
    assert (tmp_path / "f" / "manifest.json").exists()
