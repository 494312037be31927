import random

import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.drafters.prompt_lookup.propose import PromptLookupDrafter, lookup


def by_hand(text, num_draft_tokens, max_ngram):
    """Try the longest suffix first, the latest earlier occurrence first; copy token by token."""
    for g in range(min(max_ngram, len(text) - 1), 0, -1):
        suffix = text[len(text) - g :]
        for end in range(len(text) - 2, g - 2, -1):
            if text[end - g + 1 : end + 1] == suffix:
                copy = list(text)
                for source in range(end + 1, end + 1 + num_draft_tokens):
                    copy.append(copy[source])
                return copy[len(text) :]
    return [-1] * num_draft_tokens


def test_examples():
    def guess(text, k):
        history = torch.tensor([[*text, 99, 99]])
        return lookup(history, torch.tensor([len(text) - 1]), k)[0].tolist()

    assert guess([5, 6, 7, 5], 2) == [6, 7]
    assert guess([1, 2, 3, 4, 1, 2], 4) == [3, 4, 1, 2]
    assert guess([1, 2, 2], 4) == [2, 2, 2, 2]
    assert guess([1, 2, 3], 3) == [-1, -1, -1]
    assert guess([1], 2) == [-1, -1]
    # Three matching tokens beat a more recent single one; the most recent of equals wins.
    assert guess([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1) == [7]
    assert guess([3, 7, 3, 8, 3], 1) == [8]


@pytest.mark.parametrize("max_ngram", [1, 2, 3])
def test_equals_a_loop_over_random_texts(max_ngram):
    rng = random.Random(0)
    for _ in range(40):
        texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 24))] for _ in range(4)]
        history = torch.randint(0, 3, (4, 30))  # what follows the newest token is junk
        for row, text in zip(history, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        k = rng.randrange(1, 9)
        newest = torch.tensor([len(text) - 1 for text in texts])

        got = lookup(history, newest, k, max_ngram).tolist()

        assert got == [by_hand(text, k, max_ngram) for text in texts]


def test_limits_are_named():
    with pytest.raises(ConfigError, match="num_draft_tokens=0"):
        PromptLookupDrafter(0)
    with pytest.raises(ConfigError, match="max_ngram=0"):
        PromptLookupDrafter(2, max_ngram=0)
