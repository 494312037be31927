"""README, docs and recipes say what is true of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def shell_lines(text: str) -> list[str]:
    """Command lines of fenced shell blocks, continuation lines joined."""
    blocks = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", text, flags=re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip().removeprefix("$ ") for line in joined.splitlines()]


def indented_lines(text: str) -> list[str]:
    """Lines of blocks that are set in by four blanks: how a figure was measured, on models of full size."""
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.startswith("    ")]


def commands() -> list[tuple[str, list[str]]]:
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in DOCUMENTS]
    return [
        (name, line.split("#")[0].split())
        for name, text in texts
        for line in (*shell_lines(text), *indented_lines(text))
        if line.startswith(("eyas ", "make "))
    ]


def test_the_readme_opens_with_the_two_commands():
    lines = shell_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "make demo" in lines
    assert "make test" in lines


def make_targets() -> set[str]:
    return set(
        re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )


def known_options(command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def test_every_command_in_the_documents_exists():
    from eyas.cli.main import VERBS, load_verb

    problems = []
    assert commands()
    for name, words in commands():
        if words[0] == "make":
            problems += [f"{name}: make {w}" for w in words[1:] if "=" not in w and w not in make_targets()]
            continue
        if words[1].startswith("-"):
            continue
        if words[1] not in VERBS:
            problems.append(f"{name}: eyas {words[1]}")
            continue
        command, rest = load_verb(words[1]), words[2:]
        subcommands = getattr(command, "commands", None)
        if subcommands:
            if not rest or rest[0] not in subcommands:
                problems.append(f"{name}: {' '.join(words)}: no such subcommand")
                continue
            command, rest = subcommands[rest[0]], rest[1:]
        options = [w.split("=")[0] for w in rest if re.match(r"--?[a-z]", w)]
        problems += [f"{name}: eyas {words[1]} {o}" for o in options if o not in known_options(command)]
    assert not problems


def leaf_commands():
    from eyas.cli.main import VERBS, load_verb

    for verb in VERBS:
        command = load_verb(verb)
        for name, sub in (getattr(command, "commands", None) or {"": command}).items():
            yield f"{verb} {name}".strip(), sub


def test_every_command_prints_json_and_explains_itself():
    # These print no result of their own: they write files and say where, or answer by HTTP.
    without = {"train", "serve"}
    for name, command in leaf_commands():
        assert command.help, f"eyas {name} has no help"
        if name not in without:
            assert "--json" in known_options(command), f"eyas {name} has no --json"
        assert "--install-completion" not in known_options(command)


def test_links_between_documents_lead_somewhere():
    broken = []
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        broken += [f"{path.relative_to(ROOT)}: {link}" for link in links if not (path.parent / link).exists()]
    assert not broken


def test_files_named_in_documents_exist():
    missing = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"`((?:src|tests|docs|recipes)/[\w./-]+\.\w+)`", text)
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).exists()]
    assert not missing


RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_recipe_is_valid(path):
    from eyas.config import load_config

    assert path.parent.name in RECIPE_TYPES, f"no config type is known for recipes/{path.parent.name}"
    load_config(RECIPE_TYPES[path.parent.name](), path)


def train_config():
    from eyas.training.config import TrainConfig

    return TrainConfig


def study_config():
    from eyas.training.study import StudyConfig

    return StudyConfig


RECIPE_TYPES = {"train": train_config, "studies": study_config}
