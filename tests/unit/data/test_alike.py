"""Near duplicates against all pairs, and shares of known runs against counting."""

import random

import pytest

from eyas.data.alike import AlikeIndex, Known, words_of


def runs(words, size):
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} or {tuple(words)}


def jaccard(a, b):
    one, two = runs(a, 3), runs(b, 3)
    return len(one & two) / len(one | two)


def texts(rng, num):
    """Texts of few words, many of them another one with a word changed, cut or added."""
    made = []
    for _ in range(num):
        if made and rng.random() < 0.5:
            words = list(rng.choice(made))
            for _ in range(rng.randrange(3)):
                place = rng.randrange(len(words) + 1)
                words[place : place + rng.randrange(2)] = [rng.choice("abcdefgh") * rng.randrange(1, 4)]
        else:
            words = [rng.choice("abcdefgh") for _ in range(rng.randrange(1, 25))]
        made.append(tuple(words[: rng.randrange(1, 30)]))
    return made


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_what_is_alike_is_found_and_nothing_else(share):
    index, kept = AlikeIndex(share), []
    counts = {True: 0, False: 0}
    for words in texts(random.Random(int(10 * share)), 600):
        alike = [number for number, other in enumerate(kept) if jaccard(words, other) >= share]
        found = index.find(words)
        assert (found in alike) if alike else (found is None)
        counts[bool(alike)] += 1
        # Those that are alike are kept too, now and then, so that there are several.
        if not alike or len(kept) % 3 == 0:
            index.add(words)
            kept.append(words)
    assert len(index) == len(kept)
    assert min(counts.values()) > 40


def test_words_leave_case_and_punctuation_out():
    assert words_of("What's up, Doc?") == ("what", "s", "up", "doc")
    assert words_of(" ?! ") == ("?!",)


def test_the_share_of_known_runs():
    rng = random.Random(0)
    bench = [" ".join(rng.choice("abc") for _ in range(rng.randrange(1, 30))) for _ in range(40)]
    known, all_runs = Known(bench), set().union(*(runs(text.split(), 8) for text in bench))
    shares = set()
    for _ in range(300):
        words = tuple(rng.choice("abc") for _ in range(rng.randrange(1, 14)))
        own = runs(words, 8)
        assert known.share(words) == len(own & all_runs) / len(own)
        shares.add(known.share(words))
    assert len(shares) > 3
    assert Known().share(("a",)) == 0.0
