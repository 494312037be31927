from dataclasses import replace

import pytest

from eyas.bench.cells import Load, Method, Settings, plan_cells
from eyas.bench.datasets import Dataset
from eyas.core.errors import ConfigError

SETTINGS = Settings(target="t", target_fingerprint="f", machine="m", dtype="float32")
A, B = Method("a"), Method("b", "heads/b", 3, "print")
LOADS = [Load(concurrency=1), Load(concurrency=2)]


def order(cells):
    return " ".join(f"{cell.method.name}{cell.load.concurrency}" for cell in cells)


def test_methods_take_turns():
    cells = plan_cells([A, B], [Dataset("d", ())], LOADS, 2, SETTINGS)
    assert order(cells) == "a1 b1 b2 a2 b1 a1 a2 b2"
    apart = plan_cells([A, B], [Dataset("d", ())], LOADS, 2, SETTINGS, one_engine_at_a_time=True)
    assert order(apart) == "a1 a2 b1 b2 b1 b2 a1 a2"
    assert {cell.id for cell in cells} == {cell.id for cell in apart}
    assert len({cell.id for cell in cells}) == 8


def test_the_id_holds_what_the_numbers_depend_on():
    cell = plan_cells([B], [Dataset("d", ())], LOADS[:1], 1, SETTINGS)[0]
    moved = replace(cell, method=replace(B, spec="elsewhere/b"))
    assert moved.id == cell.id
    for other in (
        replace(cell, method=replace(B, fingerprint="other")),
        replace(cell, method=replace(B, num_draft_tokens=5)),
        replace(cell, dataset="e"),
        replace(cell, repeat=1),
        replace(cell, load=Load(rate=1.0)),
        replace(cell, settings=replace(SETTINGS, machine="other")),
        replace(cell, settings=replace(SETTINGS, max_tokens=7)),
    ):
        assert other.id != cell.id
    lookups = [replace(cell, method=Method(n, n, 3)) for n in ("prompt_lookup", "small:x")]
    assert lookups[0].id != lookups[1].id


def test_requests_grow_with_concurrency():
    cells = plan_cells([A], [Dataset("d", ())], [Load(1), Load(64), Load(rate=2.0)], 1, SETTINGS)
    assert [cell.num_requests for cell in cells] == [16, 256, 16]


def test_a_method_named_twice():
    with pytest.raises(ConfigError, match="b K=3"):
        plan_cells([B, B], [Dataset("d", ())], LOADS, 1, SETTINGS)
