"""What every file of the project keeps to."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/eyas"
MODULES = sorted(SRC.rglob("*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_module_is_short_and_says_what_it_is(path):
    assert lines_of(path) <= 600
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "py.typed":
        assert ast.get_docstring(tree), "a module opens with what it is"


def test_most_modules_are_under_150_lines():
    sizes = {str(p.relative_to(SRC)): lines_of(p) for p in MODULES if p.name != "__init__.py"}
    long = {name: size for name, size in sizes.items() if size >= 150}
    assert len(long) <= 0.4 * len(sizes), (
        f"{len(long)} of {len(sizes)} modules have 150 lines or more: {long}"
    )


def names_in(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_is_ever_unpickled(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not names_in(tree) & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert keywords.get("weights_only") == "True", f"line {node.lineno}: {ast.unparse(node)}"


def test_the_licence_is_here_and_named():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# Spelt in pieces, so that this file does not match itself.
FOREIGN = re.compile(
    r"/(?:w" + r"ork|f" + r"arm|r" + r"oot|home/\w+)/|\.\./s" + r"hared|\bissues? \d|pypi\.(?:org|io)|pytho"
    r"nhosted|index-u" + r"rl|find-li" + r"nks",
)
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".jsonl", ".cfg", ".sh", ""}


def test_no_machine_paths_registries_or_tickets_in_tracked_files(root, tracked):
    found = []
    for path in tracked:
        if path.suffix not in TEXT:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for number, line in enumerate(text.split("\n"), start=1):
            hit = FOREIGN.search(line)
            if hit:
                found.append(f"{path.relative_to(root)}:{number}: {hit.group()}")
    assert not found, "\n".join(found)


def test_no_large_files(root, tracked):
    sizes = {str(p.relative_to(root)): p.stat().st_size for p in tracked}
    assert not {name: size for name, size in sizes.items() if size > 38 * 2**20}
    assert sum(size for name, size in sizes.items() if name.startswith("heads/")) <= 38 * 2**20


def test_every_source_package_is_packaged():
    folders = {p.parent for p in MODULES}
    assert not [str(f.relative_to(SRC)) for f in folders if not (f / "__init__.py").is_file()]


def test_test_files_have_names_of_their_own(root, tracked):
    names = [p.name for p in tracked if p.name.startswith("test_") and p.suffix == ".py"]
    assert sorted(set(names)) == sorted(names), "pytest imports test files by their name alone"
