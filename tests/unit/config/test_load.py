"""Recipes: what is accepted, and that every refusal names the file, the key and the way out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from eyas.config import dump_config, load_config
from eyas.core.errors import ConfigError


@dataclass(frozen=True)
class Optim:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["cosine", "linear"] = "cosine"


@dataclass(frozen=True)
class Eagle3:
    kind: Literal["eagle3"] = "eagle3"
    steps: int = 7


@dataclass(frozen=True)
class PEagle:
    kind: Literal["peagle"] = "peagle"
    drop: float = 0.8


@dataclass(frozen=True)
class Recipe:
    optim: Optim
    name: str = "run"
    objective: Eagle3 | PEagle = field(default_factory=Eagle3)
    target: Path | None = None
    aux_layers: tuple[int, ...] = ()
    tags: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    max_tokens: int = 100
    packed: bool = False
    limit: int | float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be at least 1")


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_reads_every_type(write):
    config = load_config(
        Recipe,
        write(
            "optim: {lr: 1e-3, betas: [0.8, 1], schedule: linear}\n"
            "objective: {kind: peagle, drop: 0.5}\n"
            "target: models/x\naux_layers: [2, 15, 27]\ntags: [a, 'on']\nweights: {code: 2}\n"
            "max_tokens: 1e6\npacked: true\nlimit: 3\n"
        ),
    )
    assert config == Recipe(
        optim=Optim(lr=0.001, betas=(0.8, 1.0), schedule="linear"),
        objective=PEagle(drop=0.5),
        target=Path("models/x"),
        aux_layers=(2, 15, 27),
        tags=["a", "on"],
        weights={"code": 2.0},
        max_tokens=1_000_000,
        packed=True,
        limit=3,
    )
    assert isinstance(config.max_tokens, int)
    assert isinstance(config.limit, int)
    assert isinstance(config.optim.betas[1], float)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=2e-4", ("optim", "lr"), 2e-4),
        ("optim.schedule=linear", ("optim", "schedule"), "linear"),
        ("optim={lr: 3, schedule: linear}", ("optim",), Optim(3.0, schedule="linear")),
        ("objective.steps=3", ("objective", "steps"), 3),
        ("aux_layers=[1, 2]", ("aux_layers",), (1, 2)),
        ("name=123", ("name",), "123"),
        ("name=a=b", ("name",), "a=b"),
        ("target=null", ("target",), None),
        ("target=2024", ("target",), Path("2024")),
        ("limit=1.5", ("limit",), 1.5),
        ("limit=none", ("limit",), None),
        ("packed=true", ("packed",), True),
        ("weights.maths=1e-1", ("weights", "maths"), 0.1),
        ("max_tokens=7", ("max_tokens",), 7),
    ],
)
def test_override(write, override, path, value):
    config: Any = load_config(
        Recipe, write("optim: {lr: 1}\nobjective: {kind: eagle3}\ntarget: x\n"), [override]
    )
    for name in path:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("optim: {lr: 1, schedul: linear}", [], ["recipe.yaml", "optim.schedul", "'schedule'"]),
        ("optim: {lr: 1}\nzzz: 1", [], ["recipe.yaml", "zzz", "known here", "max_tokens"]),
        ("optim: {lr: 1}", ["optm.lr=1"], ["command line", "optm", "'optim'"]),
        ("optim: {lr: 1}", ["optim.lrr=1"], ["command line", "optim.lrr", "'lr'"]),
        ("optim: {}", [], ["recipe.yaml", "optim.lr", "required"]),
        ("name: x", [], ["recipe.yaml", "optim", "required"]),
        ("optim: {lr: fast}", [], ["optim.lr", "a number", "'fast'"]),
        ("optim: {lr: true}", [], ["optim.lr", "a number", "True"]),
        ("optim: {lr: 1}\nmax_tokens: 1.5", [], ["max_tokens", "whole number", "1.5"]),
        ("optim: {lr: 1}\nmax_tokens: .inf", [], ["max_tokens", "whole number", "inf"]),
        ("optim: {lr: 1}\npacked: 'yes'", [], ["packed", "true or false", "'yes'"]),
        ("optim: {lr: 1}\npacked: 1", [], ["packed", "true or false", "1"]),
        ("optim: {lr: 1}\nname: 3", [], ["name", "text", "3"]),
        ("optim: {lr: 1}\nname: null", [], ["name", "text", "None"]),
        ("optim: {lr: 1, betas: [1]}", [], ["optim.betas", "a list of 2"]),
        ("optim: {lr: 1, betas: [1, x]}", [], ["optim.betas[1]", "a number"]),
        ("optim: {lr: 1, schedule: cosin}", [], ["optim.schedule", "'linear'", "did you mean 'cosine'"]),
        ("optim: {lr: 1}\nmax_tokens: 0", [], ["recipe.yaml", "max_tokens=0 must be at least 1"]),
        ("optim: {lr: 1}\nobjective: {kind: peagle, drp: 1}", [], ["objective.drp", "'drop'"]),
        ("optim: {lr: 1}", ["optim.lr.x=1"], ["command line", "optim.lr", "single value"]),
        ("optim: {lr: 1}", ["lr"], ["command line", "'lr'", "key=value"]),
        ("optim: {lr: 1}", ["max_tokens=[1"], ["command line", "max_tokens", "YAML"]),
        ("optim: {lr: 1}\noptim: {lr: 2}", [], ["recipe.yaml", "'optim'", "twice"]),
        ("- a", [], ["recipe.yaml", "mapping"]),
        ("a: [", [], ["recipe.yaml", "YAML"]),
        ("a: !!python/object:os.system {}", [], ["recipe.yaml", "YAML"]),
    ],
)
def test_refusals_say_where_and_what(write, text, overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config(Recipe, write(text), overrides)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(Recipe, tmp_path / "none.yaml")


def test_defaults_without_a_file():
    assert load_config(Eagle3) == Eagle3()
    with pytest.raises(ConfigError, match=r"command line: stps"):
        load_config(Eagle3, None, ["stps=1"])


def test_dump_reads_back_equal(write):
    config = Recipe(
        optim=Optim(lr=1e-05, betas=(0.9, 1.0)),
        name="1e-3",
        objective=PEagle(drop=0.25),
        target=Path("a b/c"),
        aux_layers=(2, 3),
        tags=["true", "on", "", "null"],
        weights={"x": 0.5},
    )
    again = load_config(Recipe, write(dump_config(config)))
    assert again == config
    assert again.name == "1e-3"
