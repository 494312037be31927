"""Text while tokens come, and stop strings: a run is cut exactly where token-by-token decoding stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.stops import Detokenizer, TextTracker, find_stop
from fakes import PieceTokenizer

TOKENIZER = PieceTokenizer()
EMOJI, ACCENT = [2, 3, 4, 5], [6, 7]
TOKENS = st.lists(st.integers(2, 63), max_size=40)


def decode(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def split(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut a list into runs of these sizes, repeated."""
    runs, place, turn = [], 0, 0
    while place < len(token_ids):
        size = sizes[turn % len(sizes)]
        runs.append(token_ids[place : place + size])
        place, turn = place + size, turn + 1
    return runs


def test_a_character_waits_for_its_last_byte():
    detokenizer = Detokenizer(decode)
    texts = []
    for token in [*ids("a"), *EMOJI, *ids("b")]:
        detokenizer.push([token])
        texts.append(detokenizer.text)

    assert texts == ["a", "a", "a", "a", "a\N{GRINNING FACE}", "a\N{GRINNING FACE}b"]


def test_a_run_that_ends_inside_a_character_shows_what_is_complete():
    detokenizer = Detokenizer(decode)
    detokenizer.push([*ids("ab"), *EMOJI[:2]])
    assert detokenizer.text == "ab"
    detokenizer.push([*EMOJI[2:], *ids("c")])
    assert detokenizer.text == "ab\N{GRINNING FACE}c"


def test_an_output_that_ends_inside_a_character():
    detokenizer = Detokenizer(decode)
    detokenizer.push([*ids("a"), *ACCENT[:1]])

    assert detokenizer.text == "a"
    assert detokenizer.finish() == "a\N{REPLACEMENT CHARACTER}"


def test_broken_bytes_show_when_text_goes_on_or_ends():
    detokenizer = Detokenizer(decode)
    for _ in range(20):
        detokenizer.push([3])
    assert detokenizer.text == ""
    detokenizer.push(ids("a"))
    assert detokenizer.text == decode([3] * 20) + "a"


def test_a_long_run_with_a_cut_character_at_its_end():
    detokenizer = Detokenizer(decode)
    detokenizer.push([*ids("abcdefghijklmnop"), *EMOJI[:3]])
    assert detokenizer.text == "abcdefghijklmnop"
    detokenizer.push(EMOJI[3:])
    assert detokenizer.text == "abcdefghijklmnop\N{GRINNING FACE}"


@given(TOKENS, st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_text_is_always_a_prefix_of_the_whole_and_ends_as_it(token_ids, sizes):
    detokenizer = Detokenizer(decode)
    whole = decode(token_ids)
    for run in split(token_ids, sizes):
        before = detokenizer.text
        detokenizer.push(run)
        assert detokenizer.text.startswith(before)
        assert whole.startswith(detokenizer.text)

    assert detokenizer.finish() == whole


@pytest.mark.parametrize(
    ("text", "checked", "stops", "found"),
    [
        ("a END b", 0, ("END",), (2, "END")),
        ("a END b", 0, ("b", "END"), (2, "END")),
        ("abcd", 0, ("cd", "bcd"), (1, "bcd")),
        ("abcd", 0, ("bc", "abcd"), (1, "bc")),
        ("abcd", 2, ("bcd",), (1, "bcd")),
        ("abab", 2, ("ab",), (2, "ab")),
        ("abc", 3, ("ab",), None),
        ("", 0, ("a",), None),
    ],
)
def test_the_first_stop_to_end_wins(text, checked, stops, found):
    assert find_stop(text, checked, stops) == found


def test_a_stop_string_in_the_middle_of_a_run():
    tracker = TextTracker(decode, ["cde"])
    assert tracker.push(ids("ab")) is None

    hit = tracker.push(ids("xcdeyz"))

    assert (hit.stop, hit.text, hit.num_tokens) == ("cde", "abx", 3)


def test_a_stop_string_over_several_runs_takes_earlier_tokens_back():
    tracker = TextTracker(decode, ["cde"])
    for token in ids("abcd"):
        assert tracker.push([token]) is None
    hit = tracker.push(ids("e"))

    assert (hit.text, hit.num_tokens) == ("ab", 2)


def test_a_stop_string_may_begin_inside_a_token():
    bc, d = 8 + 26 + 1, ids("d")[0]  # "cd" and "d"
    assert decode([bc]) == "cd"
    hit = TextTracker(decode, ["dd"]).push([*ids("a"), bc, d])

    assert (hit.text, hit.num_tokens) == ("ac", 2)


def test_the_stop_string_may_be_kept():
    hit = TextTracker(decode, ["cde"], include_stop=True).push(ids("abcdexyz"))

    assert (hit.text, hit.num_tokens) == ("abcde", 5)


def test_stops_do_not_count_among_the_first_min_tokens():
    tracker = TextTracker(decode, ["b"], min_tokens=3)

    assert tracker.push(ids("ab")) is None
    hit = tracker.push(ids("xybz"))
    assert (hit.text, hit.num_tokens) == ("abxy", 4)


def test_what_may_become_a_stop_string_is_not_shown():
    tracker = TextTracker(decode, ["cde", "yz"])
    shown = []
    for token in ids("abcdxcy"):
        tracker.push([token])
        shown.append(tracker.visible())

    assert shown == ["a", "ab", "ab", "ab", "abcdx", "abcdx", "abcdxc"]


STOPS = st.lists(
    st.one_of(
        st.text("abcdef ", min_size=1, max_size=3),
        st.just("\N{GRINNING FACE}"),
        st.just("a\N{GRINNING FACE}"),
    ),
    min_size=1,
    max_size=3,
)


@given(
    token_ids=st.lists(st.sampled_from([2, 3, 4, 5, 8, 9, 10, 11, 34, 35, 46, 47]), max_size=40),
    stops=STOPS,
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_runs_are_cut_where_single_tokens_would_stop(token_ids, stops, sizes, include, min_tokens):
    one = TextTracker(decode, stops, include_stop=include, min_tokens=min_tokens)
    run = TextTracker(decode, stops, include_stop=include, min_tokens=min_tokens)
    for token in token_ids:
        if one.push([token]) is not None:
            break
    shown = ""
    for tokens in split(token_ids, sizes):
        if run.push(tokens) is not None:
            break
        assert run.visible().startswith(shown), "text was taken back"
        shown = run.visible()

    assert one.hit == run.hit
    if run.hit is not None:
        kept = token_ids[: run.hit.num_tokens]
        assert run.hit.text.startswith(shown)
        assert decode(kept).startswith(run.hit.text)
        assert run.hit.num_tokens == 0 or len(complete_text(kept[:-1])) < len(run.hit.text)
        assert run.hit.num_decoded >= run.hit.num_tokens


def complete_text(token_ids: list[int]) -> str:
    """Complete characters of some tokens."""
    detokenizer = Detokenizer(decode)
    for token in token_ids:
        detokenizer.push([token])
    return detokenizer.text
