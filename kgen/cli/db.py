"""``kgen db``: the tuning database as text, merged and migrated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kgen.cli.console import JsonFlag, write_json
from kgen.cli.options import DatabaseFlag, database_url
from kgen.resources import TUNING_DB

app = typer.Typer(no_args_is_help=True, help="Export, import, merge and migrate tuning databases.")


@app.command("export")
def export_command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the text files.")] = TUNING_DB,
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Write all trials as text: JSON lines, one trial a line, the same bytes for the same trials.

    The files are <family>.<target>.<evidence>[.<device>].jsonl. A file is never replaced by one that lacks its lines.

    \b
    Examples:
      kgen db export
      kgen db export --db mine.sqlite --out reviewed/

    Files go to --out (default: tuning_db/ of the checkout); their names go to stdout.
    """
    from kgen.db import TuningDatabase
    from kgen.db.text_form import export_text

    with TuningDatabase.open(database_url(db), read_only=True) as database:
        files = export_text(database, out)
    if json:
        write_json({"files": files})
        return
    for path in files:
        typer.echo(path)


@app.command("import")
def import_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Text files, or folders of *.jsonl. Default: the shipped tuning_db/."),
    ] = None,
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Add the trials of text files to a database: all of them or, where one line is wrong, none.

    Trials that are there already are counted and left alone, so importing twice is harmless.

    \b
    Examples:
      kgen db import
      kgen db import reviewed/ --db mine.sqlite

    Trials go to --db, which is made where it is missing.
    """
    from kgen.db import TuningDatabase
    from kgen.db.text_form import import_text

    with TuningDatabase.open(database_url(db)) as database:
        added = import_text(database, paths or [TUNING_DB])
        where = database.where
    _report_added(added.added, added.already_there, where, json)


@app.command("merge")
def merge_command(
    other: Annotated[str, typer.Argument(metavar="URL", help="Database to take trials from; it is only read.")],
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Add the trials of another database that this one lacks.

    \b
    Examples:
      kgen db merge from_the_h200.sqlite
      kgen db merge sqlite:////mnt/share/tuning.sqlite --db mine.sqlite

    Trials go to --db.
    """
    from kgen.db import TuningDatabase
    from kgen.db.text_form import merge

    with TuningDatabase.open(database_url(db)) as database:
        added = merge(database, other)
        where = database.where
    _report_added(added.added, added.already_there, where, json)


@app.command("migrate")
def migrate_command(db: DatabaseFlag = None, json: JsonFlag = False) -> None:
    """Raise a database of an older kgen to this one's schema, after a backup beside it.

    Nothing else ever changes a schema; a database of a newer kgen is refused.

    \b
    Examples:
      kgen db migrate
      kgen db migrate --db mine.sqlite --json

    The database is changed in place; the backup's name goes to stdout.
    """
    from kgen.db import migrate

    url = database_url(db)
    report = migrate(url)
    if json:
        write_json({"db": url, "before": report.before, "after": report.after, "backup": report.backup})
    elif report.before == report.after:
        typer.echo(f"{url}: already at schema {report.after}")
    else:
        typer.echo(f"{url}: schema {report.before} -> {report.after}; backup in {report.backup}")


@app.command("reject")
def reject_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name of a source, as kgen show trials prints it.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Who found what; kept for good.")],
    take_back: Annotated[
        bool, typer.Option("--undo", help="Take the rejections of the source back instead; they stay on record.")
    ] = False,
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Put a source out of the running: it is not tried again, cannot win and cannot be packed.

    Whatever kgen's own checks say of it, then or later, on any machine: a rejection is of the source's text, is kept
    beside the trials, travels with export, import and merge, and stands until it is taken back with --undo.

    \b
    Examples:
      kgen db reject verify_mla__flash_m16_n16_s2_w4_g1_k4_bulk_eager_b2__d3c0729e --reason "racecheck: 42 hazards"
      kgen db reject verify_mla__flash_m16_n16_s2_w4_g1_k4_bulk_eager_b2__d3c0729e --undo --reason "explained in #12"

    Rejections go to --db; kgen show rejected lists those that stand.
    """
    from kgen.db import TuningDatabase
    from kgen.db.reject import reject, undo

    url = database_url(db)
    with TuningDatabase.open(url, create=False) as database:
        added = (undo if take_back else reject)(database, source, reason)
    if json:
        write_json({"db": url, "source": source, "added": added})
    elif take_back:
        typer.echo(f"{url}: {source} may be tried and win again")
    else:
        typer.echo(f"{url}: {source} is out" + ("" if added else ", as it was before"))


def _report_added(added: int, already_there: int, where: str, json: bool) -> None:
    if json:
        write_json({"db": where, "added": added, "already_there": already_there})
    else:
        typer.echo(f"{where}: {added} trials and rejections added, {already_there} were there already")
