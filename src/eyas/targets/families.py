"""The table of supported families, and the literal names of their tensors.

To add a family: a row in FAMILIES, its differences in hf_config.py (and gguf_config.py), a parity test.

Legend: D hidden size, I intermediate size, V vocabulary, q = num_heads * head_dim, kv = num_kv_heads *
head_dim.
"""

from dataclasses import dataclass

from eyas.core.model_config import TargetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one family apart."""

    architecture: str
    """Class name in config.json, for transformers."""
    models: str
    """Examples, for error messages."""
    attention_bias: bool = False
    qk_norm: bool = False
    gguf_name: str
    gguf_permuted: bool = False
    """GGUF stores rows of q and k for interleaved rotation; they must be put back (weights/gguf.py)."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        models="Llama 1, 2, 3.x, SmolLM2",
        gguf_name="llama",
        gguf_permuted=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", models="Mistral 7B", gguf_name="llama", gguf_permuted=True
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", models="Qwen2, Qwen2.5", gguf_name="qwen2", attention_bias=True
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", models="Qwen3 (dense)", gguf_name="qwen3", qk_norm=True),
}

SUPPORTED = "; ".join(f"{name} ({family.models})" for name, family in FAMILIES.items())

FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Our module in a layer, and the Hugging Face modules whose rows it stacks. Every other name is the same."""

GGUF_NAMES: dict[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face module (within its layer, for those of a layer) and GGUF's name for it."""


def hf_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must hold, by Hugging Face name, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if config.qk_norm:
        layer |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def hf_parts(name: str) -> tuple[str, ...]:
    """Hugging Face tensors whose rows make up our parameter `name`, in order.

    >>> hf_parts("layers.3.mlp.gate_up_proj.weight")
    ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    full = name if name.startswith("lm_head.") else f"model.{name}"
    for ours, parts in FUSED.items():
        if f".{ours}." in full:
            return tuple(full.replace(f".{ours}.", f".{part}.") for part in parts)
    return (full,)


def gguf_name(hf_name: str) -> str:
    """GGUF's name of a Hugging Face tensor.

    >>> gguf_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    """
    module, kind = hf_name.rsplit(".", 1)
    if module.startswith("model.layers."):
        layer, module = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"
