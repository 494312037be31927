"""Programmatic dependent launch: what each choice means, and that no kernel goes on without waiting."""

import ast
from pathlib import Path

import pytest
import torch

import eyas.kernels
from eyas.kernels.settings import PDL, settings, use_pdl

pytest.importorskip("triton")
from eyas.kernels.triton import linear, pdl
from eyas.kernels.triton.linear_tiling import Tiling, tiling

SOURCES = sorted((Path(eyas.kernels.__file__).parent / "triton").glob("*.py"))


def kernels_that_start_early():
    """Kernels with a PDL argument, as (name, function)."""
    return [
        (node.name, node)
        for path in SOURCES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("kernel")
        and "PDL" in [argument.arg for argument in node.args.args]
    ]


def called(statement):
    return [getattr(node.func, "id", getattr(node.func, "attr", "")) for node in ast.walk(statement)
            if isinstance(node, ast.Call)]  # fmt: skip


def test_the_kernels_are_found():
    names = [name for name, _ in kernels_that_start_early()]
    assert len(names) >= 9
    assert {"linear_kernel", "short_kernel", "attention_kernel", "_rms_norm_kernel"} < set(names)


@pytest.mark.parametrize(("name", "kernel"), kernels_that_start_early())
def test_every_program_waits_before_it_may_end_or_write(name, kernel):
    """The wait is a statement of the body itself, under no condition.

    Only a program without rows that count may end before it: `_counted` has waited by then.
    """
    waits = [
        place
        for place, statement in enumerate(kernel.body)
        if isinstance(statement, ast.Expr) and {"wait", "_begin"} & set(called(statement))
    ]
    assert len(waits) == 1, name
    counted = False
    for statement in kernel.body[: waits[0]]:
        counted |= "_counted" in called(statement)
        if (
            counted
            and isinstance(statement, ast.If)
            and ast.unparse(statement.test) == "live_ptr is not None"
        ):
            continue
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement))
        assert not {"store", "atomic_add", "_cache_rows"} & set(called(statement))


def test_only_launches_with_the_attribute_wait():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert path.name == "pdl.py" or "launch_pdl" not in text
        assert path.name == "pdl.py" or "gdc_" not in text


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(pdl, "able", lambda: True)


@pytest.mark.usefixtures("able")
def test_choices():
    small, large = {"small": True}, {"small": False}
    seen = {}
    for choice in PDL:
        with use_pdl(choice):
            seen[choice] = (pdl.options(**small), pdl.options(**large), pdl.asks())
            assert pdl.options(**small, own=False) == {"PDL": 0}
    late, early = {"PDL": 1, "launch_pdl": True}, {"PDL": 2, "launch_pdl": True}
    assert seen == {
        "off": ({"PDL": 0}, {"PDL": 0}, False),
        "late": (late, late, False),
        "early": (early, early, True),
        "auto": (early, late, True),
    }
    assert settings.pdl == "late"
    assert pdl.options(**large) == late
    with pytest.raises(ValueError, match="off, late, early, auto"), use_pdl("soon"):
        pass


@pytest.mark.parametrize(
    ("cuda", "capability", "interpreted", "able"),
    [
        ("13.0", (9, 0), "0", True),
        ("12.8", (10, 0), "0", True),
        ("12.8", (8, 9), "0", False),
        ("12.8", (9, 0), "1", False),
        # Another maker's numbers mean another thing.
        (None, (9, 4), "0", False),
    ],
)
def test_only_devices_that_can(cuda, capability, interpreted, able, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(pdl, "_can", pdl._can.__wrapped__)
    for choice in PDL:
        with use_pdl(choice):
            assert ("launch_pdl" in pdl.options(small=True)) == (able and choice != "off")
            assert pdl.asks() == (able and choice in ("early", "auto"))


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("choice", "out", "size", "rows", "gated", "lines"),
    [
        ("late", 4096, 4096, 8, False, 0),
        ("early", 4096, 4096, 8, False, 16),
        # 4 tiles of 128 are loaded before the first product: 8 lines of 64.
        ("auto", 4096, 4096, 8, False, 8),
        ("auto", 14336, 4096, 32, True, 2),
        # 3 tiles of 64: 2 lines, a power of two.
        ("auto", 14336, 4096, 64, True, 2),
        # Past the first wave the kernel before has ended.
        ("auto", 128256, 4096, 8, False, 0),
        # The copy engine needs no prefetch.
        ("auto", 14336, 4096, 8, True, 0),
        ("early", 6144, 4096, 512, False, 0),
        # All of a short row.
        ("auto", 960, 576, 128, False, 16),
    ],
)
def test_what_a_waiting_product_asks_for(choice, out, size, rows, gated, lines):
    tiles: Tiling = tiling(out, size, rows, gated=gated, head=out > 99999)
    x = torch.empty(rows, size, dtype=torch.bfloat16)
    weight = torch.empty(8, size, dtype=torch.bfloat16)
    programs = (
        -(-out // tiles.block_out) * -(-rows // tiles.block_rows) * (tiles.splits if tiles.parallel else 1)
    )
    with use_pdl(choice):
        assert linear._lines(tiles, x, weight, programs) == lines


def test_splits_begin_at_the_same_place_for_any_number_of_rows():
    for size in (2048, 2176, 4096, 4224, 14336):
        lengths = set()
        for rows in (1, 8, 64, 65, 129, 512, 4096):
            tiles = tiling(4096, size, rows)
            assert tiles.splits == 2
            lengths.add(tiles.length(size))
            assert tiles.length(size) % tiles.block_k == 0
            assert size <= 2 * tiles.length(size) < size + 256
        assert len(lengths) == 1, size
