import json

import pytest

from eyas.cli.main import VERBS, main


def run(capsys, *args):
    status = 0
    try:
        main(list(args))
    except SystemExit as leave:
        status = leave.code or 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_version(capsys):
    import eyas

    assert run(capsys, "--version") == (0, eyas.__version__ + "\n", "")


def test_help_lists_every_verb(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for verb in VERBS:
        assert verb in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys, verb):
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0
    assert "Usage: eyas " + verb in out


def test_a_wrong_verb_gets_the_nearest(capsys):
    status, _, err = run(capsys, "comparee")
    assert status == 2
    assert "compare" in err


def test_a_users_mistake_is_one_line_and_status_2(capsys):
    status, out, err = run(capsys, "compare", "--target", "none", "--heads", "a", "a")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "twice" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "hi", "--target", "t", "-k", "0"), ["-k", "greater than or equal to 1"]),
        (("generate", "hi", "--target", "t", "-k", "abc"), ["-k", "integer"]),
        (("generate", "hi"), ["Missing", "--target"]),
        (("generate", "hi", "--nope"), ["--nope"]),
        (("compare", "--target", "t", "--turns", "0"), ["--turns"]),
        (("models", "get"), ["NAME"]),
        (("models", "fetch"), ["fetch"]),
    ],
)
def test_wrong_flags_are_one_line_that_says_where_to_read_on(capsys, args, words):
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "--help)" in err
    for word in words:
        assert word.lower() in err.lower()


def test_bad_k_names_the_flag(capsys):
    status, _, err = run(capsys, "compare", "--target", "none", "-k", "3,x")
    assert status == 2
    assert "-k" in err
    assert "'3,x'" in err


def test_doctor_prints_json(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["versions"]["torch"]
    assert facts["torch_threads"] >= 1


def test_doctor_prints_text(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "torch threads" in out


def test_doctor_is_a_group(capsys):
    status, out, _ = run(capsys, "doctor", "--help")
    assert status == 0
    assert "train" in out
    status, _, err = run(capsys, "doctor", "train", "no-such-recipe.yaml")
    assert status == 2
    assert "no-such-recipe.yaml: there is no such file" in err
