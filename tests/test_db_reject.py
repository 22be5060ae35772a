"""Rejections: out is out, whatever trials say and however databases met, until somebody takes it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from db_trials import made_at, make_trial, timed

from kgen.db import Added, TuningDatabase, export_text, import_text, merge, winners
from kgen.db.reject import reject, rejected, undo
from kgen.errors import DatabaseError, InputError
from kgen.records import Rejection

SLOW, FAST = make_trial(timed(12.0), m=16), make_trial(timed(8.0), m=32, created_at=made_at(1))


@pytest.fixture
def db() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        opened.add_all([SLOW, FAST])
        yield opened


def fastest(db: TuningDatabase) -> set[object]:
    """The winning tiles of all layouts."""
    return {winner.candidate["tile_m"] for winner in winners(db, family="verify_mla", target="sm_120")}


def test_a_rejected_source_wins_for_no_layout_and_no_trial_brings_it_back(db: TuningDatabase) -> None:
    db.add_trial(replace(FAST, layout={"heads": 16}, layout_name="v3"))
    assert fastest(db) == {32}
    assert reject(db, FAST.source_name, "racecheck: 42 hazards") == 1
    assert fastest(db) == {16}, "the other layout has no other candidate"
    later = replace(FAST, created_at="2099-01-01T00:00:00+00:00")
    db.add_all([replace(later, toolchain="nvcc 99"), replace(later, target="sm_90", arch="sm_90")])
    assert fastest(db) == {16}
    assert reject(db, FAST.source_sha256, "again") == 0, "what is out stays out once"
    assert [item.reason for item in db.rejections()] == ["racecheck: 42 hazards"]


def test_taking_back_deletes_nothing_and_can_be_followed_by_another_rejection(db: TuningDatabase) -> None:
    reject(db, FAST.source_name, "first")
    assert undo(db, FAST.source_name, "explained") == 1
    assert fastest(db) == {32}
    assert reject(db, FAST.source_name, "second") == 1
    assert fastest(db) == {16}
    assert [(item.reason, bool(item.undoes)) for item in db.rejections()] == [
        ("first", False), ("explained", True), ("second", False),
    ]  # fmt: skip
    assert rejected(db)[FAST.source_sha256].reason == "second"


def test_only_what_is_known_can_be_rejected_and_only_what_is_rejected_taken_back(db: TuningDatabase) -> None:
    with pytest.raises(InputError, match=r"^SOURCE: no trial of it, 'other'; see: kgen show trials$"):
        reject(db, "other", "why")
    with pytest.raises(InputError, match=r"^SOURCE: is not rejected, 'verify_mla__m16'; see: kgen show rejected$"):
        undo(db, SLOW.source_name, "why")
    for change in (reject, undo):
        with pytest.raises(InputError, match=r"^--reason: is empty; say who found what$"):
            change(db, SLOW.source_name, " ")


def test_every_order_of_merging_ends_the_same(tmp_path: Path) -> None:
    """One machine rejects, one rejects and takes back, one takes back what it got from the first, clocks all wrong."""
    places = {name: str(tmp_path / name) for name in ("a", "b", "c")}
    with TuningDatabase.open(places["a"]) as a, TuningDatabase.open(places["b"]) as b:
        for db in (a, b):
            db.add_all([SLOW, FAST])
        reject(a, FAST.source_name, "seen on a")
        reject(b, FAST.source_name, "seen on b")
        undo(b, FAST.source_name, "b was wrong")
    with TuningDatabase.open(places["c"]) as c:
        merge(c, places["a"])
        early = Rejection("verify_mla", SLOW.source_name, SLOW.source_sha256, "other", created_at=made_at(0))
        c.add_all([], [early])
        undo(c, SLOW.source_name, "not so")
    outcomes = []
    for order in permutations(places.values()):
        with TuningDatabase.open("sqlite://") as union:
            for place in order:
                merge(union, place)
            outcomes.append((fastest(union), rejected(union)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][0] == {16}, "nobody took back what was seen on a"
    with TuningDatabase.open("sqlite://") as union:
        for place in places.values():
            merge(union, place)
        undo(union, FAST.source_name, "explained")
        merge(union, places["a"])
        assert fastest(union) == {32}, "a rejection that was taken back does not return with an old database"


def test_the_text_form_holds_rejections(db: TuningDatabase, tmp_path: Path) -> None:
    reject(db, FAST.source_name, "first")
    undo(db, FAST.source_name, "explained")
    reject(db, SLOW.source_name, "slow and wrong")
    file = export_text(db, tmp_path)[0]
    assert file.name == "verify_mla.rejections.jsonl"
    header, *lines = file.read_text().splitlines()
    assert header == '{"kgen_tuning_db_rejections":1}'
    assert [json.loads(line)["reason"] for line in lines] == ["slow and wrong", "first", "explained"]
    with TuningDatabase.open("sqlite://") as other:
        assert import_text(other, [tmp_path]) == Added(2 + 3, 0)
        assert import_text(other, [tmp_path]) == Added(0, 2 + 3)
        assert fastest(other) == {32}
        before = file.read_bytes()
        export_text(other, tmp_path)
        assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"family":"x"}',
            ":2: not a rejection, source_name: Field required|:2: not a rejection, source_name: Missing",
        ),
        (
            json.dumps(vars(Rejection("f", "n", "s", " ", created_at=made_at(0)))),
            ":2: not a rejection, reason: is empty",
        ),
        (json.dumps(vars(Rejection("f", "n", "s", "why"))), "created_at: not an ISO 8601 time"),
    ],
)
def test_a_bad_rejection_is_named(db: TuningDatabase, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"kgen_tuning_db_rejections":1}}\n{line}\n')
    with pytest.raises(DatabaseError, match=message):
        import_text(db, [tmp_path])
    assert db.rejections() == []
