"""All that is SQLite's own: addresses, connections, pragmas, and its errors in words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from kgen.errors import DatabaseError

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for another; a tuner's transaction takes milliseconds, an import seconds."""

DAMAGED = "restore a backup beside it (*.bak-*), or move it away and build it again with 'kgen db import'"
_READ_ONLY = "make the file and its folder writable, or name another database with --db"
_ERRORS = {
    sqlite3.SQLITE_BUSY: ("another process keeps it locked", "stop that process, or try again later"),
    sqlite3.SQLITE_LOCKED: ("another process keeps it locked", "stop that process, or try again later"),
    sqlite3.SQLITE_READONLY: ("it is read-only", _READ_ONLY),
    sqlite3.SQLITE_PERM: ("it may not be opened", _READ_ONLY),
    sqlite3.SQLITE_CANTOPEN: ("it, or the -wal and -shm files beside it, cannot be opened", _READ_ONLY),
    sqlite3.SQLITE_CORRUPT: ("the file is damaged", DAMAGED),
    sqlite3.SQLITE_NOTADB: ("not a SQLite database", "check the path; if it was one, " + DAMAGED),
    sqlite3.SQLITE_FULL: ("the disk is full; what was kept before is intact", "free some space and run it again"),
    sqlite3.SQLITE_IOERR: (
        "reading or writing failed; what was kept before is intact",
        "check the disk, its free space and file size limits, and run it again",
    ),
    sqlite3.SQLITE_CONSTRAINT: ("the database refuses this", "trials are only ever added, and never changed"),
}


@dataclass(frozen=True)
class Location:
    """Where a database is; ``path`` is None for one in memory."""

    path: Path | None

    def __str__(self) -> str:
        return "sqlite://" if self.path is None else str(self.path)


def locate(url: str) -> Location:
    """The place that ``sqlite:///path``, a bare path, or ``sqlite://`` (in memory) names. Raises DatabaseError."""
    if url in ("sqlite://", "sqlite:///:memory:", ":memory:"):
        return Location(None)
    path = url.removeprefix("sqlite:///")
    if not path or "://" in path or path.startswith("sqlite:"):
        raise DatabaseError(
            url or "--db", "not an address that kgen can open", remedy="give sqlite:///<path> or a path"
        )
    return Location(Path(path))


@contextmanager
def errors_named(where: object) -> Iterator[None]:
    """Turns SQLite's errors into DatabaseError that says what to do."""
    try:
        yield
    except (sqlite3.Error, DBAPIError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        wrong, remedy = _ERRORS.get(code, ("the database failed", ""))
        raise DatabaseError(str(where), wrong, seen=str(cause), remedy=remedy) from error


def make_engine(location: Location, *, mode: str) -> Engine:
    """An engine whose transactions start where SQLAlchemy says.

    ``mode`` is ``rwc`` (may create the file), ``rw``, ``query`` (changes no data) or ``immutable`` (reads the file
    alone). Every commit is synced to disk (``synchronous=FULL``): a trial costs far more than a sync, so a power cut
    loses no more than a killed process does.
    """
    query_only = mode in ("query", "immutable")
    if location.path is None:
        engine = create_engine("sqlite://", poolclass=StaticPool, creator=lambda: _connect(":memory:", query_only))
    else:
        options = {"query": "mode=rw", "immutable": "mode=ro&immutable=1"}.get(mode, f"mode={mode}")
        uri = f"file:{quote(str(location.path.absolute()))}?{options}"
        engine = create_engine("sqlite://", poolclass=QueuePool, creator=lambda: _connect(uri, query_only))
    event.listen(engine, "begin", _begin)
    return engine


def _connect(uri: str, query_only: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    for pragma in ("foreign_keys=ON", "recursive_triggers=ON", "synchronous=FULL", f"query_only={query_only:d}"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _begin(connection: Connection) -> None:
    """A writer takes the write lock at once: one that has read first could no longer wait for it."""
    writes = connection.get_execution_options().get("kgen_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that holds the write lock from its start."""
    with engine.connect().execution_options(kgen_writes=True) as connection, connection.begin():
        yield connection


def read_only_engine(location: Location) -> Engine:
    """An engine that never changes data, also where the folder does not let SQLite make its -shm file.

    There, a file without pending changes is read as immutable; with pending changes the error stays. Elsewhere the
    connection may write but refuses to: one opened with ``mode=ro`` would leave its -wal and -shm files behind.
    """
    engine = make_engine(location, mode="query")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
        return engine
    except DBAPIError as error:
        engine.dispose()
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or _has_pending_changes(location):
            raise
    return make_engine(location, mode="immutable")


def _has_pending_changes(location: Location) -> bool:
    wal = Path(f"{location.path}-wal")
    return wal.exists() and wal.stat().st_size > 0


def use_wal(engine: Engine) -> None:
    """Lets readers and one writer work at once; the file remembers it."""
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("PRAGMA journal_mode=WAL")
    finally:
        raw.close()


def check_pages(connection: Connection, where: object) -> None:
    """Raises DatabaseError where SQLite's quick check finds a damaged page."""
    seen = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if seen != "ok":
        raise DatabaseError(str(where), "the file is damaged", seen=str(seen), remedy=DAMAGED)
