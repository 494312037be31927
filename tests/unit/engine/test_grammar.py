"""Answers match their grammar, whatever was drafted, and are those of decoding without drafts."""

import json
import re

import pytest
import torch

pytest.importorskip("xgrammar")

from eyas import LLM
from eyas.core.errors import RequestError
from eyas.core.grammar import MAX_CHARS, Grammar
from eyas.core.sampling import SamplingParams
from eyas.engine.grammar import Grammars, masks
from fakes import make_drafter
from json_tokenizer import EOS, VOCAB_SIZE, json_tokenizer
from tiny import tiny_target
from tree_fakes import tree_head

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["abc", "ab", "null"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"(abc|ab|bc){3,9}(12)*x"),
    "choice": Grammar.choice(["abc", 'a"b\\', "\N{GRINNING FACE}!"]),
    "ebnf": Grammar("ebnf", 'root ::= "ab" tail\ntail ::= "c" | "bc" tail | "1" tail'),
}
PROMPTS = ["abc", '{"a": 12', "x"]


def valid(name, text):
    """Whether a whole answer matches, without the library that made it match."""
    if name == "schema":
        value = json.loads(text)
        return (
            set(value) <= {"a", "b", "c"}
            and type(value["a"]) is int
            and 0 <= value["a"] <= 999
            and value["b"] in SCHEMA["properties"]["b"]["enum"]
            and all(type(one) is bool for one in value.get("c", []))
        )
    pattern = {
        "regex": r"(abc|ab|bc){3,9}(12)*x",
        "choice": r'abc|a"b\\|\U0001F600!',
        "ebnf": r"ab(bc|1)*c",
    }[name]
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def target():
    made = tiny_target(vocab_size=VOCAB_SIZE)
    made.tokenizer = json_tokenizer()
    return made


def asked(name, *, temperature=0.0, **more):
    return SamplingParams(temperature=temperature, seed=5, max_tokens=60, grammar=GRAMMARS.get(name), **more)


TEMPERATURES = (0.0, 1.0)


def answers_of(llm, name, *more):
    """(ids, finish reason, text) of every prompt at both temperatures, all in one batch."""
    prompts = [(prompt, asked(name, temperature=t)) for t in TEMPERATURES for prompt in PROMPTS] + list(more)
    outputs = llm.generate([prompt for prompt, _ in prompts], [params for _, params in prompts])
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason, one.outputs[0].text) for one in outputs]


@pytest.fixture(scope="module")
def plain(target):
    llm = LLM(target, max_num_seqs=8)
    return {name: answers_of(llm, name) for name in GRAMMARS}


@pytest.mark.parametrize("name", GRAMMARS)
def test_answers_match(plain, name):
    ended = [text for _, reason, text in plain[name] if reason == "stop"]
    assert len(ended) > 1
    assert all(valid(name, text) for text in ended), ended


FREE = ("abc", SamplingParams(temperature=0.0, max_tokens=30))


@pytest.mark.parametrize("kind", ["self", "eagle3", "oracle", "tree"])
def test_drafts_change_nothing(target, plain, kind):
    (alone,) = LLM(target, max_num_seqs=1).generate([FREE[0]], FREE[1])
    accepted = 0
    for name, want in plain.items():
        prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS] * 2
        known = [ids + out for ids, (out, _, _) in zip(prompts, want, strict=True)]
        if kind == "tree":
            drafter = tree_head(target, "oracle", "4x3x10", known)
        else:
            drafter = make_drafter(kind, target, 5, known)
        llm = LLM(target, drafter, max_num_seqs=8)
        *got, neighbour = answers_of(llm, name, FREE)
        assert got == want
        assert neighbour[0] == alone.outputs[0].token_ids, "a neighbour without a grammar is as before"
        accepted += llm.stats.accepted
    assert accepted > 10 or kind == "eagle3", "runs cross the joints of the grammar"


def test_with_overlap_and_preemption_it_is_the_same(target, plain):
    llm = LLM(
        target,
        make_drafter("self", target, 3, []),
        max_num_seqs=4,
        overlap=True,
        page_size=8,
        num_pages=33,
        max_model_len=256,
    )
    free = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    prompts = ["abc" * 3, *PROMPTS, "12" * 8]
    outputs = llm.generate(prompts, [free, *[asked("schema")] * 3, free])
    got = [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs[1:4]]
    assert got == [(ids, reason) for ids, reason, _ in plain["schema"][:3]]
    alone = LLM(target, max_num_seqs=1).generate(prompts[:1], free)
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_sampled_drafts_match_too(target):
    from fakes import random_head

    llm = LLM(target, random_head(target, "eagle3", 4, sample=True), max_num_seqs=4)
    for output in llm.generate(["abc"] * 8, asked("regex", temperature=1.0)):
        assert output.outputs[0].finish_reason == "stop"
        assert valid("regex", output.outputs[0].text)


