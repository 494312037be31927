import json

from eyas.bench.records import append_record, provenance


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
