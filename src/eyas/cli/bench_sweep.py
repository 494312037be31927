"""`eyas bench sweep`: throughput, latency and acceptance over methods, K, data sets and load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import console

if TYPE_CHECKING:
    from eyas.bench.cells import Method
    from eyas.bench.datasets import Dataset
    from eyas.bench.sweep import Backend

LOCAL = "local"


def sweep(
    *,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Folder, GGUF file, hub name, or a known name.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="plain, eagle3, peagle (the head of that kind among --head), prompt_lookup, small:PATH, "
            "NAME=HEAD, or NAME@K=URL for an endpoint that runs K."
        ),
    ] = "plain,eagle3,peagle",
    head: Annotated[list[str] | None, typer.Option("--head", help="A head folder; may be repeated.")] = None,
    k: Annotated[
        str,
        typer.Option(
            "--num-draft-tokens", "--k", "-k", help="One K or several; auto is what `eyas calibrate` found."
        ),
    ] = "3,5,7",
    concurrency: Annotated[str, typer.Option(help="Requests at once, one or several.")] = "1,2,4,8,16,32,64",
    rate: Annotated[
        str, typer.Option(help="Open loop instead: requests a second, at Poisson times; one or several.")
    ] = "",
    data: Annotated[
        str, typer.Option(help="Data sets: NAME, NAME:CATEGORY, a JSONL file, or 'builtin'; several.")
    ] = "builtin",
    data_dir: Annotated[
        Path | None, typer.Option(envvar="EYAS_DATA", help="Folder with NAME.jsonl or NAME/question.jsonl.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="'local', or the URL of an OpenAI-compatible server (one method, one K).")
    ] = LOCAL,
    model: Annotated[str | None, typer.Option(help="Model name at the endpoints; their first.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="EYAS_API_KEY", help="Key for the endpoints.")] = None,
    record: Annotated[Path, typer.Option("--record", "-o", help="JSONL file to add to.")] = Path(
        "sweep.jsonl"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = 3,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each data set, evenly spaced.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Least requests of a cell.")] = 16,
    waves: Annotated[
        int, typer.Option(min=1, help="At concurrency c at least so many times c requests.")
    ] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Let every answer have max-tokens.")] = False,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Longest time for a cell, after its ramp-up.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests that an engine runs at once; the highest concurrency.")
    ] = None,
    phases: Annotated[
        bool | None,
        typer.Option(
            help="Time verification and drafting apart in further cells: each method, at the K that are best "
            "on any data set, on the first one. Done on CUDA unless told otherwise; elsewhere every cell "
            "tells them."
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds after which no cell is begun; the same command goes on later."),
    ] = None,
    one_engine_at_a_time: Annotated[
        bool, typer.Option(help="For engines that do not fit into memory together; methods drift apart more.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Measure methods side by side over load and data, and add the cells to a record.

    A cell that the record holds is not measured again, so a sweep that was stopped goes on where it was.
    """
    import time

    from eyas.bench.analyze_sweep import best_rows, read_cells
    from eyas.bench.cells import Load, Settings, phase_cells, plan_cells
    from eyas.bench.conversations import encode_chat
    from eyas.bench.datasets import read_dataset
    from eyas.bench.records import check_record, machine_name, provenance
    from eyas.bench.sweep import LocalBackend
    from eyas.bench.sweep import sweep as measure
    from eyas.core.errors import ConfigError

    until = None if time_limit is None else time.perf_counter() + time_limit
    own = methods_of(methods, head or [], _draft_counts(k), target, engine)
    if not own:
        raise ConfigError("--methods: no method is left to measure")
    if rate:
        loads = [Load(rate=value) for value in _numbers("--rate", rate, float)]
    else:
        loads = [Load(concurrency=value) for value in _numbers("--concurrency", concurrency, int)]
    names = [part.strip() for part in data.split(",") if part.strip()]
    datasets = [read_dataset(name, data_dir, num_prompts) for name in names]
    if not datasets:
        raise ConfigError("--data names no data set")
    check_record(record)
    local = any(method.url is None for method in own)
    loaded: Any = None
    if local:
        from eyas.targets.load import load_target

        if target is None:
            raise ConfigError("--target is needed for methods that run in this process")
        loaded = load_target(target, **console.device_and_dtype(device, dtype))
        if loaded.tokenizer is None:
            raise ConfigError(f"{target} has no tokenizer, and prompts are text")
    settings = Settings(
        target=loaded.identity.name if local else model or "served",
        target_fingerprint=loaded.identity.fingerprint if local else None,
        machine=machine_name(loaded.device.type if local else None),
        dtype=str(loaded.dtype).removeprefix("torch.") if local else "served",
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        num_requests=num_requests,
        waves=waves,
        limit_seconds=limit_seconds,
    )
    backends: dict[str | None, Backend] = {}
    if local:
        from eyas.bench.offline import build_engine

        prompts = {
            dataset.name: [
                encode_chat(loaded.tokenizer, [*p.opening(), {"role": "user", "content": p.turns[0]}])
                for p in dataset.prompts
            ]
            for dataset in datasets
        }
        longest = max(len(ids) for part in prompts.values() for ids in part)
        highest = max((load.concurrency or 0 for load in loads), default=0)
        seqs = max_num_seqs or highest or 64

        def build(method: "Method", time_phases: bool) -> Any:
            return build_engine(
                loaded,
                method.spec,
                max(0, method.num_draft_tokens),
                time_phases=time_phases,
                max_model_len=longest + max_tokens + 16,
                max_num_seqs=seqs,
            )

        backends[None] = LocalBackend(
            build,
            prompts,
            warm_up_concurrency=highest or seqs,
            keep=not one_engine_at_a_time,
            graphs=loaded.device.type == "cuda",
        )
    for url in dict.fromkeys(method.url for method in own if method.url is not None):
        backends[url] = _endpoint(url, datasets, model, api_key)
    cells = plan_cells(own, datasets, loads, repeats, settings, one_engine_at_a_time=one_engine_at_a_time)
    timed = local and (phases if phases is not None else loaded.device.type == "cuda")
    runs_at, total = provenance(), len(cells)
    notes = console.notes()
    if not as_json:
        bound = "" if limit_seconds is None else f", some {total * limit_seconds:.0f} s once engines are warm"
        notes.print(f"{len(own)} methods, {total} cells{bound}")
    with console.progress(disable=as_json) as bar:
        task = bar.add_task("sweep", total=total)

        def advance(cell: Any, result: dict[str, Any] | None) -> None:
            said = "there already" if result is None else f"{result['output_tokens_per_second']:.0f} tok/s"
            text = f"{cell.method.label} {cell.dataset} {cell.load}: {said}"
            bar.update(task, advance=1, description=text)

        def run(some: list[Any]) -> int:
            return measure(
                some, record, lambda method: backends[method.url], runs_at, advance=advance, until=until
            )

        measured = run(cells)
        if timed:
            here = {dataset.name for dataset in datasets}
            rows = [row for row in read_cells([record]) if row.dataset in here]
            best = {(row.label, row.load) for row in best_rows(rows)}
            more = phase_cells(
                [method for method in own if method.url is None],
                datasets[0].name,
                loads,
                settings,
                lambda method, load: (method.label, (load.concurrency, load.rate)) in best,
            )
            total += len(more)
            bar.update(task, total=total)
            measured += run(more)
    _conclude(record, measured, total, as_json=as_json)


