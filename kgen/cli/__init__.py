"""The ``kgen`` command: one module a command, and one place where errors become a line and an exit code.

Exit codes: 0, done; 1, the work failed; 2, wrong usage or input; 130, interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import kgen
from kgen.cli import bench, check, console, coverage, db, defrag, doctor, pack, render, show, tune, why
from kgen.errors import KgenError

OVERVIEW = """Generate, prove, tune and freeze CUDA kernels from declarative specs.

The pipeline, left to right: spec -> space -> render -> build -> validate -> measure -> tuning database -> pack ->
dispatch. A first run, which needs no GPU: kgen tune --spec verify_mla.yaml

Every command takes --json (stdout is then one JSON document) and exits 0 (done), 1 (the work failed), 2 (wrong usage
or input) or 130 (interrupted; what was done is kept).
"""

INTERRUPTED = 130

app = typer.Typer(
    name="kgen",
    help=OVERVIEW,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(tune.tune)
app.command()(pack.emit)
app.command()(render.render)
app.command()(check.check)
app.command()(bench.bench)
app.add_typer(show.app, name="show")
app.command()(why.why)
app.command()(coverage.coverage)
app.command()(doctor.doctor)
app.add_typer(db.app, name="db")
app.add_typer(pack.app, name="pack")
app.add_typer(defrag.app, name="defrag")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kgen {kgen.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
) -> None:
    """Options of every command; `main` looks at --debug, and typer handles --version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code; never raises."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console.open_missing_streams()
    try:
        result = app(args=words, prog_name="kgen", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        console.discard_stdout()
        return 1
    except (KeyboardInterrupt, typer.Abort):
        console.report_interrupt()
        return INTERRUPTED
    except KgenError as error:
        console.report_error(error, as_json="--json" in words)
        return error.exit_code
    except typer.TyperException as error:
        console.report_usage(error, as_json="--json" in words)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - a bug must still end in a line and an exit code
        if "--debug" in words:
            traceback.print_exc()
        return console.report_unforeseen(error, as_json="--json" in words)
    if result == INTERRUPTED:  # typer turns Ctrl-C inside a command into this
        console.report_interrupt()
    return result if isinstance(result, int) else 0
