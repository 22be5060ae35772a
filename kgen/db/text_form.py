"""Trials as text for review and version control: JSON lines, one trial a line, the same bytes for the same trials."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from kgen.canonical import canonical_json, key_text
from kgen.db.database import Added, TuningDatabase
from kgen.db.record_form import StoredTrial, parse_trial, trial_line
from kgen.errors import DatabaseError
from kgen.records import TrialRecord

TEXT_VERSION = 1
"""Raised when a line gets another form; the first line of a file names it."""

_HEADER = canonical_json({"kgen_tuning_db": TEXT_VERSION})


def export_text(db: TuningDatabase, folder: Path | str) -> list[Path]:
    """Writes all trials into ``folder``, as ``<family>.<target>.<evidence>[.<device>].jsonl``; returns the files.

    Lines are in order of layout, candidate and date, so that new trials are new lines. Each file is replaced at once.
    Raises DatabaseError, before anything is written, where a file holds lines that the export would drop.
    """
    texts: dict[str, list[tuple[tuple[str, str, datetime], bytes]]] = defaultdict(list)
    for stored in db.select():
        texts[_file_name(stored.record)].append((_line_order(stored), trial_line(stored.record)))
    files = {
        Path(folder) / name: b"\n".join([_HEADER, *(line for _, line in sorted(lines)), b""])
        for name, lines in sorted(texts.items())
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


def _line_order(stored: StoredTrial) -> tuple[str, str, datetime]:
    record = stored.record
    return canonical_json(record.layout).decode(), key_text(record.candidate), stored.order[0]


def _file_name(record: TrialRecord) -> str:
    parts = [record.family, record.target, record.evidence]
    if record.device is not None:
        parts.append(record.device.name)
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
    """Adds the trials of text files (of a folder: all its ``*.jsonl``) that the database lacks, all or none.

    Raises DatabaseError that names file and line of the first line that is not a valid trial.
    """
    records = [record for path in _files(paths) for record in _read(path)]
    return db.add_all(records)


def _files(paths: Iterable[Path | str]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise DatabaseError(str(path), "no *.jsonl file in this folder", remedy="give the exported files")
        files += inside
    return files


def _read(path: Path) -> list[TrialRecord]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DatabaseError(str(path), "cannot be read", seen=str(error.strerror)) from error
    if lines[-1]:
        raise DatabaseError(
            f"{path}:{len(lines)}", "the last line is cut short", remedy="get the whole file; nothing was imported"
        )
    _check_header(path, lines[0])
    records = []
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            records.append(parse_trial(line))
        except ValueError as error:
            raise DatabaseError(
                f"{path}:{number}", "not a trial", seen=str(error), remedy="mend the line; nothing was imported"
            ) from None
    return records


def _check_header(path: Path, line: bytes) -> None:
    try:
        version = json.loads(line)["kgen_tuning_db"]
    except (ValueError, KeyError, TypeError):
        raise DatabaseError(
            f"{path}:1", "not the text form of a tuning database", remedy="give a file made by 'kgen db export'"
        ) from None
    if version != TEXT_VERSION:
        raise DatabaseError(
            f"{path}:1",
            f"text form {version!r}, this kgen reads {TEXT_VERSION}",
            remedy="import it with the kgen that wrote it, and merge the database",
        )


def merge(db: TuningDatabase, other: str) -> Added:
    """Adds the trials of another database that this one lacks, all or none; the other is only read."""
    with TuningDatabase.open(other, read_only=True) as source:
        records = source.trials()
    return db.add_all(records)
