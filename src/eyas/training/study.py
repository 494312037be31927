"""A study: one recipe trained in several variants with equal steps, so that each difference is seen alone.

    recipe: ../train/smollm2-135m-peagle.yaml      relative to the study's file
    steps: 2000
    baseline: base
    overrides: [data.seq_len=512]                  for all variants, as on the command line of `eyas train`
    variants:
      base: []
      layers/1: [head.num_layers=1]
      layers/2: [head.num_layers=2]
      eagle3: {recipe: ../train/smollm2-135m-eagle3.yaml, overrides: [optim.lr=5e-4]}

What stands before a name's slash is its group: figures have one panel for each, with the baseline in all.
Length, validation, log and checkpoints are the study's business (`_managed`) and the same for every variant.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from eyas.config import load_config
from eyas.core.errors import ConfigError
from eyas.training.config import TrainConfig

NAME = re.compile(r"[A-Za-z0-9][\w.=-]*(/[A-Za-z0-9][\w.=-]*)?")
LOG_EVERY = 25
"""Steps between log records, where validation is no more frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSection:
    """What one variant does differently."""

    recipe: str | None = None
    """Another recipe than the study's, relative to the study's file."""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """A study as its YAML file says it."""

    recipe: str
    """Of the variants that name no other."""
    steps: int
    """Optimizer steps of every variant."""
    question: str = ""
    """What the study is to answer; printed above its table."""
    baseline: str | None = None
    """Variant that the others are held against, drawn in all panels."""
    beside: tuple[str, ...] = ()
    """Other variants that are drawn in all panels."""
    validations: int = 8
    """Times that each variant is validated, evenly spread: points of its curve."""
    depths: int = 7
    """Drafts at which all variants are validated, whatever they were trained for."""
    against: dict[str, str] = field(default_factory=dict)
    """Group -> variant that it is held against and drawn with, where that is not the baseline."""
    checkpoints: bool = True
    """Off for short variants: one that was stopped begins anew."""
    overrides: tuple[str, ...] = ()
    variants: dict[str, tuple[str, ...] | VariantSection]

    def __post_init__(self) -> None:
        if min(self.steps, self.validations, self.depths) < 1:
            raise ConfigError("steps, validations and depths must be at least 1")
        if not self.variants:
            raise ConfigError("variants: there are none")
        for name in (self.baseline, *self.beside, *self.against.values()):
            if name is not None and name not in self.variants:
                raise ConfigError(f"baseline, beside, against: there is no variant {name!r}")
        groups = {name.partition("/")[0] for name in self.variants if "/" in name}
        for group in self.against:
            if group not in groups:
                raise ConfigError(f"against: there is no group {group!r}")
        for name in self.variants:
            if not NAME.fullmatch(name):
                raise ConfigError(
                    f"variants: {name!r}: a name is letters, digits, . _ = -, and at most one slash"
                )
            if name in groups:
                raise ConfigError(f"variants: {name!r} is a variant and a group")

    def section(self, name: str) -> VariantSection:
        """The variant `name` in its long form."""
        found = self.variants[name]
        return found if isinstance(found, VariantSection) else VariantSection(overrides=found)


@dataclass(frozen=True, slots=True)
class Plan:
    """A variant ready to run."""

    name: str
    config: TrainConfig


@dataclass(frozen=True, slots=True)
class Study:
    """A study with every variant resolved, so that no mistake shows only after hours."""

    name: str
    config: StudyConfig
    plans: tuple[Plan, ...]


def load_study(path: Path, out: Path, *, overrides: tuple[str, ...] = (), steps: int | None = None) -> Study:
    """Read a study; `overrides` come after those of its variants, `steps` replaces its own.

    Raises ConfigError that names the file and the variant.
    """
    config = load_config(StudyConfig, path, [f"steps={steps}"] if steps is not None else [])
    plans = []
    for name in config.variants:
        section = config.section(name)
        recipe = path.parent / (section.recipe or config.recipe)
        lines = [*config.overrides, *section.overrides, *overrides, *_managed(config, out / name)]
        try:
            plans.append(Plan(name, load_config(TrainConfig, recipe, lines)))
        except ConfigError as error:
            raise ConfigError(f"{path}: variant {name}: {error}") from error
    return Study(path.stem, config, tuple(plans))


def _managed(study: StudyConfig, out: Path) -> list[str]:
    """Overrides that a study needs.

    Log records end where checkpoints are made, so that a resumed variant's sums are whole. 2,000 steps and 8
    validations: a record every 25 steps, validation and checkpoint every 250.
    """
    between = max(1, study.steps // study.validations)
    log = min(LOG_EVERY, between)
    validate = between // log * log
    return [
        f"run.out={out}",
        f"run.max_steps={study.steps}",
        "run.epochs=null",
        "run.max_minutes=null",
        "run.schedule_by=steps",
        f"run.log_every={log}",
        f"run.validate_every={validate}",
        f"run.checkpoint_every={validate if study.checkpoints else 0}",
        f"run.validate_depths={study.depths}",
        "run.keep_checkpoints=1",
        "run.write=last",
        "run.resume=true",
        "run.tensorboard=false",
        "run.trackers=[]",
    ]


def choose(study: Study, only: list[str], part: tuple[int, int] = (1, 1)) -> list[Plan]:
    """The plans that are asked for: names or whole groups (all if none), and of those part i of n.

    Part 2 of 3 of seven variants is the second and the fifth. ConfigError for a name that is not there.
    """
    known = {plan.name for plan in study.plans} | {plan.name.partition("/")[0] for plan in study.plans}
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only: {study.name} has no variant {name!r}; there are {', '.join(sorted(known))}"
            )
    wanted = [
        plan for plan in study.plans if not only or plan.name in only or plan.name.partition("/")[0] in only
    ]
    return wanted[part[0] - 1 :: part[1]]
