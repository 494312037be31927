"""The tree under test."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tracked(root) -> list[Path]:
    """Files that belong to the project: git's list, or the tree where there is no git."""
    import subprocess

    done = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and done.stdout:
        return [root / name for name in done.stdout.split("\0") if name and (root / name).is_file()]
    hidden = {".git", ".venv", "__pycache__", "runs"}
    return [p for p in root.rglob("*") if p.is_file() and not hidden & set(p.relative_to(root).parts)]
