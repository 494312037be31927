"""Every command in README and docs is run, in the order of its page, on tiny models in a folder of its own.

A page's words stay as they are: the paths that it speaks of (path/to/model, prompts.jsonl, ...) are tiny ones
here, names of known models are replaced by the tiny target, and options that only make a command shorter are
added at its end. What is not ours to run is listed with the reason.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from eyas.cli.main import main
from gguf_files import write_gguf
from model_files import random_state
from tiny import tiny_config
from tiny_files import write_head, write_prompts, write_target

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "heads").rglob("*.md")])

FOREIGN = {
    "pip": "installs packages",
    "make": "checked by tests/architecture/test_documents.py; `make test` is what runs this",
    "curl": "tests/unit/server sends the same requests",
    "vllm": "`make test-vllm` runs it",
    "torchrun": "tests/unit/training runs two processes of it",
}
SHORTER = {
    "generate": "--max-tokens 4",
    "compare": "-k 2 --num-prompts 1 --max-tokens 4 --rounds 1",
    "verify": "-k 2 --batches 1 --num-prompts 1 --max-tokens 4 --samples 40",
    "data prompts": "--count 1 --min-tokens 1 --max-tokens 4 --max-draws 1500 --max-num-seqs 64 "
    "--temperatures 1.5:1",
    "data regenerate": "--max-new-tokens 8",
    "train": "data.seq_len=64 head.draft_vocab_size=48 head.num_layers=1 run.batch_rows=1 run.max_steps=1 "
    "run.epochs=null run.compile=false run.validate_every=0 run.validate_rows=1 run.checkpoint_every=0 "
    "data.held_out=0.2",
    "study": "data.seq_len=64 head.draft_vocab_size=48",
    "bench sweep": "--concurrency 1,2 --num-requests 2 --waves 1 --max-tokens 4 --repeats 1 --num-prompts 2",
    "bench step": "--target shape:tiny -k 2 --batch 1 --acceptance 2 --steps 2 --repeats 1 --context 32",
    "calibrate": "-k 1,2 --batch 1 --tree= --max-tokens 4 --num-prompts 1 --context 16 --repeats 1",
}
KNOWN_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")


def commands(page: Path) -> list[str]:
    """Lines of the page's shell blocks, continuations joined."""
    blocks = re.findall(
        r"```(?:sh|bash|shell|console)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line for raw in joined.splitlines() if (line := raw.split(" #")[0].strip().removeprefix("$ "))]


WITH_COMMANDS = [page for page in PAGES if any(line.startswith("eyas ") for line in commands(page))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    for kind in ("eagle3", "peagle"):
        write_head(folder / kind, target, kind)
    config = tiny_config()
    write_gguf(folder / "model.gguf", config, random_state(config))
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch):
    """The folder that a page's commands are run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "path/to").mkdir(parents=True)
    for name, source in (
        ("path/to/model", "target"),
        ("path/to/smaller/model", "target"),
        ("path/to/head", "eagle3"),
        ("heads/mine", "eagle3"),
        ("heads/smollm2-135m-eagle3", "eagle3"),
        ("heads/smollm2-135m-peagle", "peagle"),
    ):
        shutil.copytree(models / source, tmp_path / name)
    shutil.copy(models / "model.gguf", tmp_path / "path/to/model.gguf")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_prompts(tmp_path / "prompts.jsonl", 6)
    # Others: what is near a held-out prompt is not varied.
    write_prompts(tmp_path / "held-out.jsonl", 6, "add")
    return tmp_path


def run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as leave:
        main(words)
    return leave.value.code or 0


def words_of(line: str) -> list[str]:
    """The words to run in place of a documented line."""
    words = ["path/to/model" if word in KNOWN_MODELS else word for word in shlex.split(line)[1:]]
    verb = " ".join(words[:2]) if " ".join(words[:2]) in SHORTER else words[0]
    extra = shlex.split(SHORTER.get(verb, ""))
    if verb == "train":
        # The recipe's own paths, where the page does not say others.
        given = {word.partition("=")[0] for word in words}
        own = {"target.path": "path/to/model", "data.store": "answers/store", "run.out": "heads/trained"}
        extra += [f"{name}={value}" for name, value in own.items() if name not in given]
        # A tiny head has no room for the rank of a real one's correction.
        extra += ["head.markov_rank=8"] if "markov" in words[1] else []
        prepare_training(words)
    if verb == "serve" and "vllm" in words:
        extra.append("--print-command")
    return [*words, *extra]


def prepare_training(words: list[str]) -> None:
    """What `eyas train` finds on a user's disk: answers, and no earlier run in its folder."""
    out = next((word.partition("=")[2] for word in words if word.startswith("run.out=")), "heads/trained")
    shutil.rmtree(out, ignore_errors=True)
    if not Path("answers/store").is_dir():
        regenerate = "eyas data regenerate prompts.jsonl --target path/to/model --out answers"
        assert run(words_of(regenerate)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page(page, place, monkeypatch, capsys):
    served = []

    def serve(llms, settings, *, on_ready):
        """Instead of the loop: the app is built around the engines, as the server does, and answers."""
        from fastapi.testclient import TestClient

        from eyas.server.app import build_app

        with TestClient(build_app(llms, settings)) as client:
            assert client.get("/health").status_code == 200
        on_ready(f"http://{settings.host}:{settings.port}")
        served.append(settings)
        return True

    monkeypatch.setattr("eyas.server.run.serve", serve)
    for line in commands(page):
        program = line.split()[0]
        if program in FOREIGN:
            continue
        assert program == "eyas", f"{page.name}: {line}: neither ours nor listed as foreign"
        if "--engine http" in line or "--endpoint" in line:
            continue  # needs a server: tests/unit/bench/test_sweep.py, tests/unit/data/test_regenerate.py
        words = words_of(line)
        status = run(words)
        assert status == 0, f"{page.name}: {shlex.join(words)}: status {status}\n{capsys.readouterr().err}"


def test_pages_are_read():
    assert ROOT / "README.md" in WITH_COMMANDS
    assert ROOT / "docs/quickstart.md" in WITH_COMMANDS
    assert (
        'eyas generate --target path/to/model --drafter path/to/head -k 5 "Why is the sky blue?"'
        in commands(ROOT / "README.md")
    )
