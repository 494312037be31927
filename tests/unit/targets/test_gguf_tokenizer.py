"""Tokenizers built from GGUF metadata, against naive merging loops and the rules' own words.

The pre-tokenizer decides what merging sees, so each kind is held on digits, spaces, line ends and accents.
"""

import heapq
import itertools

import pytest
import regex

from eyas.core.errors import ModelFormatError
from eyas.targets.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "12345 67",
    "  a\n\n\t b",
    "def f(x):\n    return x",
    "é ü 你好 🎉 e\u0301",
    "it's  they'LL 3.14, a1b22c333",
    " \n \n",
    "x" * 30 + "  " + "\r\n\r\n" + "½²",
    "",
]


class FakeFile:
    """What tokenizer_from_gguf reads of a GGUFFile."""

    path = "fake.gguf"

    def __init__(self, **metadata):
        self.metadata = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
        self.metadata["general.architecture"] = "llama"


def byte_letters():
    """GPT-2's letter for each byte: printable bytes stand for themselves, the others follow from U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    return letters


LETTERS = byte_letters()


def learn(texts, count):
    """Byte pairs learnt from texts, so that merges are plausible and plenty."""
    words = [[LETTERS[b] for b in word.encode()] for text in texts for word in regex.findall(GPT2, text)]
    merges = []
    while len(merges) < count:
        pairs = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        words = [merge(word, best) for word in words]
    return merges


def merge(word, pair):
    out, i = [], 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


MERGES = learn([*TEXTS, "return return 12 123 345 67 def the  cat\n\n", "12345 67 " * 3], 60)
TOKENS = ["<|end|>", "<tool>", *LETTERS.values(), *dict.fromkeys(a + b for a, b in MERGES)]
TYPES = [3, 4] + [1] * (len(TOKENS) - 2)


def byte_level(pre, **extra):
    file = FakeFile(
        ggml__model="gpt2",
        ggml__pre=pre,
        ggml__tokens=TOKENS,
        ggml__token_type=TYPES,
        ggml__merges=[f"{a} {b}" for a, b in MERGES],
        ggml__eos_token_id=0,
        ggml__bos_token_id=0,
        ggml__add_bos_token=False,
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}<|end|>",
    )
    file.metadata.update(extra)
    return tokenizer_from_gguf(file)


def naive_words(pre, text):
    """The rule of each pre-tokenizer, spelt out."""
    if pre == "gpt-2":
        return regex.findall(GPT2, text)
    if pre == "smollm":  # every digit alone, then GPT-2's rule on what is between
        parts = regex.findall(r"\p{N}|[^\p{N}]+", text)
        return [word for part in parts for word in regex.findall(GPT2, part)]
    digits = r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"
    return regex.findall(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        text,
    )


def naive_ids(pre, text):
    """Merge the lowest-ranked pair again and again, word by word."""
    import unicodedata

    ranks = {pair: rank for rank, pair in enumerate(MERGES)}
    ids = []
    for word in naive_words(pre, unicodedata.normalize("NFC", text) if pre == "qwen2" else text):
        pieces = [LETTERS[b] for b in word.encode()]
        if pre == "llama-bpe" and "".join(pieces) in TOKENS:
            pieces = ["".join(pieces)]
        while len(pieces) > 1:
            rank, pair = min((ranks.get(p, 10**9), p) for p in itertools.pairwise(pieces))
            if rank == 10**9:
                break
            pieces = merge(pieces, pair)
        ids += [TOKENS.index(piece) for piece in pieces]
    return ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_against_loops(pre, text):
    tokenizer = byte_level(pre)
    ids = tokenizer.encode(text)
    assert ids == naive_ids(pre, text)
    if pre != "qwen2":  # which composes accents first
        assert tokenizer.decode(ids) == text


def test_the_kinds_differ_on_digits():
    """Else the test above would not see a mixed-up table."""
    cuts = {
        pre: tuple(word for word, _ in pre_tokenizer.pre_tokenize_str("12345 67"))
        for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")
        if (pre_tokenizer := byte_level(pre).backend_tokenizer.pre_tokenizer)
    }
    assert cuts == {
        "gpt-2": ("12345", "Ġ67"),
        "smollm": ("1", "2", "3", "4", "5", "Ġ", "6", "7"),
        "qwen2": ("1", "2", "3", "4", "5", "Ġ", "6", "7"),
        "llama-bpe": ("123", "45", "Ġ", "67"),
    }


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_name_its_rule(pre):
    """All Qwen2 and Qwen3 models cut alike; Llama's architecture is shared by models that do not."""
    for architecture in ("qwen2", "qwen3"):
        tokenizer = byte_level(pre, **{"general.architecture": architecture})
        for text in TEXTS:
            assert tokenizer.encode(text) == naive_ids("qwen2", text)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.pre .*how texts are cut is not known"):
        byte_level(pre)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_special_tokens_in_text(pre):
    """Control tokens are one id and vanish when special tokens are skipped; user-defined ones stay."""
    tokenizer = byte_level(pre)
    ids = tokenizer.encode("<|end|>a<tool> b<|end|>")
    assert ids[0] == ids[-1] == 0
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "<|end|>a<tool> b<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool> b"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)


def test_chat_template_and_reload(tmp_path):
    """What is saved in the converted copy reads back the same."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level("smollm")
    tokenizer.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "12 a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "12 a<|end|>"
    assert again.apply_chat_template(messages, tokenize=False) == "12 a<|end|>"
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(("pre", "wanted"), [("gpt-2", False), ("llama-bpe", True)])
def test_bos(pre, wanted):
    """Llama 3 starts with BOS unless the file says otherwise; the others do not."""
    for said in (True, False, None):
        tokenizer = byte_level(pre, **{"tokenizer.ggml.add_bos_token": said})
        if said is None:
            continue
        assert (tokenizer.encode("a")[0] == 0) == said
    file_says_nothing = FakeFile(
        ggml__model="gpt2",
        ggml__pre=pre,
        ggml__tokens=TOKENS,
        ggml__token_type=TYPES,
        ggml__merges=[],
        ggml__bos_token_id=0,
    )
    assert (tokenizer_from_gguf(file_says_nothing).encode("a")[0] == 0) == wanted


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
PIECES += ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁▁"]
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -4.0, -3.0, -5.0, -6.0]


def naive_sentencepiece(text):
    """Join the neighbours whose piece has the highest score, leftmost first; unknown letters become bytes."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    letters = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(letters)) if a + b in scores
        ]
        if not joins:
            break
        heapq.heapify(joins)
        i = joins[0][1]
        letters[i : i + 2] = [letters[i] + letters[i + 1]]
    ids = []
    for letter in letters:
        ids += (
            [PIECES.index(letter)]
            if letter in scores
            else [PIECES.index(f"<0x{b:02X}>") for b in letter.encode()]
        )
    return ids


@pytest.mark.parametrize("text", ["abc ab", "a  b", "cab", "é a\nb", "bcabc abab", ""])
def test_sentencepiece_against_a_loop(text):
    file = FakeFile(
        ggml__model="llama",
        ggml__tokens=PIECES,
        ggml__scores=SCORES,
        ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * 10,
        ggml__bos_token_id=1,
        ggml__eos_token_id=2,
        ggml__unknown_token_id=0,
    )
    tokenizer = tokenizer_from_gguf(file)
    assert tokenizer.encode(text) == [1, *naive_sentencepiece(text)]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, r"pre 'martian' is not supported.* supported are .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "model 'bert' is not supported"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ModelFormatError, match=message) as caught:
        byte_level("smollm", **change)
    assert "fake.gguf" in str(caught.value)
