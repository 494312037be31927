import json

import pytest

from eyas.bench.datasets import read_dataset
from eyas.bench.workload import read_prompts
from eyas.core.errors import DataError


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "mt.jsonl", {"id": "a", "dataset": "mt", "turns": ["one", "two"]})
    # Spec-Bench's layout.
    write(
        tmp_path / "spec_bench/question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["w1", "w2"]},
        *({"question_id": 200 + i, "category": "translation", "turns": [f"t{i}"]} for i in range(4)),
    )
    # SPEED-Bench's layout, as its prepare.py writes it.
    write(
        tmp_path / "speed_bench/qualitative.jsonl",
        {
            "question_id": "q1",
            "category": "coding",
            "messages": [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}],
        },
    )
    return tmp_path


def test_names_paths_and_categories(folder):
    assert read_dataset("mt", folder).prompts[0].turns == ("one", "two")
    spec = read_dataset("spec_bench", folder)
    assert (spec.name, len(spec.prompts)) == ("spec_bench", 5)
    assert spec.prompts[0].id == "81"
    part = read_dataset("spec_bench:translation", folder, 2)
    assert (part.name, [p.turns[0] for p in part.prompts]) == ("spec_bench:translation", ["t0", "t2"])
    speed = read_dataset("speed_bench/qualitative:coding", folder)
    assert speed.prompts[0].turns == ("first", "second")
    assert speed.name == "speed_bench/qualitative:coding"
    by_path = read_dataset(str(folder / "spec_bench/question.jsonl"))
    assert by_path.name == "spec_bench"
    assert len(read_dataset("builtin").prompts) == 12


def test_what_is_not_there_is_named(folder):
    with pytest.raises(DataError, match=r"nothere\.jsonl.*is a file"):
        read_dataset("nothere", folder)
    with pytest.raises(DataError, match="--data-dir"):
        read_dataset("nothere")
    with pytest.raises(DataError, match="there are translation, writing"):
        read_dataset("spec_bench:maths", folder)


def test_messages_with_a_history(tmp_path):
    path = write(
        tmp_path / "chats.jsonl",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "A"},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": [{"type": "text", "text": "C"}, {"type": "text", "text": "c"}]},
                {"role": "user", "content": "D"},
            ]
        },
    )
    prompt = read_prompts(path)[0]
    assert prompt.turns == ("Cc", "D")
    assert [m["role"] for m in prompt.opening()] == ["system", "user", "assistant"]
    assert prompt.opening()[2]["content"] == "B"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": "hi"}, "list of objects"),
        ({"messages": []}, "end with the user"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "end with the user"),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}, "roles"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "list of texts"),
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}, "prepare"),
        ({"text": "x"}, "'messages'"),
    ],
)
def test_rows_that_are_no_prompts(tmp_path, row, said):
    path = write(tmp_path / "bad.jsonl", row)
    with pytest.raises(DataError, match=said):
        read_prompts(path)
