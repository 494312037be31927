"""`eyas export`, `eyas import` and `eyas models export` on models on disk."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cli.main import main
from gguf_files import write_gguf
from model_files import random_state
from tiny import tiny_config
from tiny_files import write_head, write_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    return target, {kind: write_head(folder / kind, target, kind) for kind in ("eagle3", "peagle")}


def run(*words):
    with pytest.raises(SystemExit) as leave:
        main([*map(str, words)])
    return leave.value.code or 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators", "eagle"])
def test_out_and_back(models, kind, to, tmp_path, capsys):
    target, heads = models
    status = run(
        "export",
        heads[kind],
        tmp_path / "out",
        "--target",
        target,
        "--to",
        to,
        "--target-name",
        "o/t",
        "--json",
    )
    if kind == "peagle" and to in ("sglang", "eagle"):
        assert status == 2
        assert "kind=peagle" in capsys.readouterr().err
        return
    assert status == 0
    assert json.loads(capsys.readouterr().out)["check"]["max_logit_difference"] == 0
    assert run("import", tmp_path / "out", tmp_path / "back", "--target", target, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["max_logit_difference"]) == (kind, 0)
    before, after = (load_file(path / "model.safetensors") for path in (heads[kind], tmp_path / "back"))
    # The speculators format always carries the embedding table, which is the target's here.
    assert {name for name in before if name != "embed_tokens.weight"} <= set(after)
    for name, tensor in before.items():
        if name in after:
            assert torch.equal(after[name], tensor), name


def test_a_packed_import_says_how_far_it_is_off(models, tmp_path, capsys):
    target, heads = models
    assert run("import", heads["eagle3"], tmp_path / "p", "--target", target, "--packed", "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["max_logit_difference"] < 0.1


def test_a_damaged_head_is_refused_by_tensor(models, tmp_path, capsys):
    target, heads = models
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_bytes((heads["eagle3"] / "config.json").read_bytes())
    tensors = load_file(heads["eagle3"] / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(2)}, folder / "model.safetensors")
    assert run("import", folder, tmp_path / "out", "--target", target) == 2
    assert "extra.weight" in capsys.readouterr().err
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert run("import", folder, tmp_path / "out", "--target", target) == 2
    assert "fc.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_import_does_not_replace_what_it_reads(models, capsys):
    target, heads = models
    assert run("import", heads["eagle3"], heads["eagle3"], "--target", target) == 2
    assert "is the head itself" in capsys.readouterr().err


def test_a_gguf_target_becomes_a_folder(tmp_path, monkeypatch, capsys):
    from eyas.targets.load import load_target

    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, config, random_state(config))
    assert run("models", "export", path, tmp_path / "out", "--dtype", "float32") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    once, again = load_target(path, tokenizer=False), load_target(tmp_path / "out", tokenizer=False)
    assert once.identity == again.identity
    assert torch.equal(once.decoder.lm_head_weight, again.decoder.lm_head_weight)
    assert run("models", "export", path, tmp_path / "out") == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert run("models", "export", tmp_path / "out", tmp_path / "other") == 2
    assert "already" in capsys.readouterr().err
    assert run("models", "export", path, tmp_path / "x", "--dtype", "int3") == 2
    assert "--dtype" in capsys.readouterr().err


def test_a_name_that_no_disk_can_hold_is_one_line(models, capsys):
    target, heads = models
    assert run("export", heads["eagle3"], "x" * 300, "--target", target) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_head_with_another_activation_is_refused(models, tmp_path, capsys):
    target, heads = models
    folder = tmp_path / "gelu"
    shutil.copytree(heads["eagle3"], folder)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    assert run("import", folder, tmp_path / "out", "--target", target) == 2
    assert "hidden_act='gelu'" in capsys.readouterr().err


def test_a_correction_is_left_out_where_it_is_said_so(models, tmp_path, capsys):
    target, _ = models
    head = write_head(tmp_path / "head", target, "peagle", markov_rank=4, markov_form="hidden")
    words = ("export", head, tmp_path / "out", "--target", target)
    assert run(*words) == 2
    assert "--without-markov leaves the correction out" in " ".join(capsys.readouterr().err.split())
    assert run(*words, "--without-markov") == 0
    assert "left out: the correction by the token before" in " ".join(capsys.readouterr().err.split())
    assert run(*words, "--without-markov", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["left_out"] == "the correction by the token before (markov_form hidden, rank 4)"
    assert not any(name.startswith("markov") for name in load_file(tmp_path / "out/model.safetensors"))
