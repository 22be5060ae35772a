"""The tuning database keeps what it is given, refuses what may not be, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from db_trials import LAYOUT, made_at, make_trial, timed, trials
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Dialect, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateTable

from kgen.canonical import canonical_json, key_text
from kgen.db import TuningDatabase, trial_sha256
from kgen.db.schema import point_time, trial
from kgen.errors import DatabaseError
from kgen.records import Rejection, TrialRecord


@pytest.fixture
def db() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


def test_a_trial_comes_back_as_it_was(db: TuningDatabase) -> None:
    beside = replace(timed(0.1 + 0.2, prefix=7), reference_us=0.7)
    record = make_trial(timed(3.25, 3.0, 4.5, prefix=0), beside, relative_error=1e-3, reference="other")
    assert db.add_trial(record) == 1
    assert db.trials() == [record]
    assert db.select()[0].trial_sha256 == trial_sha256(record)


@given(st.lists(trials(), max_size=5))
@settings(deadline=None, max_examples=20)
def test_any_trials_come_back_as_they_were(records: list[TrialRecord]) -> None:
    with TuningDatabase.open("sqlite://") as db:
        db.add_all(records)
        assert db.trials() == list({trial_sha256(record): record for record in records}.values())


def test_numpy_numbers_are_kept_as_numbers(db: TuningDatabase) -> None:
    db.add_trial(make_trial(timed(np.float64(2.5)), registers=np.int64(40), layout={"heads": np.int32(8)}))
    assert db.trials() == [make_trial(timed(2.5), registers=40, layout={"heads": 8})]


def test_the_same_trial_twice_is_one_row_and_another_is_another(db: TuningDatabase) -> None:
    record = make_trial()
    assert [db.add_trial(record), db.add_trial(record)] == [1, 1]
    assert db.add_trial(replace(record, number=1)) == 2
    assert db.add_trial(replace(record, created_at=made_at(1))) == 3


def test_a_trial_without_a_date_is_dated(db: TuningDatabase) -> None:
    db.add_trial(make_trial(created_at=""))
    assert db.trials()[0].created_at.endswith("+00:00")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("timed but not proven right", {"checked_on": ""}),
    ("timed but not proven right", {"checked_on": "", "evidence": "proxy"}),
    ("neither emulator, device nor empty", {"checked_on": "by eye"}),
    ("only an ok trial may have times", {"status": "hang", "reason": "no end", "times": (timed(1.0),)}),
    ("no reason is given", {"status": "hang", "reason": ""}),
    ("not a finite number", {"times": (timed(float("nan")),)}),
    ("not a finite number", {"times": (timed(1.0, 1.0, float("inf")),)}),
    ("not finite and above zero", {"times": (timed(1.0, -1.0, 2.0),)}),
    ("outside of its own minimum and maximum", {"times": (timed(1.0, 2.0, 3.0),)}),
    ("given twice", {"times": (timed(1.0), timed(2.0))}),
    ("status: Input should be 'ok'", {"status": "fine"}),
    ("evidence: Input should be 'measured'", {"evidence": "guessed"}),
    ("must say on which device", {"device": None}),
    ("not finite and above zero", {"times": (replace(timed(1.0), reference_us=0.0),)}),
    ("modelled is what a model gives", {"evaluator": "model"}),
    ("registers: Input should be a valid integer", {"registers": "128"}),
    ("not an ISO 8601 time in UTC", {"created_at": "2026-01-01T00:00:00"}),
    ("more than 64 bits", {"seed": 2**63}),
    ("unpaired surrogate", {"source_name": "\udc80"}),
    ("a key that is not text", {"layout": {1: 2}}),
    ("no JSON form", {"candidate": {"a": {1}}}),
]


@pytest.mark.parametrize(("message", "fields"), BAD)
def test_what_may_not_be_is_refused(db: TuningDatabase, message: str, fields: dict[str, Any]) -> None:
    record = make_trial(**fields) if "times" not in fields else replace(make_trial(), **fields)
    with pytest.raises(DatabaseError, match=message):
        db.add_all([make_trial(), record])
    assert db.trials() == []


def test_a_modelled_trial_needs_no_proof(db: TuningDatabase) -> None:
    db.add_trial(make_trial(evidence="modelled"))
    assert db.trials()[0].checked_on == ""


def test_a_failure_with_an_endless_error_is_kept_without_it(db: TuningDatabase) -> None:
    db.add_trial(make_trial(status="wrong_result", relative_error=float("nan")))
    assert db.trials()[0].relative_error is None
    with pytest.raises(DatabaseError, match="not a finite number"):
        db.add_trial(make_trial(relative_error=float("nan")))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial SET status = 'hang'",
        "DELETE FROM trial",
        "UPDATE point_time SET time_us = 1",
        "DELETE FROM point_time",
        "INSERT OR REPLACE INTO trial SELECT * FROM trial",
        "INSERT OR REPLACE INTO point_time SELECT * FROM point_time",
        "UPDATE rejection SET reason = 'none'",
        "DELETE FROM rejection",
        "INSERT OR REPLACE INTO rejection SELECT * FROM rejection",
    ],
)
def test_nothing_is_ever_changed(db: TuningDatabase, statement: str) -> None:
    db.add_all([make_trial()], [Rejection("verify_mla", "name", "0" * 64, "why")])
    with db._engine.connect() as connection, connection.begin(), pytest.raises(IntegrityError, match="append-only"):
        connection.exec_driver_sql(statement)
    assert db.trials() == [make_trial()]


@pytest.mark.parametrize(
    ("column", "value"),
    [("status", "fine"), ("evidence", "guessed"), ("evaluator", "me"), ("checked_on", "by eye"), ("checked_on", "")],
)
def test_the_tables_themselves_refuse_unknown_words(db: TuningDatabase, column: str, value: str) -> None:
    db.add_trial(make_trial())
    with db._engine.connect() as connection, connection.begin():
        row = dict(connection.execute(select(trial)).mappings().one()) | {"id": 2, "trial_sha256": "other"}
        with pytest.raises(IntegrityError, match="CHECK constraint failed"):
            connection.execute(trial.insert().values(row | {column: value}))
        connection.execute(trial.insert().values(row))


def test_trials_are_selected_by_value(db: TuningDatabase) -> None:
    hang, ok = make_trial(status="hang", number=1), make_trial(layout={"heads": 16})
    db.add_all([hang, ok])
    assert db.trials(status="hang") == [hang]
    assert db.trials(layout={"heads": 16}, family="verify_mla") == [ok]
    assert db.trials(layout=dict(reversed(LAYOUT.items()))) == [hang]
    assert db.trials(candidate={"tile_m": 17}) == []
    for field in ("colour", "device", "times"):
        with pytest.raises(TypeError, match=f"by {field}"):
            db.trials(**{field: "red"})


def test_files_and_folders_are_made_and_nothing_stays_beside(tmp_path: Path) -> None:
    path = tmp_path / "new folder?" / "100%#.sqlite"
    with TuningDatabase.open(f"sqlite:///{path}") as db:
        db.add_trial(make_trial())
    with TuningDatabase.open(str(path)) as db:
        assert db.trials() == [make_trial()]
    assert [item.name for item in path.parent.iterdir()] == ["100%#.sqlite"]


def test_a_reader_sees_and_writes_nothing_of_its_own(tmp_path: Path) -> None:
    with TuningDatabase.open(str(tmp_path / "db")) as db:
        db.add_trial(make_trial())
        with TuningDatabase.open(str(tmp_path / "db"), read_only=True) as reader:
            assert reader.trials() == [make_trial()]
            with pytest.raises(DatabaseError, match="it is read-only"):
                reader.add_trial(make_trial(number=1))
    assert [item.name for item in tmp_path.iterdir()] == ["db"]


def test_the_tables_are_not_sqlites_alone() -> None:
    dialect: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    assert "id BIGSERIAL NOT NULL" in str(CreateTable(trial).compile(dialect=dialect))
    assert "time_us DOUBLE PRECISION NOT NULL" in str(CreateTable(point_time).compile(dialect=dialect))
    assert str(select(trial).join(point_time).compile(dialect=dialect)).startswith("SELECT trial.id")


def test_canonical_json_is_one_text_for_one_value() -> None:
    assert canonical_json({"b": (1, 2.0, -0.0), "a": {"z": None, "é": True}}) == (
        '{"a":{"z":null,"é":true},"b":[1,2.0,0.0]}'.encode()
    )
    assert canonical_json(0.1 + 0.2) == b"0.30000000000000004"
    assert key_text({"tile_m": 64, "gather": "bulk"}) == 'gather="bulk",tile_m=64'