def _endpoint(url: str, datasets: "list[Dataset]", model: str | None, api_key: str | None) -> "Backend":
    """Return the backend of an endpoint."""
    from eyas.core.errors import ConfigError

    try:
        from eyas.bench.client import HTTPBackend
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'eyas[bench]'") from error
    return HTTPBackend(url, datasets, model=model, api_key=api_key)


def methods_of(text: str, heads: list[str], ks: list[int], target: str | None, engine: str) -> "list[Method]":
    """Return every method at every K, plain decoding once; ConfigError for what cannot be told apart."""
    from eyas.bench.cells import AUTO, PLAIN, Method
    from eyas.bench.records import folder_fingerprint
    from eyas.core.errors import ConfigError

    names = [part.strip() for part in text.split(",") if part.strip()]
    if engine != LOCAL:
        if len(names) != 1 or (names[0] != PLAIN and len(ks) != 1):
            raise ConfigError(
                "--engine URL measures what one server runs: give one of --methods and its one --k "
                "(several servers: --methods NAME=URL,NAME=URL)"
            )
        return [Method(names[0], num_draft_tokens=0 if names[0] == PLAIN else ks[0], url=engine)]
    found = []
    for entry in names:
        name, equals, value = entry.partition("=")
        if value.startswith(("http://", "https://")):
            # NAME@K=URL says what K the server was started with; the sweep cannot set it.
            name, _, own_k = name.partition("@")
            found.append(Method(name, num_draft_tokens=int(own_k) if own_k.isdigit() else 0, url=value))
            continue
        spec = value if equals else _spec_of(name, heads, target)
        if spec is None:
            found.append(Method(PLAIN))
            continue
        own = folder_fingerprint(Path(spec)) if Path(spec).is_dir() else None
        label = Path(name).name if name.startswith("small:") else name
        found += [
            Method(label, spec, k, f"{own}-{_calibration(spec)}" if k == AUTO else own)
            for k in dict.fromkeys(ks)
        ]
    return found


