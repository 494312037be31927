"""What each engine can run, so that a head it would run wrongly is refused by name.

Read in vLLM 0.33, SGLang 0.5.23, speculators 0.9 and the EAGLE authors' repository:

    vllm          every flag here; P-EAGLE as method eagle3 with parallel_drafting
    sglang        EAGLE-3 only; residual always un-normalised, no biases, no q/k norm, no windows; always the
                  target's embedding table; layer ids one less than vLLM's, so none can be 0
    speculators   vLLM's loader for it does not hand fc_norm and norm_output on to P-EAGLE
    all           no correction by the token before (`markov_rank`): --without-markov leaves it out; one
                  hidden state for all mask slots (no `encoded_depths`)
    eagle         one layer, no flags, the default three captured layers, the target's table
"""

from dataclasses import dataclass
from typing import Literal

from eyas.core.errors import ConfigError
from eyas.drafters.head_config import HeadConfig

Engine = Literal["vllm", "sglang", "speculators", "eagle"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "speculators", "eagle")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that an engine cannot honour."""

    flag: str
    reason: str


def refusals(config: HeadConfig, engine: Engine) -> list[Refusal]:
    """Everything about a head that `engine` would silently get wrong; empty if it can run it."""
    found: list[Refusal] = []

    def refuse(flag: str, present: bool, reason: str) -> None:
        if present:
            found.append(Refusal(flag, reason))

    peagle = config.kind == "peagle"
    refuse("markov_rank", bool(config.markov_rank), "it has no correction by the token before")
    refuse(
        "encoded_depths",
        bool(config.encoded_depths),
        "it gives every mask slot the same hidden state; nothing of the head can be left out for it",
    )
    if engine == "speculators" and peagle:
        for flag in ("fc_norm", "norm_output"):
            refuse(flag, getattr(config, flag), "vLLM's speculators loader drops it for peagle heads")
    if engine in ("sglang", "eagle"):
        refuse("kind=peagle", peagle, "it has no parallel drafting")
        refuse("norm_before_residual", config.norm_before_residual, "its residual is always un-normalised")
        refuse("attention_bias", config.attention_bias, "its attention has no biases")
        refuse("qk_norm", config.qk_norm, "its attention has no q/k norm")
        refuse("windows", bool(config.windows), "it has no sliding window in the head")
        own_table = config.trained_embedding and config.hidden_size == config.target_hidden_size
        refuse("trained_embedding", own_table, "it replaces the head's embedding table by the target's")
    if engine == "sglang":
        refuse("aux_layers", 0 in config.aux_layers, "the stream entering layer 0 has no id there")
    if engine == "eagle":
        for flag in ("norm_before_fc", "fc_norm", "norm_output"):
            refuse(flag, getattr(config, flag), "it knows the plain head only")
        refuse("num_layers", config.num_layers != 1, "it runs one decoder layer")
        refuse("aux_layers", not config.has_default_aux_layers, "it captures the default three layers only")
        resized = config.hidden_size != config.target_hidden_size
        refuse("hidden_size", resized, "it reads the target's embedding table")
    return found


def check_engine(config: HeadConfig, engine: str) -> Engine:
    """Return the engine's name; raises ConfigError naming the flags that it cannot honour."""
    known = next((name for name in ENGINES if name == engine), None)
    if known is None:
        raise ConfigError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    found = refusals(config, known)
    if found:
        reasons = "; ".join(f"{item.flag}: {item.reason}" for item in found)
        if any(item.flag == "markov_rank" for item in found):
            reasons += (
                " (--without-markov leaves the correction out and writes the base head, complete by itself)"
            )
        others = [name for name in ENGINES if name != engine and not refusals(config, name)]
        hint = f" Formats that can carry it: {', '.join(others)}." if others else ""
        raise ConfigError(f"{engine} cannot run this head ({reasons}).{hint}")
    return known
