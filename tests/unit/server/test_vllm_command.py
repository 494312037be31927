"""`eyas serve --backend vllm`: the command, and the head that it names."""

import json
import os
import shlex
from pathlib import Path

import pytest

from eyas.cli.main import main
from eyas.core.errors import ConfigError
from eyas.server.vllm_command import graph_sizes, vllm_command
from tiny_files import write_head, write_target

EAGLE = {"method": "eagle3", "model": "h", "num_speculative_tokens": 3}


def test_sizes_of_graphs_by_hand():
    assert graph_sizes(4, 3, parallel=False) == [4, 8, 16]
    assert graph_sizes(4, 3, parallel=True) == [4, 6, 8, 12, 16, 24]
    assert graph_sizes(1, 7, parallel=True) == [8, 14]
    # 6 is no power of two: batches of 1, 2, 4 and 6.
    assert graph_sizes(6, 1, parallel=False) == [2, 4, 8, 12]
    assert graph_sizes(2, 0, parallel=False) == [1, 2]


def test_the_words_of_the_command():
    words = vllm_command("m", EAGLE, host="h", port=1, max_num_seqs=2, max_model_len=9, extra=["--x", "y"])
    assert words[:3] == ["vllm", "serve", "m"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == EAGLE
    at = words.index("--cudagraph-capture-sizes")
    assert words[at + 1 : at + 3] == ["4", "8"]
    assert words[-4:] == ["--max-model-len", "9", "--x", "y"]
    plain = vllm_command("m", None, host="h", port=1, max_num_seqs=2)
    assert plain == ["vllm", "serve", "m", "--host", "h", "--port", "1", "--max-num-seqs", "2"]
    with pytest.raises(ConfigError, match="at least 1"):
        vllm_command("m", EAGLE | {"num_speculative_tokens": 0}, host="h", port=1, max_num_seqs=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    return target, {kind: write_head(folder / kind, target, kind) for kind in ("eagle3", "peagle")}


def run(*words):
    with pytest.raises(SystemExit) as leave:
        main(["serve", *map(str, words)])
    return leave.value.code or 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_command_names_a_head_that_vllm_loads(models, kind, tmp_path, monkeypatch, capsys):
    from eyas.export.check import compare_names
    from eyas.export.write import read_head
    from eyas.targets.load import load_target

    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    target, heads = models
    words = (target, "--head", heads[kind], "-k", 4, "--backend", "vllm", "--print-command")
    assert run(*words, "--vllm-args", "--tensor-parallel-size 2") == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:3] == ["vllm", "serve", str(target)]
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    settings = json.loads(command[command.index("--speculative-config") + 1])
    assert settings["num_speculative_tokens"] == 4
    assert settings.get("parallel_drafting", False) == (kind == "peagle")
    loaded = load_target(target, tokenizer=False)
    written = tmp_path / "exported" / os.path.basename(settings["model"])  # noqa: PTH119
    assert compare_names(written, read_head(heads[kind], loaded), "vllm") == ([], [])
    # Again: the same command, the same folder.
    assert run(*words) == 0
    assert settings["model"] in capsys.readouterr().out


def test_a_correction_that_vllm_cannot_run_is_left_out_where_it_is_said_so(
    models, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    target, _ = models
    head = write_head(tmp_path / "head", target, "peagle", markov_rank=4, markov_form="hidden")
    words = (target, "--head", head, "--backend", "vllm", "--print-command")
    assert run(*words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "markov_rank" in said
    assert "--without-markov leaves the correction out" in said
    assert not (tmp_path / "cache/exported").exists()
    assert run(*words, "--without-markov") == 0
    shown = capsys.readouterr()
    assert "without the correction by the token before" in " ".join(shown.err.split())
    command = shlex.split(shown.out)
    settings = json.loads(command[command.index("--speculative-config") + 1])
    assert settings["parallel_drafting"]
    config = json.loads((Path(settings["model"]) / "config.json").read_text())
    assert not config.get("markov_rank")


def test_the_program_takes_this_ones_place(models, tmp_path, monkeypatch):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = []
    monkeypatch.setattr("os.execve", lambda *given: seen.append(given))
    assert run(models[0], "--backend", "vllm", "--api-key", "secret", "--port", 9) == 0
    path, words, environment = seen[0]
    assert path == str(program)
    assert words[:3] == ["vllm", "serve", str(models[0])]
    assert "secret" not in " ".join(words)
    assert environment["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "vllm", "--tree", "3x2x6"), "--tree"),
        (("--backend", "vllm", "--sample-drafts"), "--sample-drafts"),
        (("--backend", "vllm", "--head", "prompt_lookup"), "head folders"),
        (("--backend", "vllm", "--head", "a", "--head", "b"), "one head"),
        (("--backend", "vllm"), "not installed"),
        (("--backend", "tgi"), "eyas or vllm"),
        (("--print-command",), "belong to --backend vllm"),
        (("--without-markov",), "belong to --backend vllm"),
    ],
)
def test_what_cannot_be_is_named(models, words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(models[0], *words) == 2
    assert said in capsys.readouterr().err
