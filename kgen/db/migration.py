"""The schema's revisions: made with alembic, checked at every opening, raised only when asked to."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from kgen.db.schema import trial
from kgen.db.sqlite_file import check_pages, errors_named, locate, make_engine
from kgen.errors import DatabaseError

MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True)
class MigrationReport:
    """What `migrate` did; ``backup`` is None where there was nothing to do."""

    before: str
    after: str
    backup: Path | None


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head_revision() -> str:
    """The revision that this kgen reads and writes."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _known_revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def current_revision(connection: Connection, where: object) -> str | None:
    """The revision of a database, None for one without tables. Raises DatabaseError for a stranger's."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if "alembic_version" in tables:
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        if len(found) == 1 and (trial.name in tables or found[0] not in _known_revisions()):
            return str(found[0])
    raise DatabaseError(
        str(where),
        "not a kgen tuning database",
        seen=f"tables {', '.join(sorted(tables)[:4])}",
        remedy="name another file with --db; kgen leaves this one alone",
    )


def check_revision(found: str, where: object) -> None:
    """Raises DatabaseError unless ``found`` is the revision of this kgen."""
    needed = head_revision()
    if found == needed:
        return
    if found in _known_revisions():
        raise DatabaseError(
            str(where), f"schema {found}, this kgen needs {needed}", remedy=f"run 'kgen db migrate --db {where}'"
        )
    raise DatabaseError(
        str(where),
        f"schema {found!r} is unknown to this kgen, which needs {needed}",
        remedy="a newer kgen made it: upgrade kgen; or it is not a tuning database: name another file with --db",
    )


def upgrade(connection: Connection) -> None:
    """Brings the database to the head revision, inside the transaction that ``connection`` is in."""
    command.upgrade(_config(connection), "head")


def migrate(url: str) -> MigrationReport:
    """Raises an older database to this kgen's schema: backup beside it first, then one transaction, checked at its end.

    Raises DatabaseError, and leaves the file as it was, where any of that fails.
    """
    location = locate(url)
    if location.path is None or not location.path.is_file():
        raise DatabaseError(str(location), "no such file", remedy="give the database to migrate")
    engine = make_engine(location, mode="rw")
    try:
        with errors_named(location), engine.connect() as connection:
            check_pages(connection, location)
            before = current_revision(connection, location)
        if before is None or before == head_revision():
            return MigrationReport(before or "", before or "", None)
        if before not in _known_revisions():
            check_revision(before, location)
        with errors_named(location):
            backup = _back_up(location.path, before)
            _upgrade_checked(engine, location)
        return MigrationReport(before, head_revision(), backup)
    finally:
        engine.dispose()


def _back_up(path: Path, revision: str) -> Path:
    """A complete copy, pending changes included, under a name that nothing had before."""
    number, backup = 1, path.with_name(f"{path.name}.bak-{revision}")
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.bak-{revision}.{number}")
    unfinished = path.with_name(f"{backup.name}.tmp{os.getpid()}")
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(unfinished)) as copy:
            source.backup(copy)
        unfinished.replace(backup)
    finally:
        unfinished.unlink(missing_ok=True)
    return backup


def _upgrade_checked(engine: Engine, where: object) -> None:
    with engine.connect().execution_options(kgen_writes=True) as connection:
        # A table that is rebuilt is dropped for a moment, which foreign keys would refuse; they are checked at the end.
        connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                before = connection.execute(text("SELECT count(*) FROM trial")).scalar_one()
                upgrade(connection)
                after = connection.execute(text("SELECT count(*) FROM trial")).scalar_one()
                check_pages(connection, where)
                dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if before != after or dangling:
                    raise DatabaseError(
                        str(where),
                        "the migration would lose trials and was undone",
                        seen=f"{before} trials before, {after} after, {len(dangling)} times without a trial",
                    )
        finally:
            connection.connection.cursor().execute("PRAGMA foreign_keys=ON")
