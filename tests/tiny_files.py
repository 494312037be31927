"""Tiny models on disk that every command can run: a target with tokenizer and template, heads, prompts."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.core.vocab_map import VocabMap
from eyas.drafters.artifact import make_model, save_head
from eyas.drafters.head_config import HeadConfig
from eyas.targets.load import load_target
from model_files import random_state, write_folder
from tiny import tiny_config

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>")
VOCAB = len(SPECIALS) + 256


def write_target(folder: Path, **overrides) -> Path:
    """A random target of byte tokens with a ChatML template; any field of its config can be overridden."""
    config = tiny_config(
        **({"vocab_size": VOCAB, "max_position_embeddings": 2048, "eos_token_ids": (2,)} | overrides)
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, config, random_state(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<mask>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def write_head(folder: Path, target_folder: Path, kind: str = "eagle3", **flags) -> Path:
    """A random head for a target on disk."""
    target = load_target(target_folder, tokenizer=False, pack=False)
    if kind == "peagle":
        flags = {"mask_token_id": 3, "num_layers": 2, **flags}
    size = min(48, target.config.vocab_size)
    config = HeadConfig.for_target(target.config, kind=kind, draft_vocab_size=size, **flags)
    torch.manual_seed(1)
    model = make_model(config, target.decoder.embed_tokens.weight)
    vocab_map = VocabMap(torch.arange(size) + 4, target.config.vocab_size)
    return save_head(folder, model, vocab_map, meta={}, identity=target.identity)


def write_prompts(path: Path, num: int = 3, verb: str = "say") -> Path:
    """Prompts of a few words each."""
    rows = [{"id": f"p{i}", "dataset": path.stem, "turns": [f"{verb} {i} and {i}"]} for i in range(num)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
