"""Benchmark prompts by name: NAME, NAME:CATEGORY, or a path.

    mt_bench                 DATA/mt_bench.jsonl, DATA/mt_bench.jsonl.gz or DATA/mt_bench/question.jsonl
    speed_bench/qualitative  DATA/speed_bench/qualitative.jsonl, as SPEED-Bench's prepare.py writes it
    spec_bench:translation   the rows of one category
    my/prompts.jsonl         a path, also with :CATEGORY
    builtin                  the twelve prompts that ship with the package

DATA is a folder of the user's own. What rows may look like is in workload.py.
"""

from dataclasses import dataclass
from pathlib import Path

from eyas.bench.workload import BUILTIN, Prompt, read_prompts
from eyas.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts under the name that records and plots show."""

    name: str
    prompts: tuple[Prompt, ...]


def read_dataset(spec: str, data_dir: Path | None = None, num_prompts: int | None = None) -> Dataset:
    """Return a dataset, num_prompts of it evenly spaced if given; DataError says where it was looked for."""
    source, category = _locate(spec, data_dir)
    prompts = read_prompts(source, None if category else num_prompts)
    if category:
        known = sorted({prompt.category for prompt in prompts})
        prompts = [prompt for prompt in prompts if prompt.category == category]
        if not prompts:
            raise DataError(f"{source}: no row has the category {category!r}; there are {', '.join(known)}")
        if num_prompts is not None and num_prompts < len(prompts):
            prompts = [prompts[i * len(prompts) // num_prompts] for i in range(num_prompts)]
    name = spec.removesuffix(f":{category}") if category else spec
    if Path(name).is_absolute() or Path(name).suffix:
        name = prompts[0].dataset
    return Dataset(f"{name}:{category}" if category else name, tuple(prompts))


def _locate(spec: str, data_dir: Path | None) -> tuple[str | Path, str]:
    """Return (file or "builtin", category); the whole spec is tried as a path before a colon splits it."""
    tried: list[Path] = []
    for name, category in ((spec, ""), (spec.rpartition(":")[0], spec.rpartition(":")[2])):
        if not name:
            continue
        if name == BUILTIN:
            return BUILTIN, category
        roots = [Path(name)] if data_dir is None else [Path(name), data_dir / name]
        for root in roots:
            candidates = [
                root,
                root.with_name(root.name + ".jsonl"),
                root.with_name(root.name + ".jsonl.gz"),
                root / "question.jsonl",
            ]
            found = next((path for path in candidates if path.is_file()), None)
            if found is not None:
                return found, category
            tried += candidates[1:]
    where = ", ".join(dict.fromkeys(map(str, tried)))
    hint = "" if data_dir is not None else "; --data-dir names the folder that data sets are looked for in"
    raise DataError(f"data set {spec!r} is not there: none of {where} is a file{hint}")
