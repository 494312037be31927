import gzip
import json

import pytest

from eyas.core.errors import DataError
from eyas.data.sources import read_conversations, read_prompts


def write(path, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_three_forms_of_a_prompt(tmp_path, name):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "dropped"},
        {"role": "user", "content": "B"},
    ]
    path = write(
        tmp_path / name,
        {"id": "1", "prompt": "Hi", "source": "x"},
        "",
        {"id": "2", "turns": ["A", "B"]},
        {"id": "3", "messages": messages},
    )
    one, two, three = read_prompts(path)
    assert (one.turns, one.source) == (("Hi",), "x")
    assert two.turns == ("A", "B")
    assert three.turns == ("A", "B")
    assert three.opening == messages[:2]
    assert len(read_prompts(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", ":2: not valid JSON"),
        ("[1]", ":2: expected an object"),
        ({"id": "2"}, ":2: needs"),
        ({"id": "2", "turns": []}, ":2: needs"),
        ({"id": "2", "messages": [{"role": "robot", "content": "x"}]}, ":2: a message"),
        ({"id": "1", "prompt": "again"}, ":2: the id '1' stands at line 1"),
    ],
)
def test_errors_name_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", {"id": "1", "prompt": "Hi"}, line)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(path) + message in str(error.value)


def test_missing_empty_and_truncated_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl"))
    whole = write(tmp_path / "p.jsonl.gz", *[{"id": str(i), "prompt": f"text {i}" * 50} for i in range(200)])
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"p\.jsonl\.gz: cannot be read after line"):
        read_prompts(whole)


def test_conversations_with_exact_ids(tmp_path):
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    write(
        tmp_path / "shard-00000.jsonl",
        {"id": "1", "messages": messages, "token_ids": [1, 2], "spans": [[1, 2]]},
    )
    write(tmp_path / "shard-00001.jsonl", {"id": "2", "messages": messages})
    one, two = read_conversations(tmp_path)
    assert (one.token_ids, one.spans) == ((1, 2), ((1, 2),))
    assert two.token_ids is None
    write(tmp_path / "shard-00001.jsonl", {"id": "2", "messages": messages, "spans": [[1, 2]]})
    with pytest.raises(DataError, match="belong together"):
        list(read_conversations(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [{"token_ids": ["x"]}, {"token_ids": 5}, {"spans": [1]}, {"spans": [[1, 2, 3]]}, {"spans": [["a", "b"]]}],
)
def test_exact_ids_that_are_none(tmp_path, wrong):
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    line = {"id": "1", "messages": messages, "token_ids": [1, 2], "spans": [[1, 2]]} | wrong
    with pytest.raises(DataError, match=r"p\.jsonl:1: token_ids must be a list of ids"):
        list(read_conversations(write(tmp_path / "p.jsonl", line)))


def test_half_of_a_surrogate_pair_is_no_text(tmp_path):
    with pytest.raises(DataError, match=r"p\.jsonl:1: needs"):
        read_prompts(write(tmp_path / "p.jsonl", r'{"prompt": "\ud83d"}'))
    messages = r'{"messages": [{"role": "user", "content": "\ud83d"}]}'
    with pytest.raises(DataError, match=r"p\.jsonl:1: a message needs"):
        read_prompts(write(tmp_path / "p.jsonl", messages))


def test_a_gzip_file_that_is_damaged_inside(tmp_path):
    path = write(tmp_path / "p.jsonl.gz", *[{"id": str(i), "prompt": f"text {i}" * 50} for i in range(200)])
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 3)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"p\.jsonl\.gz: cannot be read after line"):
        read_prompts(path)
