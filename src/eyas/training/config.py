"""The recipe of a training run: strict, every default said here, saved resolved beside the head.

eyas train recipes/train/smollm2-135m-eagle3.yaml data.store=answers/store optim.lr=5e-4
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from eyas.config.dump import to_plain
from eyas.core.errors import ConfigError
from eyas.core.model_config import MAX_LAYERS
from eyas.training.losses import ReachBy
from eyas.training.losses_chunk import LossKind
from eyas.training.presets import PRESETS

MAX_DEPTHS = 64
"""Steps or depths that a head may be trained for; memory grows with them."""


def _require(name: str, value: Any, good: bool, rule: str) -> None:
    if not good:
        raise ConfigError(f"{name}={value!r}: it must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSection:
    """The model whose answers the head learns to guess; it is frozen."""

    path: str
    """Folder, GGUF file or name, as `--target` takes it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Where the tokens come from."""

    store: str
    """Folder made by `eyas data regenerate` (its store/) or `eyas data pack`."""
    seq_len: int = 512
    """Tokens in a packed row; longer documents are cut."""
    features: str | None = None
    """Folder made by `eyas data capture`: features are read from it, the target runs only for validation."""
    held_out: float = 0.01
    """Share of documents kept for validation, by the hash of their ids."""
    share: float = 1.0
    """Share of the other documents that is trained on; smaller shares are parts of larger ones. Validation
    and the draft vocabulary don't change with it."""

    def __post_init__(self) -> None:
        _require("store", self.store, bool(self.store), "the folder of a token store")
        _require("features", self.features, self.features != "", "a folder of captured features, or left out")
        _require("seq_len", self.seq_len, 8 <= self.seq_len <= 2**20, "from 8 to 1048576")
        _require("held_out", self.held_out, 0.0 <= self.held_out < 1.0, "a share in [0, 1)")
        _require("share", self.share, 0.0 < self.share <= 1.0, "a share in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSection:
    """Shape and start of the head; names as in drafters/head_config.py."""

    num_layers: int | None = None
    """None: 1 for eagle3, 4 for peagle."""
    draft_vocab_size: int | None = None
    """None: the target's vocabulary."""
    intermediate_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    markov_rank: int = 0
    """peagle: rank of the correction by the token before (drafters/peagle/markov.py); 0 for none. A warm
    start from a head without one adds it; one from a head with one keeps it."""
    markov_form: Literal["tables", "hidden"] = "tables"
    """What the correction reads: the token alone, or the slot's state too."""
    depth_encoding: Literal["none", "learned"] = "none"
    """peagle: learned adds a vector for each trained depth past 0 to the mask slots' shared hidden state, the
    paper's ablation (drafters/peagle/model.py). A warm start from a head without one adds it; one from a head
    with one keeps it."""
    train: Literal["all", "markov"] = "all"
    """markov: the correction alone, on top of a finished head (warm_start) that stays as it is."""
    train_embeddings: Literal["none", "mask", "all"] = "mask"
    """none: not even peagle's mask row; mask: only that row; all: the whole table."""
    mask_token_id: int | None = None
    """peagle: None chooses an id that is proven unused; a given one is checked."""
    init_lm_head_from_target: bool = True
    final_norm_scale: float = 1.0
    """Start value of the final norm's scale; below 1 it tempers the first predictions."""
    init_std: float = 0.02
    warm_start: str | None = None
    """Folder of a head to go on from; its vocabulary map, flags and mask token are kept. A peagle head may
    begin from an eagle3 head: it takes all of its weights, and its further layers start as identities."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "draft_vocab_size", "intermediate_size"):
            size = getattr(self, name)
            _require(name, size, size is None or size >= 1, "at least 1, or left out")
        few = self.num_layers is None or self.num_layers <= MAX_LAYERS
        _require("num_layers", self.num_layers, few, f"at most {MAX_LAYERS}")
        _require("markov_rank", self.markov_rank, self.markov_rank >= 0, "0 (off) or a rank")
        _require("aux_layers", self.aux_layers, self.aux_layers != (), "at least one layer, or left out")
        _require("init_std", self.init_std, self.init_std > 0, "positive")
        _require("final_norm_scale", self.final_norm_scale, self.final_norm_scale > 0, "positive")
        _require("warm_start", self.warm_start, self.warm_start != "", "a head's folder, or left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Section:
    """EAGLE-3: training-time test."""

    kind: Literal["eagle3"] = "eagle3"
    ttt_steps: int = 7
    decay: float = 0.8
    """Weight of step s is decay^s, unless depth_weights says otherwise."""
    teacher_forcing: bool = True
    """Feed step s the text's own token; false: the head's guess at step s - 1, as in decoding."""
    depth_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require("ttt_steps", self.ttt_steps, 1 <= self.ttt_steps <= MAX_DEPTHS, f"1 to {MAX_DEPTHS}")
        _require("decay", self.decay, self.decay > 0, "positive")
        if self.depth_weights is not None:
            _require(
                "depth_weights", self.depth_weights, len(self.depth_weights) == self.ttt_steps, "one a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleSection:
    """P-EAGLE: K depths in one forward, conditional drop."""

    kind: Literal["peagle"] = "peagle"
    num_depths: int = 8
    """K in training."""
    retention: float = 0.8
    """r: depth k keeps max(r^k, min_retention) of the supervised rows."""
    min_retention: float = 0.0
    depth_weights: tuple[float, ...] | None = None
    max_anchors: int | None = None
    """Most rollouts of a row; None for all that the drop keeps. A cap starves the deeper slots of long
    rows."""
    partitions: int | Literal["auto"] = "auto"
    """Parts that a row is trained in (training/peagle/partition.py); gradients are the same for any number.
    auto: as few as fit run.memory_budget_gib, or nine tenths of the GPU; 1 on the CPU without a budget."""
    partition_mode: Literal["auto", "shared", "replayed", "prefix"] = "auto"
    """auto: shared while that fits the budget, else replayed."""

    def __post_init__(self) -> None:
        if self.partitions != "auto":
            _require("partitions", self.partitions, self.partitions >= 1, "auto, or at least 1")
        _require(
            "max_anchors",
            self.max_anchors,
            self.max_anchors is None or self.max_anchors >= 1,
            "at least 1, or left out",
        )
        _require("num_depths", self.num_depths, 1 <= self.num_depths <= MAX_DEPTHS, f"1 to {MAX_DEPTHS}")
        _require("retention", self.retention, 0.0 < self.retention <= 1.0, "in (0, 1]")
        _require("min_retention", self.min_retention, 0.0 <= self.min_retention <= 1.0, "in [0, 1]")
        if self.depth_weights is not None:
            _require(
                "depth_weights", self.depth_weights, len(self.depth_weights) == self.num_depths, "one a depth"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    """See training/losses.py."""

    kind: LossKind = "soft_ce"
    oov: Literal["mask", "keep"] = "mask"
    """What becomes of slots whose teacher argmax is outside the draft vocabulary."""
    chunk: int = 4096
    """Slots whose logits are held at a time."""
    reach: float = 0.0
    """Share in [0, 1] of a slot's weight that follows the chance that decoding reaches it; 0 for off."""
    reach_by: ReachBy = "overlap"
    """What passes a slot: its overlap with the teacher (sampled decoding), or a hit (greedy decoding)."""

    def __post_init__(self) -> None:
        _require("chunk", self.chunk, self.chunk >= 1, "at least 1")
        _require("reach", self.reach, 0.0 <= self.reach <= 1.0, "a share in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSection:
    """AdamW and its schedule."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: float = 0.02
    """Share of the run in which the learning rate rises linearly from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr: float = 0.0
    """Learning rate at the end, as a share of lr."""
    ema: float | None = None
    """Decay of a moving average of the weights, which is then what is validated and saved; None for off."""

    def __post_init__(self) -> None:
        _require("lr", self.lr, self.lr > 0, "positive")
        _require("betas", self.betas, all(0.0 <= beta < 1.0 for beta in self.betas), "two numbers in [0, 1)")
        _require("eps", self.eps, self.eps > 0, "positive")
        _require("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _require("clip", self.clip, self.clip > 0, "positive: the largest norm of a gradient")
        _require("final_lr", self.final_lr, 0.0 <= self.final_lr <= 1.0, "a share of lr, in [0, 1]")
        _require("warmup", self.warmup, 0.0 <= self.warmup < 1.0, "a share in [0, 1)")
        _require("ema", self.ema, self.ema is None or 0.0 < self.ema < 1.0, "None or in (0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """How long, how big, where to."""

    out: str
    """Folder of the head; checkpoints and the log stand in it too."""
    seed: int = 0
    batch_rows: int = 32
    """Rows of seq_len in a forward."""
    accumulation: int = 1
    """Forwards in an optimizer step."""
    epochs: float | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    """Wall clock of training, compilation included, loading before it and the last validation not. The first
    limit reached ends the run."""
    schedule_by: Literal["steps", "time"] = "steps"
    """What the learning rate follows; "time" fits a run into max_minutes whatever the speed."""
    log_every: int = 20
    validate_every: int = 500
    """Steps between validations; 0 for only at the end."""
    validate_rows: int = 256
    validate_depths: int | None = None
    """Depths at which validation drafts; None for those that are trained. Runs that train different numbers
    of them compare only at one number."""
    validate_seq_len: int | None = None
    """Tokens in validation's rows; None for data.seq_len."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0 for none. A validation better than all before makes one too."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept, beside the best by validation."""
    write: Literal["last", "best"] = "last"
    """Which weights become the head: those at the end, or those of the best validation that has a
    checkpoint."""
    shard_target: bool = False
    """With several processes: share the frozen target's layers out among them too."""
    resume: bool = True
    """Go on from the newest checkpoint in `out`, if there is one."""
    compile: bool = False
    """torch.compile target, drafter and loss; worth its minute on a GPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the drafter's products (weights and optimizer stay float32). auto: bfloat16 on CUDA."""
    attention: Literal["auto", "masks", "staircase"] = "auto"
    """Of training slots: masks of rows x slots (nn/rollout.py), or ranges without any (nn/staircase.py).
    auto: staircase on CUDA for rows of 2,048 tokens and more, and for rows trained in parts."""
    memory_budget_gib: float | None = None
    """What a step may take of the device, weights included; see objective.partitions."""
    packed: bool = False
    """Write the head in the packed format (int8)."""
    tensorboard: bool = True
    """Write curves where tensorboard is installed."""
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = ()
    """Send them to these too (training/trackers.py); each must be installed."""

    def __post_init__(self) -> None:
        _require("out", self.out, bool(self.out), "the folder of the head")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2^63 - 1")
        for name in ("batch_rows", "accumulation", "log_every", "validate_rows", "keep_checkpoints"):
            _require(name, getattr(self, name), 1 <= getattr(self, name) <= 2**20, "from 1 to 1048576")
        for name in ("validate_every", "checkpoint_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "0 (off) or a count of steps")
        depths = self.validate_depths
        _require(
            "validate_depths",
            depths,
            depths is None or 1 <= depths <= MAX_DEPTHS,
            f"1 to {MAX_DEPTHS}, or left out",
        )
        length = self.validate_seq_len
        _require("validate_seq_len", length, length is None or 8 <= length <= 2**20, "from 8 to 1048576")
        for name in ("epochs", "max_steps", "max_minutes", "memory_budget_gib"):
            limit = getattr(self, name)
            _require(name, limit, limit is None or 0 < limit < math.inf, "positive, or left out")
        limits = (self.epochs, self.max_steps, self.max_minutes)
        if all(limit is None for limit in limits):
            raise ConfigError("epochs, max_steps or max_minutes is needed, else the run never ends")
        if self.schedule_by == "time" and self.max_minutes is None:
            raise ConfigError("schedule_by=time needs max_minutes")
        if self.schedule_by == "steps" and self.epochs is None and self.max_steps is None:
            raise ConfigError(
                "schedule_by=steps needs epochs or max_steps; with max_minutes alone use schedule_by=time"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSection:
    """Real decoding of held-out prompts with the head, beside the simulated acceptance length."""

    prompts: tuple[str, ...] = ()
    """JSONL files of prompts; each gets a figure. Empty for none."""
    every: int = 0
    """Decode at every so-many-th validation during training; 0 for only at the end."""
    limit: int = 80
    num_draft_tokens: int = 7
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _require("every", self.every, self.every >= 0, "0 (off) or a count of validations")
        for name in ("limit", "num_draft_tokens", "max_new_tokens"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    target: TargetSection
    data: DataSection
    objective: Eagle3Section | PEagleSection
    run: RunSection
    head: HeadSection = field(default_factory=HeadSection)
    loss: LossSection = field(default_factory=LossSection)
    optim: OptimSection = field(default_factory=OptimSection)
    decoding: DecodingSection = field(default_factory=DecodingSection)
    preset: str | None = None
    """Name of what lies beneath this recipe (training/presets.py)."""

    @staticmethod
    def section_defaults(kind: str) -> dict[str, dict[str, Any]]:
        """Plain defaults by section and field, for an objective of `kind`; required fields are left out."""
        sections = {
            "data": DataSection,
            "head": HeadSection,
            "loss": LossSection,
            "optim": OptimSection,
            "objective": PEagleSection if kind == "peagle" else Eagle3Section,
        }
        return {
            name: {
                item.name: to_plain(item.default)
                for item in fields(section)
                if item.default is not MISSING and item.name != "kind"
            }
            for name, section in sections.items()
        }

    def __post_init__(self) -> None:
        mask = self.head.mask_token_id
        peagle = isinstance(self.objective, PEagleSection)
        self._check_options(self.head, peagle=peagle)
        _require("head.mask_token_id", mask, peagle or mask is None, "left out: only peagle has a mask token")
        if isinstance(self.objective, PEagleSection):
            self._check_parts(self.objective)
            _require(
                "objective.num_depths",
                self.objective.num_depths,
                self.objective.num_depths < self.data.seq_len,
                f"below data.seq_len={self.data.seq_len}",
            )

    @staticmethod
    def _check_options(head: HeadSection, *, peagle: bool) -> None:
        rank, form = head.markov_rank, head.markov_form
        _require("head.markov_rank", rank, peagle or not rank, "left out: only peagle has the correction")
        _require("head.markov_form", form, form == "tables" or rank > 0, "left out, or have head.markov_rank")
        learned = head.depth_encoding
        _require(
            "head.depth_encoding", learned, peagle or learned == "none", "none: only peagle has mask slots"
        )
        if head.train == "all":
            return
        still = learned == "none"
        _require(
            "head.depth_encoding", learned, still, "left out where head.train=markov: it would not train"
        )
        _require("head.train", head.train, peagle, "all: only peagle has the correction")
        if head.warm_start is None:
            raise ConfigError(
                f"head.train={head.train} trains the correction of a finished head: give head.warm_start"
            )
        kept = head.train_embeddings != "all"
        _require("head.train_embeddings", head.train_embeddings, kept, f"mask where head.train={head.train}")

    def _check_parts(self, objective: PEagleSection) -> None:
        if objective.partitions in (1, "auto"):
            return
        if self.run.attention == "masks":
            raise ConfigError(
                f"objective.partitions={objective.partitions}: parts need run.attention=staircase, not masks"
            )
        if self.loss.reach and objective.partition_mode not in ("auto", "shared"):
            raise ConfigError(
                f"loss.reach={self.loss.reach} needs objective.partition_mode=shared: a slot's chance needs "
                "the depths before it first"
            )
