"""The text form: the same bytes for the same trials, all or nothing in, nothing lost out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from db_trials import H200, RTX, made_at, make_trial, timed, trials
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.db import Added, TuningDatabase, export_text, import_text, merge, trial_sha256
from kgen.errors import DatabaseError
from kgen.records import TrialRecord


@pytest.fixture
def db() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(st.lists(trials(), max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=12)
def test_export_and_import_are_each_others_inverse(records: list[TrialRecord], random: object) -> None:
    with TemporaryDirectory() as name, TuningDatabase.open("sqlite://") as db, TuningDatabase.open("sqlite://") as new:
        first, second = Path(name, "first"), Path(name, "second")
        added = db.add_all(records)
        export_text(db, first)
        if records:
            assert import_text(new, [first]) == Added(added.added, 0)
            assert import_text(new, sorted(first.iterdir(), reverse=True)) == Added(0, added.added)
        assert {trial_sha256(record) for record in new.trials()} == {trial_sha256(record) for record in records}
        export_text(new, second)
        assert contents(first) == contents(second)


def test_files_are_split_and_lines_are_sorted_and_readable(db: TuningDatabase, tmp_path: Path) -> None:
    rtx = replace(RTX, name="NVIDIA RTX PRO 6000 (Max-Q)")
    db.add_all(
        [
            make_trial(m=32, device=rtx),
            make_trial(m=16, device=rtx, created_at=made_at(5)),
            make_trial(m=16, device=rtx, created_at=made_at(4)),
            make_trial(evidence="proxy", device=H200, arch="sm_90"),
            make_trial(evidence="modelled"),
        ]
    )
    files = export_text(db, tmp_path)
    assert [path.name for path in files] == [
        "verify_mla.sm_120.measured.nvidia-rtx-pro-6000-max-q.jsonl",
        "verify_mla.sm_120.modelled.jsonl",
        "verify_mla.sm_120.proxy.nvidia-h200.jsonl",
    ]
    header, *lines = files[0].read_text().splitlines()
    assert header == '{"kgen_tuning_db":1}'
    read = [json.loads(line) for line in lines]
    assert [(line["candidate"]["tile_m"], line["created_at"]) for line in read] == [
        (16, made_at(4)), (16, made_at(5)), (32, made_at(0)),
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in files]


def test_a_new_trial_is_one_new_line(db: TuningDatabase, tmp_path: Path) -> None:
    db.add_all([make_trial(m=m) for m in (16, 64)])
    [file] = export_text(db, tmp_path)
    before = file.read_text().splitlines()
    db.add_trial(make_trial(m=32))
    export_text(db, tmp_path)
    after = file.read_text().splitlines()
    assert [line for line in after if line in before] == before
    assert len(after) == len(before) + 1


def test_an_export_never_drops_what_only_the_text_has(db: TuningDatabase, tmp_path: Path) -> None:
    db.add_all([make_trial(m=16), make_trial(m=32)])
    [file] = export_text(db, tmp_path)
    before = file.read_bytes()
    with TuningDatabase.open("sqlite://") as other:
        other.add_trial(make_trial(m=16))
        with pytest.raises(DatabaseError, match="would drop lines of it, 1 that the database does not have"):
            export_text(other, tmp_path)
        assert file.read_bytes() == before
        import_text(other, [tmp_path])
        export_text(other, tmp_path)
        assert file.read_bytes() == before


def line_of(record: TrialRecord, **changes: object) -> str:
    with TuningDatabase.open("sqlite://") as db, TemporaryDirectory() as folder:
        db.add_trial(record)
        [file] = export_text(db, folder)
        return json.dumps({**json.loads(file.read_text().splitlines()[1]), **changes})


BAD = [
    ("{", "line: Invalid JSON"),
    ("<<<<<<< HEAD", "Invalid JSON"),
    ("", "Invalid JSON"),
    ("[]", "line: Input should be an object"),
    ('{"family":"x"}', "run_id: Field required|Missing required"),
    (line_of(make_trial(), note="x"), "missing, unknown, or not as kgen writes them: note"),
    (line_of(make_trial(), status="fine"), "status: Input should be 'ok'"),
    (line_of(make_trial(), checked_on=""), "timed but not proven right"),
    (line_of(make_trial(), number="1"), "number: Input should be a valid integer"),
    (line_of(make_trial(), number=True), "number: Input should be a valid integer"),
    (line_of(make_trial())[:-1] + ',"family":"y"}', "a field is given twice"),
    (json.dumps({key: value for key, value in json.loads(line_of(make_trial())).items() if key != "seed"}), ": seed"),
    (line_of(make_trial(timed(7.125))).replace("7.125", "1e999"), r"times\[0\].time_us: not a finite number"),
    (line_of(make_trial(timed(7.125))).replace("7.125", "NaN"), r"times\[0\].time_us: not a finite number"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_one_bad_line_is_named_and_nothing_is_imported(
    db: TuningDatabase, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"kgen_tuning_db":1}}\n{line_of(make_trial())}\n{line}\n')
    with pytest.raises(DatabaseError, match=message) as caught:
        import_text(db, [file])
    assert caught.value.where == f"{file}:3"
    assert db.trials() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: not the text form"),
        ("[]\n", ":1: not the text form"),
        ('{"kgen_tuning_db":2}\n', ":1: text form 2, this kgen reads 1"),
        ('{"kgen_tuning_db":1}\n{"family":', ":2: the last line is cut short"),
        ("\xff\n", ":1: not the text form"),
    ],
)
def test_files_of_another_form_are_named(db: TuningDatabase, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(DatabaseError, match=message):
        import_text(db, [tmp_path])


def test_missing_files_and_empty_folders_are_named(db: TuningDatabase, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no \*.jsonl file"):
        import_text(db, [tmp_path])
    with pytest.raises(DatabaseError, match="cannot be read, No such file"):
        import_text(db, [tmp_path / "none.jsonl"])


def test_an_export_that_cannot_be_written_leaves_the_old_file(
    db: TuningDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.add_trial(make_trial())
    [file] = export_text(db, tmp_path)
    before = contents(tmp_path)
    db.add_trial(make_trial(number=1))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("kgen.db.text_form.os.fsync", full)
    with pytest.raises(DatabaseError, match="cannot be written, No space left"):
        export_text(db, tmp_path)
    assert contents(tmp_path) == before


def test_merge_adds_what_is_missing_once(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    with TuningDatabase.open(one) as db, TuningDatabase.open(other) as more:
        db.add_all([make_trial(m=16), make_trial(m=32)])
        more.add_all([make_trial(m=32), make_trial(m=64)])
        assert merge(db, other) == Added(1, 1)
        assert merge(db, other) == Added(0, 2)
        assert merge(db, one) == Added(0, 3)
        assert db.trials() == [make_trial(m=16), make_trial(m=32), make_trial(m=64)]
