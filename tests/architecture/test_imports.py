"""Who may import whom: the table in docs/architecture.md, held against the code's imports."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/eyas"
PACKAGES = sorted(p.name for p in SRC.iterdir() if (p / "__init__.py").is_file())


def read_table() -> dict[str, set[str]]:
    """Package -> packages of ours that it may import, from the section "Import table"."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## Import table", 1)[1].split("\n## ", 1)[0].replace("\n", " ")
    table: dict[str, set[str]] = {}
    above: list[str] = []
    for entry in section.split("·"):
        left, arrow, right = entry.partition("→")
        if not arrow:
            continue
        names = re.findall(r"`(\w+)`", left)
        right = re.sub(r"\(.*?\)", "", right)
        allowed = set(re.findall(r"\b(\w+)\b", right.split("never")[0])) & set(PACKAGES)
        if "all above" in right:
            allowed = set(above)
        if "anything" in right:
            allowed = set(PACKAGES)
        for name in names:
            table[name] = allowed - {name}
        above.extend(names)
    return table


TABLE = read_table()


def imports_of(path: Path, *, type_only: bool = False) -> set[str]:
    """Packages of ours that a file imports, at any depth; without those under TYPE_CHECKING unless asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if not type_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                skipped.update(id(inner) for child in node.body for inner in ast.walk(child))
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in found]
    return {p[1] for p in parts if p[0] == "eyas" and len(p) > 1 and p[1] in PACKAGES}


def package_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0]


def test_the_table_speaks_of_every_package():
    assert set(TABLE) == set(PACKAGES)
    assert TABLE["core"] == set()
    assert "engine" not in TABLE["training"]
    assert "nn" in TABLE["training"]
    assert TABLE["engine"] >= {"verify", "drafters", "targets", "nn", "kernels", "core"}


@pytest.mark.parametrize("path", sorted(SRC.glob("*/**/*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_imports_upward(path):
    package = package_of(path)
    allowed = TABLE[package] | {package}
    if path.relative_to(SRC) == Path("bench/offline.py"):
        allowed |= {"engine", "targets"}
    if path.match("bench/step*.py") or path.match("bench/calibrate*.py"):
        allowed |= TABLE["engine"] | {"engine"}
    # What only a type checker sees counts too: a name in a signature is a dependency.
    extra = imports_of(path, type_only=True) - allowed
    assert not extra, f"{package} must not import {', '.join(sorted(extra))}"


def test_no_two_packages_import_each_other():
    edges = {(package_of(p), name) for p in SRC.glob("*/**/*.py") for name in imports_of(p)}
    both = {tuple(sorted(edge)) for edge in edges if edge[0] != edge[1] and (edge[1], edge[0]) in edges}
    assert not both


def runs_without(code: str, modules: tuple[str, ...]) -> None:
    check = (
        f"{code}\nimport sys\nfound = [m for m in {modules!r} if m in sys.modules]\nassert not found, found"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True, capture_output=True, text=True)


def test_import_eyas_is_light():
    runs_without(
        "import eyas\neyas.__version__\neyas.SamplingParams()", ("torch", "numpy", "transformers", "rich")
    )


def test_help_imports_no_verb_and_no_torch():
    code = (
        "from eyas.cli.main import main\n"
        "import contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['--help'])"
    )
    runs_without(code, ("torch", "transformers", "eyas.cli.compare", "eyas.cli.generate", "eyas.cli.models"))


def test_verb_modules_import_nothing_heavy_on_top():
    code = "from eyas.cli.main import VERBS, load_verb\nfor verb in VERBS: load_verb(verb)"
    runs_without(code, ("torch", "transformers", "numpy"))


@pytest.mark.parametrize("name", ["scheduler", "block_manager", "request"])
def test_the_scheduling_files_know_no_tensors(name):
    path = SRC / f"engine/{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not roots & {"torch", "numpy", "triton"}
    runs_without(f"import eyas.engine.{name}", ("torch", "numpy"))


def test_public_names_are_exactly_these():
    import eyas

    assert eyas.__all__ == ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]
    for name in eyas.__all__:
        assert getattr(eyas, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = eyas.nothing_of_this_name
