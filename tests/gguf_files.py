"""Writes tiny GGUF files with the `gguf` package, from a Hugging Face state dict. For tests only."""

import gguf
import numpy as np

from eyas.targets.families import FAMILIES, gguf_name

TOKENS = ["!", "a", "b", "1", "2", "Ġ", "<|end|>", "ab", "Ġab", "12"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def permute(weight, num_heads):
    """Half-split rows to interleaved ones, row by row: row i of the pair halves goes to 2i and 2i + 1."""
    out = np.empty_like(weight)
    size = weight.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def write_gguf(path, config, state, *, kind="F32", tokens=None, pre="gpt-2", factors=None, skip=()):
    """A GGUF file of `state` (Hugging Face names, float32), matrices quantized to `kind`."""
    family = FAMILIES[config.family]
    arch = family.gguf_name
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    if config.windows:
        writer.add_sliding_window(config.windows[0])
    tokens = tokens or [*TOKENS, *(f"x{i}" for i in range(config.vocab_size - len(TOKENS)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b", "Ġ ab", "1 2"])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template(TEMPLATE)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    block = gguf.GGMLQuantizationType[kind]
    for name, value in state.items():
        stored = value
        if family.gguf_permuted and (".q_proj." in name or ".k_proj." in name):
            stored = permute(value, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        if gguf_name(name) in skip:
            continue
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, block), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
