"""`eyas calibrate` on a tiny target and a head that is right about some of its tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fake_tokenizer import FakeTokenizer

from eyas.bench.calibrate import CalibrateOptions, calibrate, write_calibration
from eyas.bench.calibrate_choose import Shape
from eyas.bench.step_models import open_drafter
from eyas.core.errors import ConfigError, ModelFormatError
from eyas.core.sampling import SamplingParams
from eyas.drafters.artifact import load_head, save_head
from eyas.drafters.shapes import random_head
from eyas.engine.llm import LLM
from tiny import tiny_target

OPTIONS = CalibrateOptions(
    batch_sizes=(1, 2), ks=(1, 3), trees=("2x2x4",), context=16, repeats=2, max_tokens=12, decode_batch=2
)
PROMPTS = [[5, 9, 11, 3], [7, 8], [20, 21, 22]]


@pytest.fixture(scope="module")
def target():
    target = tiny_target()
    target.tokenizer = FakeTokenizer()
    return target


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    made = random_head("shape:eagle3", target.config, target.decoder.embed_tokens.weight, seed=1)
    # The target's own output matrix on a stream that is mostly its features: right now and then.
    with torch.no_grad():
        made.model.lm_head.weight.copy_(target.decoder.lm_head_weight)
        made.model.fc.weight.copy_(torch.eye(32).repeat(1, 3))
    folder = tmp_path_factory.mktemp("made")
    save_head(folder, made.model, made.vocab_map, meta={"recipe": {"lr": 1}}, identity=target.identity)
    return folder


@pytest.fixture
def head(made, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "head"))


@pytest.fixture(scope="module")
def calibrated(target, made):
    seen = []
    source = open_drafter(str(made), target)
    return calibrate(target, source, PROMPTS, OPTIONS, advance=lambda *step: seen.append(step)), seen


@pytest.fixture(scope="module")
def found(calibrated):
    return calibrated[0]


def test_calibration(calibrated):
    found, seen = calibrated
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert seen[-1][0] == seen[-1][1]
    assert len(found.acceptance_by_depth) == 3
    assert 0 < found.acceptance_by_depth[0] <= 1
    assert sorted(found.acceptance_by_depth, reverse=True) == found.acceptance_by_depth
    tree = Shape(4, "2x2x4")
    for batch in (1, 2):
        timings, rates = found.timings[batch], found.rates[batch]
        assert set(timings) == {Shape(0), Shape(1), Shape(3), tree}
        assert set(rates) == {Shape(0), Shape(1), Shape(2), Shape(3), tree}
        assert all(timing.step_ms > 0 < timing.verify_ms for timing in timings.values())
        length = 1 + sum(found.acceptance_by_depth)
        assert rates[Shape(3)] == pytest.approx(1e3 * batch * length / timings[Shape(3)].step_ms)
        one = found.chain_lengths[1]
        assert rates[Shape(1)] == pytest.approx(1e3 * batch * one / timings[Shape(1)].step_ms)
        assert rates[tree] == pytest.approx(1e3 * batch * found.tree_lengths[tree] / timings[tree].step_ms)
    values = found.as_dict()
    assert [entry["max_batch"] for entry in values["by_batch"]] == [1, 2]
    for entry in values["by_batch"]:
        assert entry["speedup"] == pytest.approx(
            entry["tokens_per_second"] / found.plain[entry["max_batch"]], abs=0.01
        )
    assert list(values["verify_ms"]["1"]) == ["1", "2", "4", "5"]
    assert list(values["chain_acceptance_length"]) == ["1", "3"]
    assert found.chain_lengths[3] == pytest.approx(1 + sum(found.acceptance_by_depth))


@pytest.mark.parametrize("k", [1, 3])
def test_acceptance_is_that_of_real_decoding(target, head, found, k):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    llm = LLM(target, str(head), num_draft_tokens=k, max_num_seqs=2)
    plain = LLM(target, max_num_seqs=2)
    outputs = plain.generate_ids(PROMPTS, params)
    llm.generate_ids(PROMPTS, params)
    stats = llm.stats
    # Each request's first step has no drafts and commits one token.
    with_drafts = stats.row_steps - len(PROMPTS)
    committed = sum(map(len, outputs)) - len(PROMPTS)
    assert found.chain_lengths[k] == pytest.approx(committed / with_drafts)


def test_writing_keeps_what_the_head_says(target, head, found):
    before = json.loads((head / "eyas.json").read_text())
    write_calibration(head, found)
    after = json.loads((head / "eyas.json").read_text())
    assert after.pop("calibration") == json.loads(json.dumps(found.as_dict()))
    assert after == before
    assert [path.name for path in head.iterdir() if path.name.startswith(".")] == []
    load_head(head, target.config, target.decoder.embed_tokens.weight)
    write_calibration(head, found)
    assert json.loads((head / "eyas.json").read_text())["recipe"] == {"lr": 1}


def test_the_engine_reads_what_was_written(target, head, found):
    write_calibration(head, found)
    llm = LLM(target, str(head), max_num_seqs=1)
    best = found.choices[0]
    assert llm.num_draft_tokens == best.k


def test_heads_of_others_have_no_eyas_json(head, found):
    (head / "eyas.json").unlink()
    write_calibration(head, found)
    assert list(json.loads((head / "eyas.json").read_text())) == ["calibration"]


def test_a_damaged_eyas_json_is_named_and_kept(head, found):
    (head / "eyas.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"eyas\.json"):
        write_calibration(head, found)
    assert (head / "eyas.json").read_text() == "{"


@pytest.mark.parametrize("changes", [{"ks": ()}, {"ks": (0, 1)}, {"batch_sizes": (0,)}])
def test_options_that_cannot_be(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CalibrateOptions(**changes)


def test_without_prompts_nothing_is_accepted(target, head):
    with pytest.raises(ConfigError, match="prompts"):
        calibrate(target, open_drafter(str(head), target), [], OPTIONS)


WORDS = ["--target", "t", "--batch", "1", "-k", "1,2", "--tree", "2x2x4", "--max-tokens", "8"]
WORDS += ["--context", "16", "--repeats", "1", "--num-prompts", "2", "--device", "cpu"]


@pytest.fixture
def command(target, monkeypatch):
    from eyas.bench import step_models
    from eyas.cli.main import main

    monkeypatch.setattr(step_models, "load_target", lambda *_, **__: target)

    def run(*words):
        with pytest.raises(SystemExit) as leave:
            main(["calibrate", *WORDS, *words])
        return leave.value.code

    return run


def test_command_writes_and_shows(command, head, capsys):
    assert command("--head", str(head)) == 0
    out = capsys.readouterr().out
    assert "best chain" in out
    assert "2x2x4" in out
    assert json.loads((head / "eyas.json").read_text())["calibration"]["by_batch"][0]["max_batch"] == 1


def test_command_prints_json_and_need_not_write(command, head, capsys):
    before = (head / "eyas.json").read_text()
    assert command("--head", str(head), "--no-write", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verify_ms"]["1"]["1"] > 0
    assert (head / "eyas.json").read_text() == before


def test_mistakes_are_one_line(command, head, capsys, tmp_path):
    assert command("--head", str(tmp_path / "none")) == 2
    assert "config.json" in capsys.readouterr().err
    assert command("--head", str(head), "--tree", "nine") == 2
    assert "DEPTHxTOP_KxNODES" in capsys.readouterr().err


def test_more_drafts_than_drafters_make():
    with pytest.raises(ConfigError, match="1 to 512"):
        CalibrateOptions(ks=(1, 9999))
