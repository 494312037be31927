"""Texts that say the same in nearly the same words, found exactly and without comparing all pairs.

A text is its words, case and punctuation aside: "What's up, Doc?" -> what s up doc. Its shingles are the
runs of three words in it (the whole text where it has fewer). Two texts are alike where the shingles that
both have are at least a share t of all that either has (Jaccard).

The index holds only a few shingles of each. With all shingles in one fixed order, texts A and B that are
alike have one in common among the first |A| - ceil(t |A|) + 1 of A and the same of B, because they share at
least t |A| and t |B| of them (prefix filtering, Chaudhuri et al. 2006). Long shingles come first, as they
are rare.
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
        self._places: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def find(self, words: tuple[str, ...]) -> int | None:
        """Number of a text that is alike, or None."""
        shingles = grams_of(words, SHINGLE)
        own, size = {hash(shingle) for shingle in shingles}, len(shingles)
        seen: set[int] = set()
        for key in self._prefix(shingles):
            for number in self._places.get(key, ()):
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
        shingles = grams_of(words, SHINGLE)
        for key in self._prefix(shingles):
            self._places.setdefault(key, []).append(len(self._sets))
        self._sets.append(array("q", (hash(shingle) for shingle in shingles)))

    def _prefix(self, shingles: set[str]) -> list[int]:
        # The small number keeps the bound where rounding puts t |A| just above a whole number.
        size = len(shingles) - math.ceil(self.share * len(shingles) - 1e-9) + 1
        return [hash(shingle) for shingle in sorted(shingles, key=lambda one: (-len(one), one))[:size]]


class Known:
    """The eight-word runs of texts that must not come again, such as a benchmark's prompts."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._grams = {hash(gram) for text in texts for gram in grams_of(words_of(text), GRAM)}

    def share(self, words: tuple[str, ...]) -> float:
        """Share of a text's runs that are known; fewer than eight words are known whole or not at all."""
        grams = grams_of(words, GRAM)
        return sum(hash(gram) in self._grams for gram in grams) / len(grams)
