"""Schemas: what a new file gets, what an old, newer or foreign one is told, and that a migration loses nothing."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from db_trials import make_trial, timed
from sqlalchemy import StaticPool, column, create_engine, insert, table

from kgen.db import Added, MigrationReport, TuningDatabase, migrate, migration, trial_sha256
from kgen.db.record_form import time_rows, trial_row
from kgen.db.schema import metadata
from kgen.errors import DatabaseError
from kgen.records import Rejection

NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade():
    op.add_column("trial", sa.Column("note", sa.Text))
    {more}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "tuning.sqlite"
    with TuningDatabase.open(str(made)) as db:
        db.add_all([make_trial(number=number) for number in range(3)])
    return made


def add_revision(monkeypatch: pytest.MonkeyPatch, folder: Path, more: str = "") -> None:
    """From now on this kgen has one more revision, "0003"."""
    shutil.copytree(migration.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "rev_0003.py").write_text(NEXT.format(more=more))
    monkeypatch.setattr(migration, "MIGRATIONS", folder)


def test_the_migrations_make_the_tables_that_the_code_uses() -> None:
    with TuningDatabase.open("sqlite://") as db, db._engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert context.get_current_revision() == migration.head_revision() == "0002"
        assert compare_metadata(context, metadata) == []
        checks = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE type = 'table'").scalars().all()
    kept = " ".join(" ".join(checks).split())
    for made in metadata.tables.values():
        for constraint in made.constraints:
            assert getattr(constraint, "sqltext", "") is None or str(getattr(constraint, "sqltext", "")) in kept


def test_an_older_schema_is_named_and_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_revision(monkeypatch, tmp_path / "migrations")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(DatabaseError) as caught:
            TuningDatabase.open(str(path), read_only=read_only)
        assert str(caught.value) == f"{path}: schema 0002, this kgen needs 0003; run 'kgen db migrate --db {path}'"
    assert path.read_bytes() == before


def test_migrate_keeps_everything_and_a_backup(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with TuningDatabase.open(str(path)) as db:
        trials = db.trials()
    add_revision(monkeypatch, tmp_path / "migrations 50% new")
    backup = path.with_name("tuning.sqlite.bak-0002")
    assert migrate(f"sqlite:///{path}") == MigrationReport("0002", "0003", backup)
    with TuningDatabase.open(str(path)) as db:
        assert db.trials() == trials
    assert migrate(str(path)) == MigrationReport("0003", "0003", None)
    monkeypatch.undo()
    with TuningDatabase.open(str(backup)) as db:
        assert db.trials() == trials


def test_a_second_backup_does_not_replace_the_first(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = path.with_name("tuning.sqlite.bak-0002")
    first.write_bytes(b"kept")
    add_revision(monkeypatch, tmp_path / "migrations")
    assert migrate(str(path)).backup == path.with_name("tuning.sqlite.bak-0002.2")
    assert first.read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('op.execute("DROP TRIGGER trial_no_delete"); op.execute("DELETE FROM trial")', "3 trials before, 0 after"),
        ('op.execute("DROP TRIGGER trial_no_update"); op.execute("UPDATE trial SET id = id + 9")', "without a trial"),
        ('op.execute("nonsense")', "syntax error"),
    ],
)
def test_a_migration_that_fails_or_loses_trials_is_undone(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str, message: str
) -> None:
    add_revision(monkeypatch, tmp_path / "migrations", more)
    with pytest.raises(DatabaseError, match=message):
        migrate(str(path))
    monkeypatch.undo()
    with TuningDatabase.open(str(path)) as db:
        assert len(db.trials()) == 3


def test_a_newer_schema_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_revision(monkeypatch, tmp_path / "migrations")
    migrate(str(path))
    monkeypatch.undo()
    with pytest.raises(DatabaseError, match=r"schema '0003' is unknown to this kgen, which needs 0002; .*upgrade kgen"):
        TuningDatabase.open(str(path))
    with pytest.raises(DatabaseError, match="schema '0003' is unknown"):
        migrate(str(path))


def test_a_strangers_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE people (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="not a kgen tuning database, tables people"):
        TuningDatabase.open(str(path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_the_first_schema_keeps_its_trials_and_can_be_added_to(tmp_path: Path) -> None:
    path, record = tmp_path / "first.sqlite", make_trial(timed(3.0, prefix=1), timed(4.0, prefix=2))
    with closing(sqlite3.connect(path)) as other:
        engine = create_engine("sqlite://", creator=lambda: other, poolclass=StaticPool)
        with engine.begin() as connection:
            command.upgrade(migration._config(connection), "0001")
            row = {name: value for name, value in trial_row(record).items() if name != "reference"}
            connection.execute(insert(table("trial", *map(column, row))).values(row))
            for times in time_rows(1, record):
                row = {name: value for name, value in times.items() if name != "reference_us"}
                connection.execute(insert(table("point_time", *map(column, row))).values(row))
    with pytest.raises(DatabaseError, match="schema 0001, this kgen needs 0002; run 'kgen db migrate"):
        TuningDatabase.open(str(path))
    assert migrate(str(path)).after == "0002"
    with TuningDatabase.open(str(path)) as db:
        assert db.trials() == [record]
        assert db.select()[0].trial_sha256 == trial_sha256(record)
        assert db.add_all([record], [Rejection("verify_mla", "name", "0" * 64, "why")]) == Added(1, 1)


def test_migrate_wants_a_file(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no such file"):
        migrate(str(tmp_path / "none"))
