"""Studies end to end on a tiny target: records, skipping, pausing, failing, and the trainer's part in it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from eyas.bench.plots_study import draw_study, groups
from eyas.cli.main import main
from eyas.config import load_config
from eyas.core.errors import ConfigError, DataError
from eyas.data.loader import split_documents
from eyas.data.store import StoreWriter, TokenStore
from eyas.training.config import TrainConfig
from eyas.training.study import load_study
from eyas.training.study_records import collect, last_rows, table, variant_rows
from eyas.training.study_run import run_study
from eyas.training.study_sections import main as sections_main
from eyas.training.study_sections import read_rows
from eyas.training.trainer import Trainer
from tiny import tiny_target
from tiny_files import VOCAB, write_target

ROOT = Path(__file__).parents[3]
RECIPE = """
target: {path: unused}
data: {store: STORE, seq_len: 32, held_out: 0.25}
head: {num_layers: 1, draft_vocab_size: 40}
objective: {kind: eagle3, ttt_steps: 2}
loss: {chunk: 64}
run: {out: unused, batch_rows: 2, max_steps: 1, validate_rows: 4}
"""
VARIANTS = {
    "base": [],
    "data/1of4": ["data.share=0.25"],
    "peagle": ["objective={kind: peagle, num_depths: 3}"],
}


def write_store(folder, vocab_size, documents=40):
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, vocab_size=vocab_size, meta={})
    for number in range(documents):
        writer.add(f"doc-{number}", rng.integers(4, vocab_size - 4, 24).tolist(), [(4, 24)])
    writer.close()
    return folder


def write_study(folder, store, **changes):
    (folder / "recipe.yaml").write_text(RECIPE.replace("STORE", str(store)))
    study = {"recipe": "recipe.yaml", "steps": 6, "validations": 3, "depths": 3, "variants": VARIANTS}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study | {"baseline": "base"} | changes, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("data") / "store", 64)


@pytest.fixture
def opener(target, store):
    opened = []

    def open_trainer(config, display):
        opened.append(config.run.out)
        return Trainer(config, target, TokenStore.load(store), display=display)

    open_trainer.opened = opened
    return open_trainer


def timeless(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_three_variants_run_and_are_skipped_afterwards(opener, store, tmp_path):
    said = []
    study, out = load_study(write_study(tmp_path, store), tmp_path / "out"), tmp_path / "out"
    assert run_study(study, study.plans, out, opener, say=said.append)
    rows = [json.loads(line) for line in (out / "study.jsonl").read_text().splitlines()]
    assert [(row["variant"], row["step"]) for row in rows] == [(n, s) for n in VARIANTS for s in (2, 4, 6)]
    for row in rows:
        assert (row["state"], len(row["acceptance"]), len(row["visited_acceptance"])) == ("finished", 3, 3)
        assert row["tokens"] == row["step"] * 2 * 32
        assert 0 < row["head_flops"] < row["flops"]
        assert row["group"] == ("data" if row["variant"].startswith("data/") else "")
    flops = [row["flops"] for row in rows if row["variant"] == "base"]
    assert flops == sorted(flops)
    whole, quarter = rows[2], rows[5]
    assert quarter["epochs"] > 2 * whole["epochs"]
    assert not list(out.rglob("*.safetensors"))
    opener.opened.clear()
    assert run_study(study, study.plans, out, opener, say=said.append)
    assert opener.opened == []
    assert said[-3:] == [f"{name}: finished before" for name in VARIANTS]


def test_a_folder_of_another_variant_is_refused(opener, store, tmp_path):
    out = tmp_path / "out"
    study = load_study(write_study(tmp_path, store), out)
    run_study(study, study.plans[:1], out, opener, say=str)
    for other, changed in (
        (load_study(tmp_path / "study.yaml", out, steps=8), "max_steps"),
        (load_study(tmp_path / "study.yaml", out, overrides=("optim.lr=3e-3",)), "optim"),
    ):
        with pytest.raises(ConfigError, match=f"another .*{changed}"):
            run_study(other, other.plans, out, opener, say=str)
    (out / "base/variant.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        run_study(study, study.plans, out, opener, say=str)


def test_variants_in_turn_train_as_if_alone_and_ask_the_target_once(target, store, tmp_path, monkeypatch):
    variants = VARIANTS | {"ttt/1": ["objective.ttt_steps=1"], "seed/1": ["run.seed=1"]}
    path = write_study(tmp_path, store, variants=variants)
    asked = []
    forward = type(target.decoder).forward

    def counting(self, ids, *rest, **more):
        asked.append(tuple(ids.shape))
        return forward(self, ids, *rest, **more)

    monkeypatch.setattr(type(target.decoder), "forward", counting)
    found, times = {}, {}
    for together in (1, 5):
        out, shared = tmp_path / str(together), {}
        study = load_study(path, out)

        def opener(config, display, shared=shared if together > 1 else None):
            return Trainer(config, target, TokenStore.load(store), display=display, shared=shared)

        asked.clear()
        assert run_study(study, study.plans, out, opener, keep_heads=True, together=together, say=str)
        found[together], times[together] = timeless(collect(out)), len(asked)
    assert found[1] == found[5]
    for name in variants:
        one, other = (tmp_path / run / name / "model.safetensors" for run in ("1", "5"))
        assert one.read_bytes() == other.read_bytes()
    # Six steps of five variants, three of which train on the same batches; validation rows once for all.
    assert times[1] == 5 * 6 + 2
    assert times[5] == 3 * 6 + 2


def test_one_that_fails_leaves_the_others_of_its_turn(opener, store, tmp_path):
    def breaking(config, display):
        trainer = opener(config, display)
        if config.run.out.endswith("base"):
            with torch.no_grad():
                trainer.parameters[0].fill_(float("nan"))
        return trainer

    study, out = load_study(write_study(tmp_path, store), tmp_path / "out"), tmp_path / "out"
    assert not run_study(study, study.plans, out, breaking, together=3, say=str)
    states = {n: json.loads((out / n / "variant.json").read_text())["state"] for n in VARIANTS}
    assert states == {"base": "failed", "data/1of4": "finished", "peagle": "finished"}


def test_without_checkpoints_a_stopped_variant_begins_anew(opener, store, tmp_path):
    study = load_study(write_study(tmp_path, store, checkpoints=False), tmp_path)
    assert {plan.config.run.checkpoint_every for plan in study.plans} == {0}
    assert run_study(study, study.plans, tmp_path, opener, say=str)
    assert not list(tmp_path.glob("*/checkpoints"))


@pytest.mark.slow
def test_a_study_that_pauses_again_and_again_ends_with_the_same_records(opener, store, tmp_path):
    path = write_study(tmp_path, store)
    whole, cut = (load_study(path, tmp_path / name) for name in ("whole", "cut"))
    run_study(whole, whole.plans, tmp_path / "whole", opener, keep_heads=True, say=str)

    def just_opened(config, display):
        trainer = opener(config, display)
        advance = trainer.advance

        def one_record_more(window):
            advance(window)
            trainer.deadline = time.monotonic()

        trainer.advance = one_record_more
        return trainer

    def run_cut():
        return run_study(cut, cut.plans, tmp_path / "cut", just_opened, keep_heads=True, say=str)

    legs = 1
    while not run_cut():
        assert collect(tmp_path / "cut")[-1]["state"] == "running"
        legs += 1
    assert legs > 6
    assert timeless(collect(tmp_path / "cut")) == timeless(collect(tmp_path / "whole"))
    for name in VARIANTS:
        first, second = (tmp_path / one / name / "model.safetensors" for one in ("whole", "cut"))
        assert first.read_bytes() == second.read_bytes()


def test_no_variant_begins_after_the_deadline(opener, store, tmp_path):
    study = load_study(write_study(tmp_path, store), tmp_path / "out")
    assert not run_study(study, study.plans, tmp_path / "out", opener, deadline=time.monotonic(), say=str)
    assert opener.opened == []
    assert collect(tmp_path / "out") == []
    assert table([]) == "Nothing is measured yet.\n"


def test_a_variant_that_fails_is_recorded_and_the_next_one_runs(opener, store, tmp_path):
    def breaking(config, display):
        trainer = opener(config, display)
        if config.run.out.endswith("base"):
            with torch.no_grad():
                trainer.parameters[0].fill_(float("nan"))
        return trainer

    study, out = load_study(write_study(tmp_path, store), tmp_path / "out"), tmp_path / "out"
    assert not run_study(study, study.plans, out, breaking, say=str)
    states = {n: json.loads((out / n / "variant.json").read_text())["state"] for n in VARIANTS}
    assert states == {"base": "failed", "data/1of4": "finished", "peagle": "finished"}
    assert "not a number" in json.loads((out / "base/variant.json").read_text())["error"]
    assert run_study(study, study.plans, out, opener, say=str)
    assert {row["state"] for row in collect(out)} == {"finished"}


def test_flops_of_a_run_do_not_depend_on_how_often_they_are_logged(opener, store, tmp_path):
    plan = load_study(write_study(tmp_path, store), tmp_path).plans[2]
    sums = []
    for every in (1, 4, 6):
        run = replace(plan.config.run, log_every=every, validate_every=0, checkpoint_every=0)
        out = tmp_path / str(every)
        opener(replace(plan.config, run=replace(run, out=str(out))), None).train()
        records = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
        train = [record for record in records if record["kind"] == "train"]
        sums.append([sum(record[key] for record in train) for key in ("flops", "head_flops")])
    assert sums[1] == pytest.approx(sums[0], rel=1e-12)
    assert sums[2] == pytest.approx(sums[0], rel=1e-12)


def test_a_table_holds_variants_against_the_baseline():
    def row(variant, step, al, **more):
        return {
            "variant": variant,
            "state": "finished",
            "num_trained_parameters": 1_500_000,
            "step": step,
            "epochs": 0.5,
            "tokens": 2_000_000,
            "flops": 3e15,
            "head_flops": 1e15,
            "seconds": 9.6,
            "acceptance": [0.5, 0.25],
            "simulated_al": al,
            "decoded": {},
        } | more

    decoded = {"gsm8k": {"acceptance_length": 2.5}}
    rows = [row("a", 1, 1.1), row("a", 2000, 2.0), row("b/x", 2000, 1.75, decoded=decoded, state="running")]
    assert [one["step"] for one in last_rows(rows)] == [2000, 2000]
    assert "| 1.750 | +0.250 (c) | 2.500 |" in table([*rows, row("c", 1, 1.5)], "a", {"b": "c"})
    lines = table(rows, "a").splitlines()
    assert lines[0].endswith("| AL simulated | against a | AL gsm8k | a0 | a1 |")
    assert lines[2] == "| a | 1.5 | 2,000 | 0.50 | 2.0 | 3 | 1 | 10 | 2.000 |  |  | 0.500 | 0.250 |"
    assert "| b/x (running) |" in lines[3]
    assert "| 1.750 | -0.250 | 2.500 |" in lines[3]


def test_sections_hold_each_group_against_its_own_baseline(tmp_path, capsys):
    def row(variant, step, al):
        return {
            "variant": variant, "state": "finished", "num_trained_parameters": 1_500_000, "step": step,
            "epochs": 0.5, "tokens": 2, "flops": 3e15, "head_flops": 1e15, "seconds": 9.6,
            "acceptance": [0.5, 0.25], "visited_acceptance": [0.4, 0.2], "simulated_al": al,
            "decoded": {}, "device": "cpu",
        }  # fmt: skip

    about = {
        "baseline": "p",
        "beside": ["e"],
        "against": {"ttt": "e"},
        "variants": ["e", "p", "ttt/1", "k/4", "k/8"],
    }
    rows = [row("e", 1, 1.0), row("e", 2, 2.0), row("p", 2, 1.5), row("ttt/1", 2, 1.25)]
    (tmp_path / "study.json").write_text(json.dumps(about))
    (tmp_path / "study.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "more.jsonl").write_text(json.dumps(row("k/4", 2, 1.75)) + "\n")
    log = tmp_path / "log.jsonl.gz"
    sections_main([str(tmp_path), str(tmp_path / "more.jsonl"), "--log", str(log)])
    tables = [part.strip().splitlines() for part in capsys.readouterr().out.split("### ")[1:]]
    cells = [[line.strip("| ").split(" | ") for line in lines[4:]] for lines in tables]
    assert [(row[0], *row[5:7]) for row in cells[0]] == [("p", "1.500", ""), ("e", "2.000", "+0.500")]
    assert [(row[0], *row[5:7]) for row in cells[1]] == [("e", "2.000", ""), ("ttt/1", "1.250", "-0.750")]
    assert [(row[0], *row[5:]) for row in cells[2]] == [
        ("p", "1.500", "", "0.400", "0.200"),
        ("k/4", "1.750", "+0.250", "0.400", "0.200"),
    ]
    kept = read_rows(log)
    assert [(one["variant"], "acceptance" in one) for one in kept] == [
        ("e", False), ("e", True), ("p", True), ("ttt/1", True), ("k/4", True)
    ]  # fmt: skip


def test_decoded_figures_belong_to_the_last_validation(store, opener, tmp_path):
    study, out = load_study(write_study(tmp_path, store), tmp_path / "out"), tmp_path / "out"
    result = {"mt_bench": {"acceptance_length": 1.5}}

    def decoding(config, display):
        trainer = opener(config, display)
        trainer.evaluate = lambda folder: result
        return trainer

    run_study(study, study.plans[:1], out, decoding, say=str)
    assert [row["decoded"] for row in variant_rows(out, "base")] == [{}, {}, result]
    with (out / "base/training_log.jsonl").open("a") as file:
        file.write('{"kind": "valid')
    assert len(variant_rows(out, "base")) == 3
    with pytest.raises(DataError, match="the folder of a study"):
        collect(tmp_path)


def test_figures_have_a_panel_for_each_group():
    pytest.importorskip("matplotlib")
    measured = {
        "acceptance": [0.5, 0.4],
        "visited_acceptance": [0.4, 0.3],
        "simulated_al": 1.5,
        "flops": 1e12,
    }
    names = ("base", "k/4", "k/12", "layers/1", "eagle3")
    rows = [{"variant": name, "epochs": e, **measured} for name in names for e in (1, 2)]
    assert groups(rows, ["base", "eagle3", "absent"]) == {
        "k": ["base", "eagle3", "k/4", "k/12"],
        "layers": ["base", "eagle3", "layers/1"],
    }
    assert groups(rows, ["base"], {"k": "eagle3"})["k"] == ["eagle3", "k/4", "k/12"]
    assert groups(rows[:2], ["base"]) == {"all": ["base"]}
    assert groups(rows[-2:], []) == {"all": ["eagle3"]}
    figures = draw_study(rows, ["base", "eagle3"])
    assert set(figures) == {"epochs", "flops", "acceptance", "overview"}
    assert all(png.startswith(b"\x89PNG") for png in figures.values())
    assert draw_study([]) == {}


# -- the trainer's part ---------------------------------------------------------------------------------


def test_smaller_shares_of_the_data_are_parts_of_larger_ones(tmp_path):
    store = TokenStore.load(write_store(tmp_path / "store", 64, documents=400))
    whole, held_out = split_documents(store, 0.25)
    before: set[int] = set()
    for share in (1 / 16, 1 / 4, 1 / 2, 1.0):
        part, same = split_documents(store, 0.25, share)
        assert np.array_equal(same, held_out)
        assert before < set(part.tolist()) <= set(whole.tolist())
        assert len(part) == pytest.approx(share * len(whole), abs=3 * (len(whole) * share) ** 0.5)
        before = set(part.tolist())
    assert before == set(whole.tolist())


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_depths_of_validation_are_not_those_of_training(kind, opener, store, tmp_path):
    """Heads of equal weights validate alike, however deep they are to be trained."""
    path = write_study(tmp_path, store, variants={"base": [f"objective={{kind: {kind}}}"]})
    name = "ttt_steps" if kind == "eagle3" else "num_depths"
    found = {}
    for trained, depths in ((2, 5), (5, None), (5, 2), (2, None)):
        config = load_study(path, tmp_path).plans[0].config
        objective = replace(config.objective, **{name: trained})
        run = replace(config.run, validate_depths=depths, max_steps=1)
        trainer = opener(replace(config, objective=objective, run=run), None)
        trainer._validate(None)
        found[trained, depths] = trainer._last_validation
    for one, other in (((2, 5), (5, None)), ((5, 2), (2, None))):
        assert {k: v for k, v in found[one].items() if k != "seconds"} == {
            k: v for k, v in found[other].items() if k != "seconds"
        }
    assert len(found[2, 5]["acceptance"]) == 5
    assert found[2, 5]["acceptance"][0] == found[5, 2]["acceptance"][0]


def test_validation_rows_may_have_their_own_length(opener, store, tmp_path):
    config = load_study(write_study(tmp_path, store), tmp_path).plans[0].config
    short = replace(config, data=replace(config.data, seq_len=16))
    assert opener(short, None).validation.ids.shape[1] == 16
    same = replace(short, run=replace(short.run, validate_seq_len=32))
    assert torch.equal(opener(same, None).validation.ids, opener(config, None).validation.ids)
    with pytest.raises(ConfigError, match=r"validate_seq_len=512: the target reads at most 256"):
        opener(replace(short, run=replace(short.run, validate_seq_len=512)), None)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_qwen_recipes_build_and_train_on_a_target_of_their_family(kind, store, tmp_path):
    path = ROOT / f"recipes/train/qwen2.5-coder-0.5b-{kind}.yaml"
    shipped = load_config(TrainConfig, path)
    assert (shipped.objective.kind, shipped.head.draft_vocab_size, shipped.head.final_norm_scale) == (
        kind,
        16000,
        1.0,
    )
    small = ["head.draft_vocab_size=40", "run.epochs=null", "run.max_steps=2", "run.compile=false"]
    small += [f"data.store={store}", "data.seq_len=32", "data.held_out=0.2", "run.batch_rows=2"]
    config = load_config(TrainConfig, path, [*small, f"run.out={tmp_path}", "run.tensorboard=false"])
    trainer = Trainer(config, tiny_target("qwen2"), TokenStore.load(store))
    assert trainer.model.config.num_layers == {"eagle3": 1, "peagle": 4}[kind]
    out = trainer.train()
    assert json.loads((out / "eyas.json").read_text())["training"]["steps"] == 2


@pytest.mark.slow
def test_variants_that_share_compiled_code_train_as_if_alone(target, store, tmp_path, monkeypatch):
    """Nothing is reset between variants: other weights, depths and options must not meet old graphs."""
    from torch._dynamo.utils import counters

    compile_for_real = torch.compile

    def without_inductor(function, *, dynamic, options):
        del options
        return compile_for_real(function, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", without_inductor)
    variants = {f"seed/{seed}": [f"run.seed={seed}"] for seed in range(3)}
    variants |= {f"size/{size}": [f"head.draft_vocab_size={size}"] for size in range(41, 49)}
    variants |= {"ttt/3": ["objective.ttt_steps=3"], "tv": ["loss.kind=tv"], "peagle": VARIANTS["peagle"]}
    path = write_study(tmp_path, store, variants=variants, baseline=None, overrides=["optim.warmup=0"])
    rows = {}
    for compiled in ("true", "false"):
        out = tmp_path / compiled
        study = load_study(path, out, overrides=(f"run.compile={compiled}",), steps=3)
        before = counters["stats"]["unique_graphs"]
        run_study(
            study,
            study.plans,
            out,
            lambda config, display: Trainer(config, target, TokenStore.load(store), display=display),
            say=str,
        )
        rows[compiled] = [(row["variant"], row["loss"], row["acceptance"]) for row in collect(out)]
        graphs = counters["stats"]["unique_graphs"] - before
        # Seeds share three graphs; eight more sizes need one more each, and torch would stop at eight.
        assert (13 <= graphs < 18) if compiled == "true" else graphs == 0
    assert len({loss for _, loss, _ in rows["false"]}) == len(rows["false"])
    for one, other in zip(rows["true"], rows["false"], strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], rel=1e-5)


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command_study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_target(folder / "target")
    path = write_study(folder, write_store(folder / "store", VOCAB))
    return path, [f"target.path={folder / 'target'}"]


def call(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["study", *map(str, words)])
    assert ended.value.code in (0, None), capsys.readouterr().err
    return capsys.readouterr().out


def test_the_command_runs_a_study_and_reports(command_study, tmp_path, capsys):
    path, overrides = command_study
    assert call(capsys, path, "--out", tmp_path, "--list").splitlines()[1] == "data/1of4 data.share=0.25"
    found = json.loads(
        call(capsys, path, *overrides, "--out", tmp_path, "--only", "base,data", "--steps", 2, "--json")
    )
    assert [(row["variant"], row["step"]) for row in found["rows"]] == [("base", 2), ("data/1of4", 2)]
    text = call(capsys, path, "--out", tmp_path, "--report")
    assert text.startswith("| variant |")
    assert (tmp_path / "table.md").read_text() == text
    assert {figure.name for figure in tmp_path.glob("*.png")} == {
        "epochs.png",
        "flops.png",
        "acceptance.png",
        "overview.png",
    }
    for wrong in ("--part=3/2", "--part=x", "--only=none"):
        with pytest.raises(SystemExit, match="2"):
            main(["study", str(path), "--out", str(tmp_path), wrong])


@pytest.mark.slow
def test_a_killed_study_goes_on(command_study, tmp_path, capsys):
    path, overrides = command_study
    steps = ["--steps", "60", "--only", "base,data"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = [sys.executable, "-m", "eyas", "study", str(path), *overrides, *steps, "--out", str(cut)]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + 300
    # In the middle of the second variant: it has a checkpoint and is not finished.
    while not list((cut / "data/1of4/checkpoints").glob("step-*/state.json")):
        assert child.poll() is None, child.stderr.read().decode()
        assert time.monotonic() < limit
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert json.loads((cut / "data/1of4/variant.json").read_text())["state"] == "running"
    call(capsys, path, *overrides, *steps, "--out", cut)
    call(capsys, path, *overrides, *steps, "--out", whole)
    assert timeless(collect(cut)) == timeless(collect(whole))
    assert {row["state"] for row in collect(cut)} == {"finished"}
