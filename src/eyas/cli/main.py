"""The `eyas` command: a table of verbs, each imported only when it is called.

Plug a verb in: write `src/eyas/cli/<verb>.py`, add one line to VERBS. The module exposes ONE of

    def command(prompt: str, k: Annotated[int, typer.Option("--k", "-k", help="...")] = 7) -> None: ...
    app = typer.Typer(help="...")          with @app.command() functions: `eyas data show`, ...

Rules for verb modules: import torch, transformers and eyas packages inside the function bodies (`typer`,
`rich` and `eyas.cli.console` are fine on top); raise EyasError for bad input (printed without a traceback,
exit status 2); print results to stdout, progress and notes to stderr (`console.notes()`); where a verb prints
results, offer `--json` (one JSON document on stdout, nothing else there).

`eyas --help` is rendered from this table alone, so it needs no verb module.
"""

import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives and the line that `eyas --help` shows for it."""

    module: str
    help: str


VERBS: dict[str, Verb] = {
    "compare": Verb(
        "eyas.cli.compare", "Decode the same prompts with and without draft heads, side by side."
    ),
    "generate": Verb("eyas.cli.generate", "Answer one prompt, with or without a drafter."),
    "serve": Verb("eyas.cli.serve", "Serve a target, with or without a head, to OpenAI's clients."),
    "verify": Verb("eyas.cli.verify", "Show on your own target and head that drafting changes no token."),
    "train": Verb("eyas.cli.train", "Train a draft head from a recipe."),
    "study": Verb("eyas.cli.study", "Train variants of a recipe with equal steps, and compare them."),
    "bench": Verb("eyas.cli.bench", "Measure speed: a step against the hardware, methods under load."),
    "calibrate": Verb("eyas.cli.calibrate", "Find the number of drafts that is fastest on this device."),
    "data": Verb("eyas.cli.data", "Make and look at training data."),
    "export": Verb("eyas.cli.export", "Write a head in the format that vLLM and SGLang load."),
    "import": Verb("eyas.cli.import_", "Read a head that another tool wrote."),
    "models": Verb("eyas.cli.models", "Get small real models to try things on."),
    "doctor": Verb("eyas.cli.doctor", "Versions, devices and threads; or a training recipe, examined."),
}


def load_verb(name: str) -> Any:
    """Import a verb's module and return its click command."""
    module = import_module(VERBS[name].module)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(help=module.command.__doc__)(module.command)
    command = typer.main.get_command(app)
    command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
    return command


class LazyVerbs(typer.core.TyperGroup):
    """A command group that knows its verbs' names and imports one when it is called."""

    _listing = False

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # names only: what "did you mean" looks at

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 -- click's signature
        """Verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 -- click's signature
        """Return the verb's command; while help is rendered, a stand-in that holds the help line."""
        if cmd_name not in VERBS:
            return None
        if self._listing:
            return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name].help)
        return load_verb(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Render the table without importing the verbs."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(cls=LazyVerbs, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from eyas import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Train EAGLE-3 and P-EAGLE draft heads, prove that they change nothing but the speed, run them."""


def main(args: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with one line and status 2, not with a traceback."""
    from eyas.core.errors import EyasError, out_of_memory

    with_source, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        status = app(args, prog_name="eyas", standalone_mode=False)
    except UsageError as error:
        _explain(error)
        sys.exit(2)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        first = str(error).partition("\n")[0]
        print(
            f"error: not enough memory for these sizes; lower batches, rows, lengths or K ({first})",
            file=sys.stderr,
        )
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        warnings.formatwarning = with_source
    sys.exit(status if isinstance(status, int) else 0)


def _one_line(message: Warning | str, *_where: Any, **_line: Any) -> str:
    """A warning without the file and the line of code that it comes from."""
    return f"warning: {message}\n"


UsageError: Any = typer.BadParameter.__bases__[0]
"""Every mistake in flags and arguments; typer carries its own copy of click, or click's own, by version."""


def _explain(error: Any) -> None:
    """One line that names the flag and where to read on; a verb without anything shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    path = error.ctx.command_path if error.ctx is not None else "eyas"
    message = " ".join(error.format_message().split()).rstrip(".")
    print(f"error: {message} (see {path} --help)", file=sys.stderr)


if __name__ == "__main__":
    main()