def _draft_counts(text: str) -> list[int]:
    """Return the K of --k, AUTO for "auto"."""
    from eyas.bench.cells import AUTO

    words = [part.strip() for part in text.split(",") if part.strip()]
    fixed = [word for word in words if word != "auto"]
    counts = _numbers("--k", ",".join(fixed), int) if fixed or not words else []
    return [*counts, *([AUTO] if "auto" in words else [])]


def _calibration(spec: str) -> str:
    """Return a digest of a head's calibration, which K = auto depends on."""
    import hashlib
    import json

    from eyas.core.errors import ConfigError
    from eyas.targets.hf_config import read_json

    path = Path(spec) / "eyas.json"
    found = read_json(path).get("calibration") if path.is_file() else None
    if found is None:
        raise ConfigError(f"--k auto: {spec} has no calibration; run `eyas calibrate --head {spec}` first")
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]


def _spec_of(name: str, heads: list[str], target: str | None) -> str | None:
    """Return the drafter that a bare method name means; None for plain decoding."""
    from eyas.core.errors import ConfigError

    if name == "plain":
        return None
    if name == "prompt_lookup" or name.startswith("small:"):
        return name
    if name not in ("eagle3", "peagle"):
        raise ConfigError(
            f"--methods: {name!r} is none of plain, eagle3, peagle, prompt_lookup, small:PATH, NAME=HEAD"
        )
    if not heads and target is not None:
        heads = [path for path in (f"heads/{target}-{name}",) if Path(path).is_dir()]
    fitting = [folder for folder in heads if _kind_of(Path(folder)) == name]
    if len(fitting) != 1:
        raise ConfigError(
            f"--methods {name}: {len(fitting)} heads of that kind are given ({', '.join(heads) or 'none'}); "
            f"give one with --head, or write NAME=HEAD for each"
        )
    return fitting[0]


def _kind_of(folder: Path) -> str:
    """Return what a head folder's config says that it is."""
    from eyas.core.errors import ConfigError
    from eyas.targets.hf_config import read_json

    if not (folder / "config.json").is_file():
        raise ConfigError(f"--head {folder}: not a head folder, there is no config.json")
    values = read_json(folder / "config.json")
    masked = any(values.get(name) is not None for name in ("mask_token_id", "pard_token", "ptd_token_id"))
    return str(values.get("speculators_model_type") or ("peagle" if masked else "eagle3"))


def _numbers(flag: str, text: str, kind: Any) -> list[Any]:
    import math

    from eyas.core.errors import ConfigError

    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ConfigError(f"{flag}: expected positive numbers with commas between, as in 1,2,4; got {text!r}")
    return list(dict.fromkeys(values))


def _conclude(record: Path, measured: int, total: int, *, as_json: bool) -> None:
    """Print what the record says now."""
    from eyas.bench.analyze_sweep import read_cells, tables
    from eyas.cli.bench_view import show

    document = tables(read_cells([record]))
    if as_json:
        console.print_json({"record": str(record), "num_cells": total, "num_measured": measured, **document})
    else:
        console.notes().print(f"{measured} of {total} cells measured, the others were there; {record}")
        show(console.results(), document)
