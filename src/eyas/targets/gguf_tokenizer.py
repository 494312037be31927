"""The tokenizer that a GGUF file describes, built with the `tokenizers` library.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of storing it. It must be the original's:
SmolLM cuts every digit apart, Llama 3 cuts groups of three, GPT-2 keeps numbers whole, and a model reads
another split as other text. An unknown name, or none, is an error, not a guess.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eyas.core.errors import ModelFormatError
from eyas.targets.weights.gguf_file import GGUFFile

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one tokenizer cuts text before merging; `pattern` None is GPT-2's own expression."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """Take a word that is in the vocabulary as it is, without replaying its merges."""
    add_bos: bool = False


_GPT2 = PreTokenizer()
_QWEN2 = PreTokenizer(pattern=rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_LLAMA3 = PreTokenizer(pattern=rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, add_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(single_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}

UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""Architectures all of whose models share one rule, so that old files may leave its name out."""

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Save the tokenizer of `file` in `folder`, as transformers reads it."""
    tokenizer_from_gguf(file).save_pretrained(str(folder))


def tokenizer_from_gguf(file: GGUFFile) -> Any:
    """PreTrainedTokenizerFast with vocabulary, merges, special tokens and chat template of `file`.

    ModelFormatError where they are missing, damaged or of a kind that is not supported.
    """
    try:
        return _build(file)
    except ModelFormatError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged values raise errors of any kind in the libraries
        first = next(iter(str(error).strip().splitlines()), "")
        raise ModelFormatError(
            f"{file.path}: the tokenizer's metadata (tokenizer.*) is damaged "
            f"({type(error).__name__}: {first}); download it again"
        ) from None


def _build(file: GGUFFile) -> Any:
    data = file.metadata
    tokens = _required(file, "tokenizer.ggml.tokens")
    kind = _required(file, "tokenizer.ggml.model")
    if kind == "gpt2":
        core, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        core, add_bos = _sentencepiece(file, tokens)
    else:
        raise ModelFormatError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are"
        )
    types = data.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for text, token_type in zip(tokens, types, strict=True):
        if token_type in {_CONTROL, _USER_DEFINED}:
            special = token_type == _CONTROL
            added = [AddedToken(text, special=special, normalized=False)]
            (core.add_special_tokens if special else core.add_tokens)(added)
    named = {
        f"{role}_token": tokens[index]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := data.get(f"tokenizer.ggml.{key}_token_id")) is not None and index < len(tokens)
    }
    if data.get("tokenizer.ggml.add_bos_token", add_bos) and "bos_token" in named:
        bos = named["bos_token"]
        core.post_processor = _with_bos(bos, data["tokenizer.ggml.bos_token_id"], core.post_processor)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, model_max_length=_context(file), **named
    )
    if (template := data.get("tokenizer.chat_template")) is not None:
        tokenizer.chat_template = template
    return tokenizer


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE of the GPT-2 kind, and whether it starts texts with BOS by default."""
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None or name == "default":
        name = UNNAMED.get(str(file.metadata.get("general.architecture")), name)
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        said = "is missing" if name is None else f"{name!r} is not supported"
        raise ModelFormatError(
            f"{file.path}: tokenizer.ggml.pre {said}, so how texts are cut is not known; supported are "
            f"{', '.join(PRE_TOKENIZERS)}. Load the original Hugging Face folder instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _required(file, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return core, rule.add_bos


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE (Llama 1 and 2, Mistral 7B): merges follow from the pieces' scores."""
    scores = _required(file, "tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    found = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (piece[:cut], piece[cut:])))
    merges = [pair for *_, pair in sorted(found)]
    unknown = tokens[file.metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    core = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    return core, True


def _with_bos(bos: str, bos_id: int, before: Any) -> Any:
    """Post-processor that puts BOS before every text."""
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
    return template if before is None else processors.Sequence([before, template])


def _required(file: GGUFFile, key: str) -> Any:
    if (value := file.metadata.get(key)) is None:
        raise ModelFormatError(f"{file.path}: metadata {key} is missing, so the tokenizer cannot be built")
    return value


def _context(file: GGUFFile) -> int:
    """The model's context length, which transformers warns about when a text is longer."""
    return int(file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length", 1 << 30))
