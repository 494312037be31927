import gzip
import json

import pytest

from eyas.bench.workload import Prompt, read_prompts
from eyas.core.errors import DataError


def test_builtin_prompts_cover_three_kinds():
    prompts = read_prompts("builtin")
    assert len(prompts) == 12
    assert {p.category for p in prompts} == {"chat", "code", "maths"}
    assert len({p.id for p in prompts}) == 12
    assert {p.category for p in read_prompts("builtin", 3)} != {"chat"}


def test_reads_schema_short_form_and_gzip(tmp_path):
    rows = [
        {"id": "a-1", "dataset": "a", "category": "c", "turns": ["x\u2028y", "z"], "reference": ["r", ""]},
        {"prompt": "only text"},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [
        Prompt("a-1", "a", "c", ("x\u2028y", "z"), ("r", "")),
        Prompt("2", "mine", "", ("only text",)),
    ]
    assert read_prompts(tmp_path / "mine.jsonl") == expected
    assert read_prompts(tmp_path / "mine.jsonl.gz") == expected


def test_a_subset_is_spread_over_the_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "turns": ["t"]}) for i in range(12)))
    assert [p.id for p in read_prompts(path, 4)] == ["0", "3", "6", "9"]
    assert [p.id for p in read_prompts(path, 5)] == ["0", "2", "4", "7", "9"]
    assert len(read_prompts(path, 99)) == 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"turns": ["a"]}\n{oops', ["p.jsonl, line 2", "JSON"]),
        ('{"id": 1}', ["line 1", "turns", "prompt"]),
        ('{"turns": "a"}', ["line 1", "turns", "list of texts"]),
        ('{"turns": []}', ["line 1", "turns"]),
        ('{"turns": [" "]}', ["line 1", "turns"]),
        (r'{"turns": ["\ud83d"]}', ["line 1", "turns"]),
        ("[" * 100_000, ["line 1", "JSON"]),
        ('["a"]', ["line 1", "object", "list"]),
        ("\n\n", ["p.jsonl", "no prompts"]),
    ],
)
def test_refusals_name_file_and_line(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_and_bad_count(tmp_path):
    with pytest.raises(DataError, match="builtin"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="num_prompts=0"):
        read_prompts("builtin", 0)
