"""Damaged files, full disks, read-only folders, killed writers, two writers: a clear error, or it just works."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from db_trials import make_trial

from kgen.db import TuningDatabase, export_text
from kgen.db.sqlite_file import use_wal
from kgen.errors import DatabaseError

ADD = """
import sys
from db_trials import make_trial
from kgen.db import TuningDatabase
path, run, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with TuningDatabase.open(path) as db:
    for number in range(count):
        db.add_trial(make_trial(run_id=run, number=number))
        print(number, flush=True)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent.parent}:{Path(__file__).parent}"}


# Lets file modes bind root too: drops CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which others do not have anyway.
BOUND_BY_MODES = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def start(*script_and_arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", *map(str, script_and_arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def output_of(*script_and_arguments: object) -> str:
    return start(*script_and_arguments).communicate(timeout=120)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "folder" / "tuning.sqlite"
    with TuningDatabase.open(str(made)) as db:
        db.add_all([make_trial(number=number) for number in range(100)])
    return made


def test_two_processes_tune_into_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    both = [start(ADD, path, run, 50) for run in ("a", "b")]
    assert [process.communicate(timeout=120)[0].split()[-1] for process in both] == ["49", "49"]
    with TuningDatabase.open(str(path)) as db:
        for run in ("a", "b"):
            assert [trial.number for trial in db.trials(run_id=run)] == list(range(50))


@pytest.mark.parametrize("seen", [1, 7, 30])
def test_a_killed_writer_loses_at_most_the_trial_in_flight(tmp_path: Path, seen: int) -> None:
    path = tmp_path / "tuning.sqlite"
    process = start(ADD, path, "run", 100_000)
    assert process.stdout is not None
    kept = [process.stdout.readline() for _ in range(seen)]
    time.sleep(0.003 * (seen % 5))
    process.send_signal(signal.SIGKILL)
    kept += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    with TuningDatabase.open(str(path)) as db:  # checks every page
        numbers = [trial.number for trial in db.trials()]
        assert all(len(trial.times) == 1 for trial in db.trials())
        assert numbers == list(range(len(numbers)))
        assert len(numbers) - len(kept) in (0, 1)
        db.add_trial(make_trial())


def test_a_full_disk_is_named_and_the_rest_is_intact(path: Path) -> None:
    with TuningDatabase.open(str(path)) as db:
        with db._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 1}")
        with pytest.raises(DatabaseError, match="the disk is full; what was kept before is intact") as caught:
            db.add_all([make_trial(run_id="new", number=number) for number in range(500)])
        assert caught.value.remedy == "free some space and run it again"
        assert len(db.trials()) == 100
    with TuningDatabase.open(str(path)) as db:
        assert db.add_trial(make_trial(run_id="new")) == 101


LIMITED = """
import resource, sys
from db_trials import make_trial
from kgen.db import TuningDatabase
from kgen.errors import DatabaseError
with TuningDatabase.open(sys.argv[1]) as db:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for number in range(100_000):
            db.add_trial(make_trial(run_id="new", number=number))
    except DatabaseError as error:
        print(number, error)
"""


def test_a_write_that_the_system_refuses_is_named_and_the_rest_is_intact(path: Path) -> None:
    number, _, message = output_of(LIMITED, path).partition(" ")
    assert "what was kept before is intact" in message
    with TuningDatabase.open(str(path)) as db:
        assert len(db.trials()) == 100 + int(number)


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be taken for one\n" * 100)
    with pytest.raises(DatabaseError, match="not a SQLite database"):
        TuningDatabase.open(str(path))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_truncated_file_is_named(path: Path, read_only: bool) -> None:
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DatabaseError, match=r"the file is damaged.*'kgen db import'"):
        TuningDatabase.open(str(path), read_only=read_only)


