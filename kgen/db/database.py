"""The tuning database: opened, added to and read; nothing in it is ever changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Engine, and_, select, true

from kgen.canonical import canonical_json
from kgen.db.migration import check_revision, current_revision, upgrade
from kgen.db.record_form import (
    StoredTrial,
    dated,
    rejection_sha256,
    settled,
    time_rows,
    trial_from_rows,
    trial_row,
)
from kgen.db.schema import point_time, rejection, trial
from kgen.db.sqlite_file import (
    DAMAGED,
    Location,
    check_pages,
    errors_named,
    locate,
    make_engine,
    read_only_engine,
    use_wal,
    writing,
)
from kgen.errors import DatabaseError
from kgen.records import Rejection, TrialRecord


@dataclass(frozen=True)
class Added:
    """How many trials and rejections were new, and how many the database had already."""

    added: int
    already_there: int


class TuningDatabase:
    """Append-only trials in one SQLite file. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine, location: Location) -> None:
        """For `open`, which is how a database is made."""
        self._engine = engine
        self.where = str(location)

    @classmethod
    def open(cls, url: str, *, create: bool = True, read_only: bool = False) -> Self:
        """Opens ``sqlite:///path``, a bare path or ``sqlite://`` (in memory); a new file, and its folder, are made.

        Raises DatabaseError: no such file (with ``create`` off or ``read_only``), damaged, not a tuning database,
        of an older schema (never migrated unasked) or a newer one, locked, or not writable.
        """
        location = locate(url)
        _prepare_path(location, create=create and not read_only)
        with errors_named(location):
            engine = read_only_engine(location) if read_only else make_engine(location, mode="rwc" if create else "rw")
            try:
                _settle_schema(engine, location, create=create and not read_only, writes=not read_only)
            except BaseException:
                engine.dispose()
                raise
        return cls(engine, location)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; the last one to close folds the -wal file into the database."""
        self._engine.dispose()

    def add_trial(self, record: TrialRecord) -> int:
        """Keeps one trial in one transaction and returns its id; adding the very same trial again returns the first's.

        A record without ``created_at`` is dated now. Raises DatabaseError: what the record claims may not be
        (see `kgen.db.record_form.check_trial`), a full disk, a read-only file; nothing of it is kept then.
        """
        kept = self._settled(record)
        with self._writing() as connection:
            return _insert(connection, kept)[0]

    def add_all(self, records: Iterable[TrialRecord], rejections: Sequence[Rejection] = ()) -> Added:
        """Keeps all trials and rejections, or none, in one transaction. Raises DatabaseError as `add_trial` does."""
        kept = [self._settled(record) for record in records]
        if not kept and not rejections:
            return Added(0, 0)
        with self._writing() as connection:
            added = sum(_insert(connection, record)[1] for record in kept)
            added += sum(_insert_rejection(connection, item) for item in rejections)
        return Added(added, len(kept) + len(rejections) - added)

    def rejections(self) -> list[Rejection]:
        """All rejections, those too that were taken back, in the order in which this database got them."""
        names = [item.name for item in fields(Rejection)]
        rows = select(*(rejection.c[name] for name in names)).order_by(rejection.c.id)
        with errors_named(self.where), self._engine.connect() as connection:
            return [Rejection(**row) for row in connection.execute(rows).mappings()]

    def trials(self, **filters: str | int | Mapping[str, Any]) -> list[TrialRecord]:
        """The trials whose fields equal the given ones, in the order in which this database got them.

        Mappings (``layout``, ``candidate``) are compared by value. Raises TypeError for what is no field of a trial.
        """
        return [stored.record for stored in self.select(_equal(filters))]

    def select(self, condition: ColumnElement[bool] | None = None) -> list[StoredTrial]:
        """The trials that meet an SQL condition over table ``trial``, with ids and digests, by id."""
        chosen = true() if condition is None else condition
        rows = select(trial).where(chosen).order_by(trial.c.id)
        times = select(point_time).join(trial).where(chosen).order_by(point_time.c.trial_id, point_time.c.position)
        with errors_named(self.where), self._engine.connect() as connection:
            times_of: dict[int, list[Mapping[Any, Any]]] = defaultdict(list)
            for row in connection.execute(times).mappings():
                times_of[row["trial_id"]].append(row)
            return [self._whole(row, times_of[row["id"]]) for row in connection.execute(rows).mappings()]

    def _whole(self, row: Mapping[Any, Any], times: Sequence[Mapping[Any, Any]]) -> StoredTrial:
        """The trial of these rows. Its digest is not computed here, which would take longer than all else."""
        try:
            return trial_from_rows(row, times)
        except ValueError as error:
            raise DatabaseError(self.where, f"trial {row['id']} is damaged", seen=str(error), remedy=DAMAGED) from None

    def _settled(self, record: TrialRecord) -> TrialRecord:
        try:
            return settled(record)
        except ValueError as error:
            raise DatabaseError(
                f"trial of {record.source_name or record.family}", "not kept", seen=str(error)
            ) from None

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with errors_named(self.where), writing(self._engine) as connection:
            yield connection


def _prepare_path(location: Location, *, create: bool) -> None:
    path = location.path
    if path is None:
        return
    try:
        if path.is_dir():
            raise DatabaseError(str(path), "a folder, not a database", remedy="give the path of a file")
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.is_file():
            raise DatabaseError(
                str(path), "no such database", remedy="check the path, or run 'kgen tune' or 'kgen db import' first"
            )
    except OSError as error:
        raise DatabaseError(
            str(path), "its folder cannot be used", seen=str(error), remedy="name another database with --db"
        ) from error


def _settle_schema(engine: Engine, location: Location, *, create: bool, writes: bool) -> None:
    """Checks what is there before anything is written; makes the tables of a new file."""
    with engine.connect() as connection:
        check_pages(connection, location)
        found = current_revision(connection, location)
    if found is None and not create:
        raise DatabaseError(str(location), "an empty file, not a tuning database", remedy="check the path")
    if found is not None:
        check_revision(found, location)
    if writes:
        use_wal(engine)
        with writing(engine) as connection:
            # Another process may have made the tables since.
            if current_revision(connection, location) is None:
                upgrade(connection)


def _equal(filters: Mapping[str, Any]) -> ColumnElement[bool]:
    unknown = filters.keys() - ({item.name for item in fields(TrialRecord)} - {"device", "times"})
    if unknown:
        raise TypeError(f"trials cannot be selected by {', '.join(sorted(unknown))}")
    values = {
        name: canonical_json(value).decode() if isinstance(value, Mapping) else value for name, value in filters.items()
    }
    return and_(true(), *(trial.c[name] == value for name, value in values.items()))


def _insert(connection: Connection, record: TrialRecord) -> tuple[int, bool]:
    """The trial's id, and whether it is new."""
    row = trial_row(record)
    known = connection.execute(select(trial.c.id).where(trial.c.trial_sha256 == row["trial_sha256"])).scalar()
    if known is not None:
        return int(known), False
    key = connection.execute(trial.insert().values(row)).inserted_primary_key
    trial_id = int(key[0]) if key else 0
    times = time_rows(trial_id, record)
    if times:
        connection.execute(point_time.insert(), times)
    return trial_id, True


def _insert_rejection(connection: Connection, item: Rejection) -> bool:
    """Whether it is new."""
    item = dated(item)
    digest = rejection_sha256(item)
    known = select(rejection.c.id).where(rejection.c.rejection_sha256 == digest)
    if connection.execute(known).scalar() is not None:
        return False
    connection.execute(rejection.insert().values(rejection_sha256=digest, **vars(item)))
    return True
