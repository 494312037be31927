import ast
import json
import random
import re

import pytest

from eyas.cli.main import main
from eyas.data.sources import Prompt, read_prompts
from eyas.data.vary import names, numbers, variations, vary

TASK = """Write a function to add two numbers. Your code should pass these tests:

assert add(1, 2) == 3
assert add(-1, 2.5) == 1.5
assert abs(add(0.1, 0.2) - 0.3) < 1e-9"""


def draws(way, text):
    return [way(text, random.Random(i)) for i in range(200)]


@pytest.mark.parametrize(
    ("text", "low", "high", "step"),
    [
        ("1,000", 600, 1800, 100),
        ("7", 2, 9, 1),
        ("70", 50, 120, 10),
        ("$12.50", 7.5, 22.5, 0.1),
    ],
)
def test_numbers_keep_size_and_roundness(text, low, high, step):
    made = {re.sub("[$,]", "", new) for new in draws(numbers, text)}
    values = sorted(map(float, made))
    assert (values[0], values[-1]) == (low, high)
    assert all(abs(v / step - round(v / step)) < 1e-6 for v in values)
    assert float(re.sub("[$,]", "", text)) not in values
    assert len({len(new.partition(".")[2]) for new in made}) == 1


def test_numbers_that_stay():
    text = (
        "1. Of 0 or 1/2 and 3 / 4, x2, 5th, 10:30, 007, 100%, May 5, 12 June 2020, 1,00,000, v1.2.3, [5, 6]\n"
        "2) `f 7` f(8) ```\n9 9\n``` $\\frac 3 4$ 12345678901234567\n    x = 3\nassert 4 == 4"
    )
    assert set(draws(numbers, text)) == {text}
    for new in draws(numbers, "Of 90% of 9 he, 9 years, has 8, 7, 6 or 999999999999989. 9"):
        percent, *small, large, last = map(int, re.findall(r"\d+", new))
        assert percent < 100
        assert small[0] == small[1] == last
        assert large != 999999999999989


def test_names():
    rest = "cat, Bob Lee, King James and Paris know `Lisa` when"
    for new in draws(names, f"Tom met Anna. Tom's {rest} Mike sleeps."):
        he, she, again, mike = re.fullmatch(rf"(\w+) met (\w+)\. (\w+)'s {rest} (\w+) sleeps\.", new).groups()
        assert he == again
        assert len({he, she, mike, "Tom", "Anna", "Mike"}) == 6


def test_a_stub_says_what_the_task_said():
    made = variations(Prompt("a", (TASK,)), ["numbers", "names", "stubs"], 8, 0)
    assert len(made) == 8
    for (text,), ways in made.items():
        code = text.split("\n\n", 1)[1]
        lines = ast.get_docstring(ast.parse(code).body[0]).split("\n")
        assert ways == ["stubs"]
        assert lines[:3] == ["Add two numbers.", ">>> add(1, 2)", "3"]
        assert lines[3:] in ([], [">>> add(-1, 2.5)", "1.5"])
        assert code.split("\n")[0] in ("def add(n, x):", "def add(n: int, x: float) -> float:")
    long = TASK.replace(" == 3", f" == 0x{'f' * 5000}")  # Python writes no such int
    for other in (
        TASK + "\nimport os",
        TASK + "\nassert sub(1, 2) == 3",
        TASK.replace(" == 3", " is 3("),
        long,
    ):
        assert not variations(Prompt("a", (other,)), ["stubs"], 1, 0)


def test_a_variation_follows_from_seed_and_id():
    prompts = [
        Prompt(str(i), (f"Anna has {i + 20} nuts.", "And Anna's dog?"), "S" if i else None) for i in range(5)
    ]
    records, counts = vary(prompts, copies=3)
    assert counts["changed"] == {"numbers": 15, "names": 15}
    assert vary(prompts[::-1], copies=3)[0][-3:] == records[:3]
    assert vary(prompts[:1], copies=2)[0] == records[:2] != vary(prompts[:1], copies=2, seed=1)[0]
    first, then = records[0]["turns"]
    assert then == f"And {first.split()[0]}'s dog?"
    assert [message["role"] for message in records[3]["messages"]] == ["system", "user", "user"]


def test_the_verb(tmp_path, capsys):
    def run(*args):
        with pytest.raises(SystemExit) as end:
            main(["data", "vary", str(tmp_path / "p.jsonl"), "--out", *map(str, args)])
        return end.value.code, *capsys.readouterr()

    texts = (
        "Tom has 12 of the very best nuts now.",
        "He has 12 of the very worst figs then.",
        "Hi",
        "Set 3.",
        "Set 3.",
    )
    lines = [json.dumps({"id": f"a{i}", "prompt": text}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "p.jsonl").write_text("".join(lines))
    (tmp_path / "x.jsonl").write_text(lines[1].replace("He", "She"))
    out = tmp_path / "new" / "q.jsonl.gz"
    status, text, err = run(out, "--exclude", tmp_path / "x.jsonl", "--copies", 9, "--json")
    assert (status, err) == (0, "")
    # "Set 2." to "Set 9." without 3, once each though two prompts have them.
    assert json.loads(text)["left_out"] == {"unchanged": 1, "duplicate": 7, "excluded": 1}
    assert [prompt.id for prompt in read_prompts(out)][:10:9] == ["a0~v1", "a3~v1"]
    for args, message in (
        ((out, "--how", "nubmers"), "--how 'nubmers': choose from numbers, names, stubs"),
        ((out, "--how", "stubs"), "--how stubs changed none of 5 prompts (5 unchanged)"),
        ((tmp_path,), "cannot be written"),
        ((tmp_path / "p.jsonl",), "is the file that is varied"),
    ):
        status, _, err = run(*args)
        assert status == 2
        assert message in " ".join(err.split())
    assert len(read_prompts(out)) == 16
