"""The database as text for review and version control: JSON lines, one trial (or rejection) a line, sorted."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from kgen.canonical import canonical_json, key_text
from kgen.db.database import Added, TuningDatabase
from kgen.db.record_form import StoredTrial, parse_rejection, parse_trial, trial_line
from kgen.db.sqlite_file import DAMAGED
from kgen.errors import DatabaseError
from kgen.records import Rejection, TrialRecord

TEXT_VERSION = 1
"""Raised when a line gets another form; the first line of a file names it."""

_TRIALS, _REJECTIONS = "kgen_tuning_db", "kgen_tuning_db_rejections"
_Parser = tuple[Callable[[bytes], TrialRecord | Rejection], str]
_PARSERS: dict[str, _Parser] = {
    _TRIALS: (parse_trial, "not a trial"),
    _REJECTIONS: (parse_rejection, "not a rejection"),
}


def export_text(db: TuningDatabase, folder: Path | str) -> list[Path]:
    """Writes all trials into ``folder``, as ``<family>.<target>.<evidence>[.<device>].jsonl``; returns the files.

    Rejections go to ``<family>.rejections.jsonl``, by source and date.
    Lines are in order of layout, candidate and date, so that new trials are new lines. Each file is replaced at once.
    Raises DatabaseError, before anything is written, where a file holds lines that the export would drop, or where
    a trial is no longer what its digest says.
    """
    texts: dict[tuple[str, str], list[tuple[tuple[str, str, datetime], bytes]]] = defaultdict(list)
    for stored in db.select():
        texts[_file_name(stored.record), _TRIALS].append((_line_order(stored), _line_as_recorded(db, stored)))
    for item in db.rejections():
        order = item.source_name, item.source_sha256, datetime.fromisoformat(item.created_at)
        texts[_slugs([item.family, "rejections"]), _REJECTIONS].append((order, canonical_json(item)))
    files = {
        Path(folder) / name: b"\n".join(
            [canonical_json({kind: TEXT_VERSION}), *(line for _, line in sorted(lines)), b""]
        )
        for (name, kind), lines in sorted(texts.items())
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            _refuse_loss(path, content)
        for path, content in files.items():
            _replace(path, content)
    except OSError as error:
        raise DatabaseError(
            str(error.filename or folder),
            "the text cannot be written",
            seen=str(error.strerror),
            remedy="check that the folder is writable and the disk not full; existing files are whole",
        ) from error
    return list(files)


def _line_as_recorded(db: TuningDatabase, stored: StoredTrial) -> bytes:
    line = trial_line(stored.record)
    if sha256(line).hexdigest() != stored.trial_sha256:
        raise DatabaseError(db.where, f"trial {stored.id} is not what was recorded", remedy=DAMAGED)
    return line


def _line_order(stored: StoredTrial) -> tuple[str, str, datetime]:
    record = stored.record
    return canonical_json(record.layout).decode(), key_text(record.candidate), stored.order[0]


def _file_name(record: TrialRecord) -> str:
    parts = [record.family, record.target, record.evidence]
    if record.device is not None:
        parts.append(record.device.name)
    return _slugs(parts)


def _slugs(parts: Iterable[str]) -> str:
    slugs = [re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") or "unnamed" for part in parts]
    return ".".join(slugs) + ".jsonl"


def _refuse_loss(path: Path, content: bytes) -> None:
    if not path.exists():
        return
    lost = set(path.read_bytes().splitlines()) - set(content.splitlines())
    if lost:
        raise DatabaseError(
            str(path),
            "the export would drop lines of it",
            seen=f"{len(lost)} that the database does not have",
            remedy="run 'kgen db import' on it first, or export into another folder",
        )


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def import_text(db: TuningDatabase, paths: Iterable[Path | str]) -> Added:
    """Adds the trials and rejections of text files (of a folder: all its ``*.jsonl``) that the database lacks.

    All or none. Raises DatabaseError that names file and line of the first line that is not what its file holds.
    """
    found = [item for path in _files(paths) for item in _read(path)]
    return db.add_all(
        [item for item in found if isinstance(item, TrialRecord)],
        [item for item in found if isinstance(item, Rejection)],
    )


def _files(paths: Iterable[Path | str]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise DatabaseError(str(path), "no *.jsonl file in this folder", remedy="give the exported files")
        files += inside
    return files


def _read(path: Path) -> list[TrialRecord | Rejection]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DatabaseError(str(path), "cannot be read", seen=str(error.strerror)) from error
    if lines[-1]:
        raise DatabaseError(
            f"{path}:{len(lines)}", "the last line is cut short", remedy="get the whole file; nothing was imported"
        )
    parse, wrong = _kind(path, lines[0])
    records = []
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            records.append(parse(line))
        except ValueError as error:
            raise DatabaseError(
                f"{path}:{number}", wrong, seen=str(error), remedy="mend the line; nothing was imported"
            ) from None
    return records


def _kind(path: Path, line: bytes) -> _Parser:
    """How to read the lines after this first one, and what to say of one that cannot be read."""
    try:
        [(kind, version)] = json.loads(line).items()
        found = _PARSERS[kind]
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise DatabaseError(
            f"{path}:1", "not the text form of a tuning database", remedy="give a file made by 'kgen db export'"
        ) from None
    if version != TEXT_VERSION:
        raise DatabaseError(
            f"{path}:1",
            f"text form {version!r}, this kgen reads {TEXT_VERSION}",
            remedy="import it with the kgen that wrote it, and merge the database",
        )
    return found


def merge(db: TuningDatabase, other: str) -> Added:
    """Adds the trials and rejections of another database that this one lacks, all or none; the other is only read."""
    with TuningDatabase.open(other, read_only=True) as source:
        records, rejections = source.trials(), source.rejections()
    return db.add_all(records, rejections)
