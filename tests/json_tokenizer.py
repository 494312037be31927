"""A byte-level tokenizer that can write JSON, with a few tokens of several characters."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 0
PIECES = (
    '{"',
    '":',
    '",',
    '"}',
    '", "',
    "true",
    "false",
    "ab",
    "abc",
    "bc",
    " 1",
    "12",
    "}}",
    '"a":',
    "null",
)
"""Tokens that cross the joints of JSON and of words."""
VOCAB_SIZE = 320
"""More than there are tokens: a padded vocabulary."""


@cache
def json_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS, **{letter: 1 + i for i, letter in enumerate(alphabet)}}
    merges = []
    for piece in PIECES:
        shown = piece.replace(" ", "\u0120")
        left = shown[0]
        for letter in shown[1:]:
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return fast
