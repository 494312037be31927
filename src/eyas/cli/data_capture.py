"""`eyas data capture`: run the target once over a store and keep what training needs of it."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.cli import console


def command(
    store: Annotated[Path, typer.Argument(help="A token store.")],
    *,
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the features; a capture that stopped goes on in it.")],
    seq_len: Annotated[int, typer.Option(min=8, max=2**20, help="data.seq_len of the recipe.")] = 512,
    kind: Annotated[Literal["bf16", "fp8"], typer.Option(help="How features are kept.")] = "bf16",
    aux_layers: Annotated[
        str | None, typer.Option(help="Captured layers, as in 2,15,27; the default three if left out.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows of seq_len in a forward.")] = 8,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Don't ask whether size and time are all right.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Capture features for training; the size in GB and the hours are estimated first, and asked about.

    A recipe reads them with data.features=OUT; the target then runs only for validation.
    """
    import shutil
    import sys

    import numpy as np

    from eyas.core.capture import default_aux_layers
    from eyas.core.errors import ConfigError, DataError
    from eyas.data.features import FeatureShape, Known, write_features
    from eyas.data.loader import Batch, pack_rows, slice_rows
    from eyas.data.store import TokenStore
    from eyas.targets.load import load_target
    from eyas.training.capture import capture, capture_meta

    data = TokenStore.load(store)
    loaded = load_target(target, **console.device_and_dtype(device, None), pack=False)
    config = loaded.config
    if data.manifest["vocab_size"] != config.vocab_size:
        raise DataError(
            f"{store}: made for a vocabulary of {data.manifest['vocab_size']}, "
            f"the target has {config.vocab_size}"
        )
    limit = config.max_position_embeddings
    if seq_len > limit:
        longer = int((data.lengths > limit).sum())
        raise ConfigError(
            f"--seq-len {seq_len}: the target reads at most {limit} tokens, {longer:,} of "
            f"{data.num_documents:,} documents are longer; with --seq-len {limit} they are cut into pieces"
        )
    layers: tuple[int, ...] = default_aux_layers(config.num_layers)
    if aux_layers is not None:
        layers = tuple(console.whole_numbers(aux_layers, "--aux-layers"))
        if max(layers) > config.num_layers:
            raise ConfigError(
                f"--aux-layers: {max(layers)} is not a layer: the target has {config.num_layers}"
            )
    shape = FeatureShape(len(layers) * config.hidden_size, config.hidden_size, kind)

    def run(batch: Batch) -> Known:
        known = capture(loaded.decoder, batch, layers)
        return known.features, known.hidden, known.choices

    few = np.arange(min(data.num_documents, 256))
    sample = slice_rows(pack_rows(data, data.mask, few, seq_len, seed=0), 0, batch_rows)
    on_device = Batch(
        *(x.to(loaded.device) for x in (sample.ids, sample.segments, sample.positions, sample.supervised))
    )
    run(on_device)  # the first one warms up
    began = time.monotonic()
    float(run(on_device)[2].sum())
    speed = int((sample.segments >= 0).sum()) / (time.monotonic() - began)
    tokens = int(data.doc_offsets[-1])
    size, hours = tokens * shape.token_bytes, tokens / speed / 3600
    estimate = f"{tokens:,} tokens: {size / 1e9:.2f} GB in {out}, about {hours:.2f} hours"
    free = shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.exists())).free
    if size > free:
        raise ConfigError(f"{estimate}; only {free / 1e9:.2f} GB are free there")
    console.notes().print(estimate)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{estimate}; say --yes to begin")
        typer.confirm("Begin?", abort=True, err=True)
    meta = capture_meta(loaded.identity, layers)
    with console.progress(disable=as_json) as progress:
        task = progress.add_task("capture", total=tokens)
        for done, _ in write_features(
            data,
            out,
            run=run,
            shape=shape,
            seq_len=seq_len,
            batch_rows=batch_rows,
            meta=meta,
            device=loaded.device,
        ):
            progress.update(task, completed=done)
    result = {"folder": str(out), "tokens": tokens, "bytes": size, "kind": kind, **meta}
    if as_json:
        console.print_json(result)
    else:
        console.results().print(f"{size / 1e9:.2f} GB of features in {out}; train with data.features={out}")