@pytest.mark.parametrize("page", [1, 5, 12])
def test_a_damaged_page_is_named(path: Path, page: int) -> None:
    with path.open("r+b") as file:
        file.seek(page * 4096)
        file.write(os.urandom(4096))
    with pytest.raises(DatabaseError, match="the file is damaged"):
        TuningDatabase.open(str(path))


def test_damage_while_in_use_is_named(path: Path) -> None:
    with TuningDatabase.open(str(path), read_only=True) as db:
        size = path.stat().st_size
        db._engine.dispose()
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))
        with pytest.raises(DatabaseError, match="the file is damaged"):
            db.trials()


TRY = """
import sys
from db_trials import make_trial
from kgen.db import TuningDatabase
from kgen.errors import DatabaseError
for read_only in (True, False):
    try:
        with TuningDatabase.open(sys.argv[1], read_only=read_only) as db:
            print(len(db.trials()), end=" ")
            db.add_trial(make_trial(run_id="new"))
            print("added")
    except DatabaseError as error:
        print(error)
"""


@pytest.mark.parametrize("what", ["file", "folder", "both"])
def test_what_is_read_only_can_be_read_and_not_written(path: Path, what: str) -> None:
    path.chmod(0o644 if what == "folder" else 0o444)
    path.parent.chmod(0o755 if what == "file" else 0o555)
    try:
        reading, writing = output_of(BOUND_BY_MODES, TRY, path).splitlines()
    finally:
        path.parent.chmod(0o755)
    assert reading.startswith(f"100 {path}: it is read-only")
    assert "make the file and its folder writable" in writing


def test_a_folder_that_may_not_be_made_is_named(path: Path) -> None:
    path.parent.chmod(0o555)
    try:
        reading, writing = output_of(BOUND_BY_MODES, TRY, path.parent / "new" / "db").splitlines()
    finally:
        path.parent.chmod(0o755)
    assert "no such database" in reading
    assert "its folder cannot be used" in writing


def test_a_held_lock_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.db.sqlite_file.BUSY_TIMEOUT_S", 0.1)
    with TuningDatabase.open(str(path)) as one, TuningDatabase.open(str(path)) as other:
        with one._writing(), pytest.raises(DatabaseError, match="another process keeps it locked"):
            other.add_trial(make_trial(run_id="new"))
        assert other.add_trial(make_trial(run_id="new")) == 101


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://host/db", "not an address that kgen can open"),
        ("sqlite:/typo", "not an address"),
        ("", "not an address"),
        ("{folder}", "a folder, not a database"),
        ("{folder}/none", "no such database"),
        ("{folder}/empty", "an empty file"),
        ("{folder}/tuning.sqlite/inside", "cannot be used|no such database"),
    ],
)
def test_wrong_addresses_are_named(path: Path, url: str, message: str) -> None:
    (path.parent / "empty").touch()
    for read_only in (False, True):
        with pytest.raises(DatabaseError, match=message):
            TuningDatabase.open(url.format(folder=path.parent), create=False, read_only=read_only)


def test_the_journal_survives_reopening(path: Path) -> None:
    with TuningDatabase.open(str(path)) as db, db._engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys")
        assert [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas] == ["wal", 2, 1]
        use_wal(db._engine)


@pytest.mark.parametrize(
    ("change", "exported", "says"),
    [
        ("trial SET layout = '{\"heads' WHERE id = 7", False, "trial 7 is damaged, Unterminated string"),
        ("point_time SET relative_error = 0.5 WHERE trial_id = 7", True, "trial 7 is not what was recorded; restore"),
    ],
)
def test_a_changed_row_is_named(path: Path, tmp_path: Path, change: str, exported: bool, says: str) -> None:
    table = change.split(maxsplit=1)[0]
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"DROP TRIGGER {table}_no_update")
        raw.execute(f"UPDATE {change}")
    with TuningDatabase.open(str(path)) as db, pytest.raises(DatabaseError, match=f"{path}: {says}"):
        export_text(db, tmp_path / "text") if exported else db.trials()
    assert not (tmp_path / "text").exists()
