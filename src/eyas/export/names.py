"""The tensors that each engine's loader asks for, spelled out: name -> shape.

Written from the formats alone, not from our modules, so that it can hold an export to account. Engines do
not notice a missing tensor (vLLM leaves the weights uninitialised, SGLang ignores it); some reject unknown
ones.
"""

from eyas.drafters.head_config import HeadConfig
from eyas.export.engines import Engine


def expected_tensors(config: HeadConfig, engine: Engine) -> dict[str, list[int]]:
    """Required tensors of a head in an engine's format."""
    d, wide = config.hidden_size, len(config.aux_layers) * config.target_hidden_size
    shapes: dict[str, list[int]] = {"fc.weight": [d, wide]}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = [wide]
    if config.fc_norm:
        for index in range(len(config.aux_layers)):
            shapes[f"fc_norm.{index}.weight"] = [config.target_hidden_size]
    for index in range(config.num_layers):
        prefix = "midlayer." if engine == "eagle" else f"layers.{index}."
        shapes |= {prefix + name: shape for name, shape in _layer(config, engine, index).items()}
    shapes["norm.weight"] = [d]
    shapes["lm_head.weight"] = [config.draft_vocab_size, d]
    shapes["d2t"] = [config.draft_vocab_size]
    shapes["t2d"] = [config.vocab_size]
    if config.kind == "peagle":
        shapes["mask_hidden"] = [1, 1, wide]
    if config.kind == "peagle" or config.trained_embedding or engine == "speculators":
        shapes["embed_tokens.weight"] = [config.vocab_size, d]
    return shapes


def has_output_bias(config: HeadConfig, engine: Engine) -> bool:
    """Whether the engine's layer adds a bias after o_proj, which is then 0.

    vLLM's Llama layer makes one wherever q, k and v have theirs and would leave it uninitialised; its Qwen3
    layer has none and refuses the name.
    """
    return config.attention_bias and not config.qk_norm and engine in ("vllm", "speculators")


def _layer(config: HeadConfig, engine: Engine, index: int) -> dict[str, list[int]]:
    """Tensors of decoder layer `index`; layer 0 reads embedding and hidden state side by side."""
    d, q = config.hidden_size, config.num_heads * config.head_dim
    kv, mlp = config.num_kv_heads * config.head_dim, config.intermediate_size
    width = 2 * d if index == 0 else d
    shapes = {
        "input_layernorm.weight": [d],
        "self_attn.q_proj.weight": [q, width],
        "self_attn.k_proj.weight": [kv, width],
        "self_attn.v_proj.weight": [kv, width],
        "self_attn.o_proj.weight": [d, q],
        "post_attention_layernorm.weight": [d],
        "mlp.gate_proj.weight": [mlp, d],
        "mlp.up_proj.weight": [mlp, d],
        "mlp.down_proj.weight": [d, mlp],
    }
    # Above layer 0 vLLM reads input_layernorm and SGLang hidden_norm; speculators' own layers know one.
    if index == 0 or engine != "speculators":
        shapes["hidden_norm.weight"] = [d]
    if has_output_bias(config, engine):
        shapes["self_attn.o_proj.bias"] = [d]
    if config.attention_bias:
        shapes["self_attn.q_proj.bias"] = [q]
        shapes["self_attn.k_proj.bias"] = [kv]
        shapes["self_attn.v_proj.bias"] = [kv]
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = [config.head_dim]
        shapes["self_attn.k_norm.weight"] = [config.head_dim]
    return shapes
