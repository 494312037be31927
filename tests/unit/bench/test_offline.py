"""The comparison on a tiny target: a real engine, a real drafter, real verification."""

import json
from dataclasses import replace

import pytest
from fake_tokenizer import FakeTokenizer

from eyas.bench.conversations import batches, encode_chat, num_batches, token_pieces
from eyas.bench.document import SCHEMA, compare_document
from eyas.bench.offline import CompareOptions, compare, plan_methods
from eyas.bench.workload import Prompt
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from tiny import tiny_target

PROMPTS = [
    Prompt("p1", "d", "c", ("hello hello hello", "and then")),
    Prompt("p2", "d", "c", ("abc abc abc abc",)),
    Prompt("p3", "d", "c", ("one two one two", "three")),
]


@pytest.fixture(scope="module")
def target():
    return replace(tiny_target(eos_token_ids=()), tokenizer=FakeTokenizer())


@pytest.mark.parametrize(("batch", "temperature", "turns"), [(1, 0.0, 1), (2, 0.0, 2), (3, 0.8, 1)])
def test_lookup_against_plain(target, batch, temperature, turns):
    options = CompareOptions(max_tokens=20, batch=batch, temperature=temperature, rounds=2, turns=turns)
    methods = plan_methods([], ["prompt_lookup"], [2, 4])
    calls = []
    outcome = compare(target, methods, PROMPTS, options, advance=calls.append)
    assert [row.name for row in outcome.results] == ["plain", "prompt_lookup K=2", "prompt_lookup K=4"]
    assert len(calls) == num_batches(PROMPTS, batch, turns) * 3 * 2
    num_answers = 2 * (3 if turns == 1 else 5)
    for row in outcome.results:
        assert (row.identical, row.num_answers) == (True, num_answers)
        assert row.num_tokens == num_answers * 20
        assert len(row.acceptance_by_depth) == row.num_draft_tokens
        assert row.tokens_per_second > 0
        assert 1 <= row.acceptance_length <= row.num_draft_tokens + 1
        assert row.speedup_low <= row.speedup <= row.speedup_high
        assert row.acceptance_length == pytest.approx(1 + sum(row.acceptance_by_depth))
    assert outcome.results[0].acceptance_length == 1.0
    assert outcome.results[0].speedup == 1.0
    answer = outcome.answers["prompt_lookup K=4"]
    assert "".join(answer.pieces) == answer.text
    assert len(answer.pieces) == len(answer.origins) == len(answer.token_ids) == 20
    assert max(answer.origins) <= 4
    assert [row.spec for row in outcome.best] == ["prompt_lookup"]


def test_the_order_of_methods_rotates(target):
    calls = []
    compare(
        target,
        plan_methods([], ["prompt_lookup"], [1]),
        PROMPTS[:1],
        CompareOptions(max_tokens=2, rounds=2),
        advance=calls.append,
    )
    assert calls == ["plain", "prompt_lookup K=1", "prompt_lookup K=1", "plain"]


def test_a_time_limit_leaves_out_rounds_but_never_the_first(target):
    calls = []
    compare(
        target,
        plan_methods([], [], [1]),
        PROMPTS[:1],
        CompareOptions(max_tokens=2, rounds=5, time_limit=0.0),
        advance=calls.append,
    )
    assert calls == ["plain"]


def test_the_document_is_json_and_has_the_documented_fields(target):
    outcome = compare(
        target, plan_methods([], ["prompt_lookup"], [2]), PROMPTS[:2], CompareOptions(max_tokens=6, rounds=1)
    )
    document = json.loads(json.dumps(compare_document(outcome, {"target": "tiny"}, {"command": "c"})))
    assert document["schema"] == SCHEMA
    assert set(document) == {"schema", "setup", "methods", "best", "example", "samples", "provenance"}
    assert len(document["samples"]) == 4
    assert sum(s["tokens"] for s in document["samples"] if s["method"] == "plain") == 12
    described = documented_fields()
    names = {name for part in (document, document["methods"][1], document["samples"][0]) for name in part}
    assert names <= described, names - described


def documented_fields():
    import re
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs/benchmarks/compare-json.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", text))


def test_second_turns_follow_the_reply():
    seen = []
    for ids, token_ids, replies in batches(FakeTokenizer(), PROMPTS, 2, 2):
        seen.append((ids, [FakeTokenizer().decode(one) for one in token_ids]))
        replies.extend("r" + name[1] for name in ids)
    assert seen == [
        (("p1/1", "p2/1"), ["Uhello hello helloA", "Uabc abc abc abcA"]),
        (("p1/2",), ["Uhello hello helloAr1Uand thenA"]),
        (("p3/1",), ["Uone two one twoA"]),
        (("p3/2",), ["Uone two one twoAr3UthreeA"]),
    ]
    assert num_batches(PROMPTS, 2, 2) == 4
    assert num_batches(PROMPTS, 1, 1) == 3


def test_a_base_model_gets_the_text_as_it_is():
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_chat(tokenizer, [{"role": "user", "content": "abc"}])) == "abc"


def test_a_character_in_two_tokens_appears_with_the_second():
    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aäb".encode())
    assert token_pieces(Bytes(), ids) == ["a", "", "ä", "b"]


def test_names_of_methods():
    methods = plan_methods(["x/head", "y/head", "z/other"], ["small:m/tiny", "prompt_lookup"], [3, 3])
    assert [m.name for m in methods] == [
        "plain",
        "x/head K=3",
        "y/head K=3",
        "other K=3",
        "small:tiny K=3",
        "prompt_lookup K=3",
    ]
    for heads, ks in ((["a", "a"], [1]), (["a"], []), (["a"], [0])):
        with pytest.raises(ConfigError):
            plan_methods(heads, [], ks)


def test_a_target_without_tokenizer_is_refused(target):
    with pytest.raises(ConfigError, match="tokenizer"):
        compare(replace(target, tokenizer=None), plan_methods([], [], [1]), PROMPTS, CompareOptions())


def test_trees_are_rows_of_heads_only():
    tree = TreeBudget(3, 2, 6)
    methods = plan_methods(["heads/a"], ["prompt_lookup"], [2], [tree])

    assert [method.name for method in methods] == ["plain", "a K=2", "prompt_lookup K=2", "a tree 3x2x6"]
    assert methods[-1].tree == tree
