"""`eyas bench sweep` and `report` from the command line, and what their options mean."""

import json

import pytest

from eyas.bench.cells import AUTO
from eyas.cli.bench_sweep import _numbers, methods_of
from eyas.cli.main import main
from eyas.core.errors import ConfigError
from tiny_files import write_head, write_prompts, write_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    heads = {kind: write_head(folder / kind, target, kind) for kind in ("eagle3", "peagle")}
    write_prompts(folder / "data/mine.jsonl", 4)
    return folder, target, heads


def run(*words):
    with pytest.raises(SystemExit) as leave:
        main(["bench", *map(str, words)])
    return leave.value.code or 0


def sweep(models, record, *more):
    folder, target, heads = models
    each = [word for head in heads.values() for word in ("--head", head)]
    small = ("--num-requests", 2, "--waves", 1, "--max-tokens", 4, "--repeats", 2, "--num-prompts", 2)
    return run(
        "sweep",
        "-t",
        target,
        *each,
        "--data",
        "mine",
        "--data-dir",
        folder / "data",
        *small,
        "-o",
        record,
        *more,
    )


def test_from_sweep_to_page(models, tmp_path, capsys):
    record = tmp_path / "r.jsonl"
    assert sweep(models, record, "--k", "2", "--concurrency", "1,2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_cells"], found["num_measured"]) == (12, 12)
    assert {row["method"] for row in found["rows"]} == {"plain", "eagle3", "peagle"}
    assert [one["concurrency"] for one in found["peagle_over_eagle3"]] == [1, 2]
    # One more K: only its cells are measured.
    assert sweep(models, record, "--k", "2,1", "--concurrency", "1,2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_measured"] == 8
    pytest.importorskip("matplotlib")
    assert run("report", record, "-o", tmp_path / "out") == 0
    assert capsys.readouterr().out.strip().endswith("index.html")
    assert (tmp_path / "out/ratio.png").is_file()


def test_an_open_loop_with_phases(models, tmp_path, capsys):
    record = tmp_path / "r.jsonl"
    words = ("--methods", "plain", "--rate", "50", "--phases", "--json", "--max-num-seqs", 2)
    assert sweep(models, record, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_cells"] == 3
    assert found["rows"][0]["rate"] == 50
    assert found["rows"][0]["verify_ms"] > 0


def test_methods(models, tmp_path):
    _, target, heads = models
    both = [str(head) for head in heads.values()]

    def labels(text, given=both, ks=(3,), engine="local"):
        return [m.label for m in methods_of(text, list(given), list(ks), str(target), engine)]

    assert labels("plain,eagle3,peagle", ks=(3, 5)) == [
        "plain", "eagle3 K=3", "eagle3 K=5", "peagle K=3", "peagle K=5",
    ]  # fmt: skip
    assert labels(f"mine={both[0]},prompt_lookup") == ["mine K=3", "prompt_lookup K=3"]
    assert labels("small:x/tiny") == ["tiny K=3"]
    assert labels("a@5=http://h:1,b=http://h:2") == ["a K=5", "b"]
    assert labels("eagle3", engine="http://h:1") == ["eagle3 K=3"]
    for text, given, ks, engine, said in (
        ("medusa", both, (3,), "local", "none of plain"),
        ("eagle3", [], (3,), "local", "0 heads of that kind"),
        ("eagle3", [both[0], both[0]], (3,), "local", "2 heads of that kind"),
        ("eagle3", [str(tmp_path)], (3,), "local", "no config.json"),
        ("eagle3", both, (AUTO,), "local", "eyas calibrate"),
        ("eagle3,peagle", both, (3,), "http://h:1", "one server"),
        ("eagle3", both, (3, 5), "http://h:1", "one server"),
    ):
        with pytest.raises(ConfigError, match=said):
            labels(text, given, ks, engine)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--concurrency", "0"), "--concurrency"),
        (("--k", "x"), "--k"),
        (("--rate", "-1"), "--rate"),
        (("--data", "nothere"), "nothere"),
        (("--methods", ""), "no method"),
    ],
)
def test_mistakes_are_named(models, tmp_path, capsys, words, said):
    assert sweep(models, tmp_path / "r.jsonl", *words) == 2
    assert said in capsys.readouterr().err


def test_a_target_is_needed_for_what_runs_here(tmp_path, capsys):
    assert run("sweep", "--methods", "plain", "-o", tmp_path / "r.jsonl") == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["nan", "inf"])
def test_a_rate_is_a_number_of_requests(rate):
    with pytest.raises(ConfigError, match="--rate: expected positive numbers"):
        _numbers("--rate", rate, float)
