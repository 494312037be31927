"""`eyas train`: train a draft head from a recipe."""

from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli import console


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, as in recipes/train/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in optim.lr=5e-4")] = None,
    *,
    preset: Annotated[
        str | None, typer.Option(help="What lies beneath the recipe: eagle3-paper, eagle3.1 or peagle-paper.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    quiet: Annotated[bool, typer.Option(help="No live display; the log file has everything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print eyas.json of the head at the end.")] = False,
) -> None:
    """Train a draft head from a recipe; a run that was stopped goes on from its newest checkpoint.

    On several GPUs: torchrun --nproc-per-node N -m eyas train RECIPE; the recipe means the same.
    """
    import json
    from contextlib import nullcontext

    from eyas.config import load_config
    from eyas.engine.progress import captures_in
    from eyas.training.config import TrainConfig
    from eyas.training.display import QuietDisplay, RichDisplay
    from eyas.training.parallel import World
    from eyas.training.trainer import Paused

    config = load_config(TrainConfig, recipe, [*(overrides or []), *([f"preset={preset}"] if preset else [])])
    world = World.join(device)
    display = QuietDisplay() if quiet else RichDisplay()
    trainer = open_trainer(config, device=device, display=display, world=world)
    if world.is_main and world.size == 1 and config.run.checkpoint_every:
        pause_when_interrupted(trainer)
    try:
        with captures_in(display.progress) if isinstance(display, RichDisplay) else nullcontext():
            out = trainer.train()
    except Paused as paused:
        console.notes().print(str(paused), markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    world.leave()
    if not world.is_main:
        return
    meta = json.loads((out / "eyas.json").read_text(encoding="utf-8"))
    if as_json:
        console.print_json(meta)
        return
    printer = console.results()
    validation = meta["validation"]
    if validation:
        shares = " ".join(f"{share:.3f}" for share in validation["acceptance"])
        printer.print(f"simulated AL {validation['simulated_al']:.3f}, acceptance by depth {shares}")
    for name, figures in meta.get("decoding", {}).items():
        printer.print(f"{name}: AL {figures['acceptance_length']:.3f} over {figures['num_prompts']} prompts")
    printer.print(f"head in {out}")


def pause_when_interrupted(trainer: Any) -> None:
    """Let the first Ctrl-C or SIGTERM end the run at its next log record, with a checkpoint.

    The second stops at once. SIGTERM is what `timeout`, SLURM and Kubernetes send before they kill. One
    process only: several would not agree on which record is the next.
    """
    import signal
    import time

    ours: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ours = {number: usual for number, usual in ours.items() if signal.getsignal(number) is usual}

    def pause(number: int, frame: Any) -> None:  # noqa: ARG001 -- signal's signature
        for each, usual in ours.items():
            signal.signal(each, usual)
        trainer.deadline = time.monotonic()
        text = "stopping at the next record, with a checkpoint; Ctrl-C again stops at once"
        console.notes().print(text, markup=False)

    for number in ours:
        signal.signal(number, pause)


def open_trainer(
    config: Any,
    *,
    device: str | None,
    display: Any = None,
    world: Any = None,
    loaded: dict[Any, Any] | None = None,
) -> Any:
    """Load what a recipe (TrainConfig) names, and the Trainer over it; nothing is written yet.

    `loaded` keeps targets, stores and packed rows for the next call.
    """
    from eyas.data.store import TokenStore
    from eyas.data.template import ChatTemplate
    from eyas.targets.load import load_target
    from eyas.training.trainer import Trainer

    shared = None if loaded is None else loaded.setdefault("shared", {})
    loaded = {} if loaded is None else loaded
    if config.data.store not in loaded:
        loaded[config.data.store] = TokenStore.load(Path(config.data.store))
    store = loaded[config.data.store]
    dtype = None if config.target.dtype == "auto" else config.target.dtype
    place = device if world is None or world.device is None else str(world.device)
    # Unpacked: training multiplies whole batches, which the CPU's decoding layout does not serve.
    wanted = console.device_and_dtype(place, dtype)
    key = (config.target.path, *wanted.values())
    if key not in loaded:
        loaded[key] = load_target(config.target.path, **wanted, pack=False)
    target = loaded[key]
    template_ids: frozenset[int] = frozenset()
    if getattr(target.tokenizer, "chat_template", None):
        from eyas.cli.data_options import end_ids

        template_ids = ChatTemplate(target.tokenizer, end_ids(target)).own_ids()
    return Trainer(
        config,
        target,
        store,
        template_ids=template_ids,
        display=display,
        evaluate=_evaluator(config, target) if config.decoding.prompts else None,
        world=world,
        shared=shared,
    )


def _evaluator(config: Any, target: Any) -> Any:
    """A callable that decodes real prompts with a head: the AL that users will see."""

    def evaluate(folder: Path) -> dict[str, Any]:
        import torch

        from eyas.core.sampling import SamplingParams
        from eyas.data.sources import read_prompts
        from eyas.engine.llm import LLM

        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        decoding, results = config.decoding, {}
        llm = LLM(
            target,
            folder,
            num_draft_tokens=decoding.num_draft_tokens,
            max_num_seqs=32 if target.device.type == "cuda" else 8,
            max_model_len=min(target.config.max_position_embeddings, 4096),
            gpu_memory_fraction=0.5,
        )
        params = SamplingParams(temperature=0.0, max_tokens=decoding.max_new_tokens)
        for name in decoding.prompts:
            prompts = read_prompts(Path(name), limit=decoding.limit)
            llm.stats.reset()
            llm.chat([prompt.opening for prompt in prompts], params)
            results[Path(name).name.split(".")[0]] = {
                "num_prompts": len(prompts),
                "num_draft_tokens": decoding.num_draft_tokens,
                "acceptance_length": round(llm.stats.acceptance_length, 4),
                "acceptance_by_depth": [round(share, 4) for share in llm.stats.acceptance_by_depth],
            }
        return results

    return evaluate
