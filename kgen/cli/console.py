"""What people and machines see: one JSON document or lines and tables on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from kgen.errors import InputError, KgenError

if TYPE_CHECKING:
    from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; the rest goes to stderr.")]

PIPE_WIDTH = 240
"""Columns where stdout is not a terminal: tables in files and pipes are never cropped."""


def note(text: str) -> None:
    """One line about the work on stderr, so that stdout stays what was asked for."""
    typer.echo(text, err=True)


def write_json(document: object) -> None:
    """The one JSON document of a command. Dataclasses become objects, paths become strings."""
    typer.echo(json.dumps(document, indent=2, default=_plain, allow_nan=False))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def write_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout; columns of numbers are right-aligned. Numbers come formatted, with their unit in the head."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    texts = [[str(cell) for cell in row] for row in rows]
    for number, name in enumerate(columns):
        numeric = bool(texts) and all(_is_number(row[number]) for row in texts)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))
    console = _stdout()
    with console.capture() as printed:
        console.print(table)
    lines = [line.rstrip() for line in printed.get().splitlines()]
    typer.echo("\n".join([title, *lines] if title else lines))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace(",", "").replace("-", "0", 1).isdigit()


def _stdout() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


class Advance(Protocol):
    """Moves a progress bar to ``done`` of ``total`` steps and shows ``text`` beside it."""

    def __call__(self, done: int, total: int, text: str = "") -> None:
        """Show the step."""


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """A progress bar on stderr where that is a terminal; elsewhere one line at each tenth of the work."""
    if sys.stderr.isatty():
        yield from _progress_bar(label)
        return
    tenth = -1

    def advance(done: int, total: int, text: str = "") -> None:
        nonlocal tenth
        now = 10 * done // max(total, 1)
        if now != tenth:  # less than before where another part of the work begins
            tenth = now
            note(f"{label}: {done}/{total} {text}".rstrip())

    yield advance


def _progress_bar(label: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, text="")

        def advance(done: int, total: int, text: str = "") -> None:
            bar.update(task, completed=done, total=total, text=text)

        yield advance


def report_error(error: KgenError, *, as_json: bool) -> None:
    """``error: where: wrong, seen; remedy`` on stderr, and as the JSON document where one is due."""
    _report(str(error), as_json, where=error.where, wrong=error.wrong, seen=error.seen, remedy=error.remedy)


def report_usage(error: typer.TyperException, *, as_json: bool) -> None:
    """A command line that typer refused; a bare command group shows its help instead."""
    context: typer.Context | None = getattr(error, "ctx", None)
    command = context.command_path if context else "kgen"
    message = error.format_message()
    if message.lstrip().startswith("Usage:"):
        note(message)
        return
    wrong = " ".join(message.split()).rstrip(".")
    remedy = f"see '{command} --help'"
    _report(f"{command}: {wrong}; {remedy}", as_json, where=command, wrong=wrong, seen="", remedy=remedy)


def report_interrupt() -> None:
    """Ctrl-C is not an error of anybody's."""
    note("interrupted; what was done is kept")


def report_unforeseen(error: Exception, *, as_json: bool) -> int:
    """An exception that kgen did not mean to raise: a bug, but where the system refused; returns the exit code."""
    if isinstance(error, OSError):
        refusal = _refusal(error)
        report_error(refusal, as_json=as_json)
        return refusal.exit_code
    _report_bug(error, as_json)
    return KgenError.exit_code


def _refusal(error: OSError) -> KgenError:
    """A file that was named and may not be used, or a system without memory, processes or room."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return KgenError("operating system", "refused what kgen needs", seen=reason)
    return InputError(os.fsdecode(error.filename), "cannot be used", seen=reason)


def _report_bug(error: Exception, as_json: bool) -> None:
    wrong = f"this is a bug in kgen: {type(error).__name__}: {' '.join(str(error).split())}"
    remedy = "run 'kgen --debug ...' and report the traceback"
    _report(f"{wrong}; {remedy}", as_json, where="kgen", wrong=wrong, seen="", remedy=remedy)


def _report(line: str, as_json: bool, **parts: str) -> None:
    style, reset = ("\033[1;31m", "\033[0m") if _coloured_stderr() else ("", "")
    note(f"{style}error:{reset} {line}")
    if as_json:
        try:
            write_json({"error": parts})
            sys.stdout.flush()
        except OSError:  # nobody reads it, or there is no room for it
            discard_stdout()


def open_missing_streams() -> None:
    """Give a process that was started with stdout or stderr closed somewhere to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the process's life


def discard_stdout() -> None:
    """Send what Python still holds for stdout nowhere, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _coloured_stderr() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
