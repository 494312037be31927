"""Shape and flags of a draft head: everything that decides which tensors it has and what they mean.

Legend: D hidden size of the head, Dt hidden size of the target, A captured layers, V / Vd vocabularies.

Two kinds share one class: "eagle3" feeds its own output back, one token a forward (EAGLE-3, section 3.1);
"peagle" adds a learned mask token and guesses all tokens in one forward (P-EAGLE, section 2). The flags are
those of the public checkpoint formats and keep their names:

    norm_before_residual   the residual of layer 0 is hidden_norm(h) instead of h
    norm_before_fc         one RMSNorm over the concatenated features, before fc
    fc_norm                one RMSNorm for each captured layer, before fc (EAGLE-3.1)
    norm_output            the next step is fed the state after the final norm (EAGLE-3.1)
    attention_bias         q, k and v have biases
    qk_norm                RMSNorm over each head's queries and keys (Qwen3 style)
    markov_rank            rank of peagle's correction by the token before (drafters/peagle/markov.py); 0 for
                           none
    markov_form            what that correction reads: "tables" the token alone, "hidden" the slot's state too
    encoded_depths         how many depths past 0 have a vector of their own beside peagle's shared hidden
                           state (drafters/peagle/model.py); 0 for none
"""

from dataclasses import dataclass
from typing import Literal

from eyas.core.batch import KVLayout
from eyas.core.capture import default_aux_layers
from eyas.core.errors import ConfigError
from eyas.core.model_config import RopeConfig, TargetConfig

HeadKind = Literal["eagle3", "peagle"]
MarkovForm = Literal["tables", "hidden"]
MAX_ENCODED_DEPTHS = 512
"""Far more than are ever trained; a file that asks for more is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head; see the module's docstring for the flags. Raises ConfigError naming the field."""

    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    """The target's V: rows of the embedding table."""
    draft_vocab_size: int
    """Vd: rows of the head's own lm_head."""
    target_hidden_size: int
    target_num_layers: int
    aux_layers: tuple[int, ...]
    """Captured hidden states, entering-layer ids (core.capture)."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; empty for full attention everywhere."""
    trained_embedding: bool = False
    """The head owns an embedding table [V, D] instead of sharing the target's."""
    mask_token_id: int | None = None
    """P-EAGLE: an id that no text contains; its embedding row is learned."""
    markov_rank: int = 0
    markov_form: MarkovForm = "tables"
    encoded_depths: int = 0

    def __post_init__(self) -> None:
        last = self.target_num_layers
        checks = (
            ("kind", self.kind in ("eagle3", "peagle"), '"eagle3" or "peagle"'),
            ("num_layers", self.num_layers >= 1, "at least 1"),
            ("num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"a divisor of {self.num_heads} heads"),
            ("head_dim", self.head_dim % 2 == 0, "even, for the rotary embedding"),
            ("draft_vocab_size", 1 <= self.draft_vocab_size <= self.vocab_size, f"1 .. {self.vocab_size}"),
            ("aux_layers", len(self.aux_layers) >= 1, "at least one layer id"),
            (
                "aux_layers",
                all(0 <= k <= last for k in self.aux_layers),
                f"entering-layer ids in 0 .. {last}",
            ),
            ("windows", len(self.windows) in (0, self.num_layers), f"empty or {self.num_layers} entries"),
            ("windows", len({size for size in self.windows if size}) <= 1, "of one size, or None"),
            (
                "trained_embedding",
                self.trained_embedding or self.hidden_size == self.target_hidden_size,
                f"true where hidden_size {self.hidden_size} is not the target's {self.target_hidden_size}",
            ),
            (
                "mask_token_id",
                (self.kind == "peagle") == (self.mask_token_id is not None),
                "an unused token id for peagle, absent for eagle3",
            ),
            (
                "mask_token_id",
                self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size,
                f"below the vocabulary of {self.vocab_size}",
            ),
            ("markov_rank", 0 <= self.markov_rank <= self._most_markov, f"0 .. {self._most_markov}"),
            ("markov_rank", self.kind == "peagle" or not self.markov_rank, "0 for eagle3"),
            ("markov_form", self.markov_form in ("tables", "hidden"), '"tables" or "hidden"'),
            (
                "markov_form",
                self.markov_form == "tables" or self.markov_rank > 0,
                "left out where there is no markov_rank",
            ),
            (
                "encoded_depths",
                0 <= self.encoded_depths <= MAX_ENCODED_DEPTHS,
                f"0 .. {MAX_ENCODED_DEPTHS}",
            ),
            ("encoded_depths", self.kind == "peagle" or not self.encoded_depths, "0 for eagle3"),
        )
        for name, good, rule in checks:
            if not good:
                raise ConfigError(f"head {name}={getattr(self, name)!r}: it must be {rule}")

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        kind: HeadKind = "eagle3",
        num_layers: int | None = None,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        aux_layers: tuple[int, ...] | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        attention_bias: bool = False,
        qk_norm: bool = False,
        trained_embedding: bool = False,
        mask_token_id: int | None = None,
        markov_rank: int = 0,
        markov_form: MarkovForm = "tables",
        encoded_depths: int = 0,
    ) -> "HeadConfig":
        """Return a head with the target's shapes: 1 layer for eagle3, 4 for peagle, full vocabulary."""
        return cls(
            kind=kind,
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or target.intermediate_size,
            num_layers=num_layers or (4 if kind == "peagle" else 1),
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            max_position_embeddings=target.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            aux_layers=tuple(aux_layers or default_aux_layers(target.num_layers)),
            norm_before_residual=norm_before_residual,
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_output=norm_output,
            attention_bias=attention_bias,
            qk_norm=qk_norm,
            trained_embedding=trained_embedding,
            mask_token_id=mask_token_id,
            markov_rank=markov_rank,
            markov_form=markov_form,
            encoded_depths=encoded_depths,
        )

    @property
    def _most_markov(self) -> int:
        """A correction of a higher rank is none of low rank; a file that asks for one is damaged."""
        return self.draft_vocab_size if self.markov_form == "tables" else 4 * self.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features, A * Dt."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def has_default_aux_layers(self) -> bool:
        """Whether the captured layers are the three of EAGLE-3 for this target."""
        return self.aux_layers == default_aux_layers(self.target_num_layers)

    @property
    def kv_layout(self) -> KVLayout:
        """What the head caches per token."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim)
