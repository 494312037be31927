import numpy as np
import pytest

from eyas.core.errors import ConfigError
from eyas.data.loops import LoopRule, loop_start, repeating, trim_document

SMALL = LoopRule(ngram=2, window=4, share=0.75, keep=2)
EXAMPLE = [1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3]


def naive_repeating(ids, ngram):
    """By the definition: nested loops over pairs of places."""
    marks = [False] * len(ids)
    for place in range(len(ids) - ngram + 1):
        for earlier in range(place):
            if all(ids[place + i] == ids[earlier + i] for i in range(ngram)):
                for i in range(ngram):
                    marks[place + i] = True
    return marks


def naive_loop_start(ids, rule):
    marks = naive_repeating(ids, rule.ngram)
    for begin in range(len(ids) - rule.window + 1):
        windows = [marks[at : at + rule.window] for at in range(begin, len(ids) - rule.window + 1)]
        if all(sum(window) / rule.window >= rule.share - 1e-12 for window in windows):
            return next(at for at in range(begin, len(ids)) if marks[at])
    return len(ids)


def answers(count, seed=0):
    """Random text, loops, loops that change on the way, and text that goes on behind a loop."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        alphabet = rng.integers(1, 30)
        head = rng.integers(0, alphabet, rng.integers(0, 12)).tolist()
        period = rng.integers(0, alphabet, rng.integers(1, 9)).tolist()
        body = period * rng.integers(0, 7)
        for place in range(len(body)):
            if rng.random() < 0.1:
                body[place] = int(rng.integers(0, alphabet))
        yield head + body + rng.integers(0, alphabet, rng.choice([0, 0, 1, 6])).tolist()


@pytest.mark.parametrize(
    "rule",
    [
        SMALL,
        LoopRule(ngram=1, window=1, share=1.0),
        LoopRule(ngram=3, window=6, share=0.9),
        LoopRule(ngram=5, window=8, share=0.5),
        LoopRule(ngram=6, window=10, share=0.9),
        LoopRule(ngram=8, window=5, share=1.0),
    ],
)
def test_marks_and_starts_are_those_of_nested_loops(rule):
    looping = 0
    for ids in answers(150, seed=rule.ngram):
        assert repeating(ids, rule.ngram).tolist() == naive_repeating(ids, rule.ngram)
        begin = loop_start(ids, rule)
        assert begin == naive_loop_start(ids, rule)
        looping += begin < len(ids)
    assert 10 < looping < 140  # the comparison saw both kinds


def test_the_worked_examples():
    assert repeating([1, 2, 3, 1, 2, 9], 2).tolist() == [False, False, False, True, True, False]
    assert repeating([7, 7, 7], 2).tolist() == [False, True, True]
    assert loop_start(EXAMPLE, SMALL) == 4
    ids = [0, 9, 8, *EXAMPLE]
    assert trim_document(ids, [(3, 15)], SMALL) == (9, [(3, 9)], [(0, 7)])
    ids += [0, 9, 8, 5, 6]
    assert trim_document(ids, [(3, 15), (18, 20)], SMALL) == (20, [(3, 9), (18, 20)], [(0, 7)])
    assert LoopRule().needed == 55


def test_text_behind_the_last_answer_goes_with_its_loop():
    assert trim_document([0, *EXAMPLE, 5, 6], [(1, 13)], SMALL) == (7, [(1, 7)], [(0, 5)])


def test_a_loop_no_longer_than_keep_stays_whole():
    rule = LoopRule(ngram=2, window=4, share=0.75, keep=8)
    assert trim_document([0, *EXAMPLE], [(1, 13)], rule) == (13, [(1, 13)], [(0, 5)])


@pytest.mark.parametrize("size", [0, 1, 5, 63])
def test_empty_and_short_answers_stay(size):
    assert loop_start([3] * size, LoopRule()) == size
    assert loop_start(np.empty(0, np.uint16), SMALL) == 0


def test_one_token_repeated_keeps_its_first():
    assert loop_start([3] * 65, LoopRule()) == 1
    for share in (1e-300, 0.5, 1.0):
        rule = LoopRule(share=share, keep=0)
        assert trim_document([0] + [3] * 200, [(1, 201)], rule) == (2, [(1, 2)], [(0, 2)])
    assert loop_start([65535] * 256, LoopRule(ngram=300)) == 256


def test_text_without_repeats_stays_at_any_share():
    assert loop_start(np.arange(200), LoopRule(share=1e-300)) == 200


def test_a_list_that_counts_is_a_loop_and_a_quote_is_not():
    rng = np.random.default_rng(0)
    sentence = rng.integers(100, 1000, 20).tolist()
    counted = [token for number in range(10) for token in [number, *sentence]]
    assert loop_start(counted, LoopRule()) == 22
    fresh = rng.integers(100, 10_000, 80).tolist()
    assert loop_start([*fresh, *fresh, *rng.integers(100, 10_000, 30).tolist()], LoopRule()) == 190


def test_ids_of_the_store_and_of_lists_give_the_same():
    for kind in (np.uint16, np.uint32, np.int64):
        assert loop_start(np.asarray(EXAMPLE, kind), SMALL) == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ngram": 0}, "ngram 0"),
        ({"window": 0}, "window 0"),
        ({"keep": -1}, "keep -1"),
        ({"share": 0.0}, "share 0"),
        ({"share": 1.5}, "share 1.5"),
        ({"share": float("nan")}, "share nan"),
    ],
)
def test_rules_that_cannot_be_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        LoopRule(**values)
