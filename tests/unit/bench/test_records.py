import json

import pytest

from eyas.bench.records import append_record, check_record, provenance
from eyas.core.errors import ConfigError


def test_provenance_says_what_ran_and_nothing_about_whose_machine(tmp_path):
    record = provenance(["compare", "--target", str(tmp_path / "model.gguf"), "-k", "3,5"])
    assert record["command"] == "eyas compare --target model.gguf -k 3,5"
    assert record["versions"]["torch"]
    assert record["machine"]["num_cpus"] >= 1
    assert record["torch_threads"] >= 1
    assert str(tmp_path) not in json.dumps(record)


def test_records_are_appended_line_by_line(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    append_record(path, {"a": "ä\n"})
    append_record(path, {"b": 2})
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"a": "ä\n"},
        {"b": 2},
    ]


def test_a_place_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path):
    check_record(tmp_path / "new" / "record.jsonl")
    with pytest.raises(ConfigError, match="the record cannot be written there"):
        check_record(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/record\.jsonl: the record"):
        check_record(tmp_path / "file" / "record.jsonl")


def test_half_a_line_of_a_killed_run_goes(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    append_record(path, {"c": 2})
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'
    path.write_text('{"a": 1}')
    append_record(path, {"c": 2})
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'