def test_logprobs_are_those_of_the_target_before_the_grammar(target):
    (output,) = LLM(target).generate(["abc"], asked("schema", logprobs=1))
    assert all(entries[0].logprob <= entries[1].logprob for entries in output.outputs[0].logprobs)
    assert any(entries[0].rank > 1 for entries in output.outputs[0].logprobs)


def naive_mask(grammars, grammar, token_ids):
    """What may come after some tokens: by trying every one."""
    allowed = []
    for token in range(VOCAB_SIZE):
        matching = grammars.start(grammar)
        allowed.append(all(matching._matcher.accept_token(one) for one in [*token_ids, token]))
    return torch.tensor(allowed)


@pytest.mark.parametrize("parents", [[0, 1, 2], [0, 0, 2]])
def test_masks_row_by_row(target, parents):
    grammars = Grammars(json_tokenizer(), VOCAB_SIZE, [EOS])
    grammar = GRAMMARS["regex"]
    ids = json_tokenizer().convert_tokens_to_ids

    class Held:
        def __init__(self, grammar):
            self.grammar, self.output_ids = grammar, [ids("ab"), ids("abc")]

    bound, free = Held(grammars.start(grammar)), Held(None)
    drafts = torch.tensor([[ids("bc"), ids("abc"), ids("x")]] * 2)
    tree = None if parents == [0, 1, 2] else torch.tensor([parents] * 2)
    for _ in range(2):  # the matcher was taken back to where it was
        got = masks([free, bound], drafts, tree, VOCAB_SIZE)
        assert got.shape == (2, 4, VOCAB_SIZE)
        assert got[0].all()
        for row in range(4):
            path, above = [], row
            while above:
                path.insert(0, int(drafts[1, above - 1]))
                above = parents[above - 1]
            want = naive_mask(grammars, grammar, bound.output_ids + path)
            reachable = not path or naive_mask(grammars, grammar, bound.output_ids + path[:-1])[path[-1]]
            if reachable:
                assert torch.equal(got[1, row], want), row
            else:
                assert got[1, row].all()
        assert bound.grammar.error is None


def test_a_grammar_that_fails_ends_its_request_alone(target, plain, monkeypatch):
    llm = LLM(target, make_drafter("self", target, 3, []), max_num_seqs=4)
    intake = llm.new_intake()
    groups = intake.groups(PROMPTS, asked("schema"))
    fill, calls = groups[1].requests[0].grammar._fill, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("[12:00:00] /some/where.cc:12: no such rule")
        fill(*args)

    groups[1].requests[0].grammar._fill = failing
    for number, group in enumerate(groups):
        group.request_id = f"own-{number}"
        llm.submit(group)
    while llm.step():
        pass
    good, bad, other = (group.requests[0] for group in groups)
    assert (bad.finish_reason, "the grammar failed: no such rule" in bad.error) == ("error", True)
    assert [good.output_ids, other.output_ids] == [plain["schema"][i][0] for i in (0, 2)]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a", "structured_outputs"), "structured_outputs: .*parenthesis"),
        (Grammar("json_schema", '{"type": "objct"}'), "grammar: .*type must be of string"),
        (Grammar("json_schema", "{"), "grammar: the schema is not JSON"),
        (Grammar("ebnf", "root ::= nobody"), 'grammar: .*"nobody" is not defined'),
    ],
)
def test_wrong_grammars_are_refused(target, grammar, message):
    with pytest.raises(RequestError, match=f"^{message}"):
        LLM(target).generate(["a"], SamplingParams(grammar=grammar))


def test_what_cannot_go_with_a_grammar():
    with pytest.raises(RequestError, match=r"^ignore_eos"):
        SamplingParams(grammar=GRAMMARS["regex"], ignore_eos=True)
    with pytest.raises(RequestError, match=r"^min_tokens"):
        SamplingParams(grammar=GRAMMARS["regex"], min_tokens=1)
    with pytest.raises(RequestError, match=r"^grammar="):
        SamplingParams(grammar="abc")
    with pytest.raises(RequestError, match=r"^x: it has more"):
        Grammar("regex", "a" * (MAX_CHARS + 1), "x")


def test_what_is_missing_is_said(target, monkeypatch):
    import sys

    bare = tiny_target()
    with pytest.raises(RequestError, match="needs a tokenizer"):
        LLM(bare).generate([[1, 2]], SamplingParams(grammar=GRAMMARS["regex"]))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"xgrammar is not installed.*eyas\[serve\]"):
        LLM(target).generate(["a"], SamplingParams(grammar=GRAMMARS["regex"]))
