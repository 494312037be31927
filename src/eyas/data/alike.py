"""Texts that say the same in nearly the same words, found exactly and without comparing all pairs.

A text is its words, case and punctuation aside: "What's up, Doc?" -> what s up doc. Its shingles are the
runs of three words in it (the whole text where it has fewer). Two texts are alike where the shingles that
both have are at least a share t of all that either has (Jaccard).

A text B that has n shingles is alike only to texts that have at least t n of them; so each of those has one
of any n - ceil(t n) + 1 shingles of B (prefix filtering, Chaudhuri et al. 2006), and only the texts that have
one of B's rarest are compared with it.
"""

import math
import re
from array import array
from collections.abc import Iterable

_WORD = re.compile(r"\w+")
SHINGLE, GRAM = 3, 8


def words_of(text: str) -> tuple[str, ...]:
    """Words without case and punctuation; a text that has none is its own only word."""
    return tuple(_WORD.findall(text.casefold())) or (text.strip(),)


def grams_of(words: tuple[str, ...], size: int) -> set[str]:
    """Runs of `size` words; ("a", "b", "c") in twos -> {"a b", "b c"}, in fours -> {"a b c"}."""
    return {" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}


class AlikeIndex:
    """Texts seen so far; `share` is t, in (0, 1]."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._sets: list[array[int]] = []
        # Shingle -> the first text that has it, and the others: most shingles have no others.
        self._first: dict[int, int] = {}
        self._others: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def find(self, words: tuple[str, ...]) -> int | None:
        """Number of a text that is alike, the first one found, or None."""
        own = _shingles(words)
        size = len(own)
        # The small number keeps the bound where rounding puts t n just above a whole number.
        enough = size - math.ceil(self.share * size - 1e-9) + 1
        seen: set[int] = set()
        for key in sorted(own, key=self._count)[:enough]:
            for number in self._texts(key):
                other = self._sets[number]
                if number in seen or not self.share * size <= len(other) <= size / self.share:
                    continue
                seen.add(number)
                common = sum(item in own for item in other)
                if common >= self.share * (size + len(other) - common):
                    return number
        return None

    def add(self, words: tuple[str, ...]) -> None:
        """Take a text in; its number is how many there were."""
        own, number = _shingles(words), len(self._sets)
        for key in own:
            if self._first.setdefault(key, number) != number:
                self._others.setdefault(key, []).append(number)
        self._sets.append(array("q", own))

    def _count(self, key: int) -> int:
        return len(self._others.get(key, ())) + (key in self._first)

    def _texts(self, key: int) -> list[int]:
        return [self._first[key], *self._others.get(key, ())] if key in self._first else []


def _shingles(words: tuple[str, ...]) -> set[int]:
    # Two runs of words with one number would take 2^32 texts to be likely.
    return {hash(gram) for gram in grams_of(words, SHINGLE)}


class Known:
    """The eight-word runs of texts that must not come again, such as a benchmark's prompts."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._grams = {hash(gram) for text in texts for gram in grams_of(words_of(text), GRAM)}

    def share(self, words: tuple[str, ...]) -> float:
        """Share of a text's runs that are known; fewer than eight words are known whole or not at all."""
        grams = grams_of(words, GRAM)
        return sum(hash(gram) in self._grams for gram in grams) / len(grams)
