"""Taking a kernel out of the running by hand: what kgen cannot see by itself, a person or another tool may have."""

from __future__ import annotations

import uuid
from dataclasses import replace

from kgen.canonical import canonical_json, key_text
from kgen.db.database import TuningDatabase
from kgen.errors import InputError
from kgen.records import TrialRecord


def reject(db: TuningDatabase, source_name: str, reason: str) -> int:
    """Record that a source is wrong, with every layout, target and candidate it was found right with.

    A later trial that finds it right puts it back. Returns how many trials were added; InputError where the database
    has no such source, or the reason is empty.
    """
    if not reason.strip():
        raise InputError("--reason", "is empty", remedy="say who found what")
    latest: dict[bytes, TrialRecord] = {}
    for record in db.trials(source_name=source_name):
        place = canonical_json([record.layout, record.target, record.arch, record.envelope, record.evaluator])
        latest[place + key_text(record.candidate).encode()] = record
    if not latest:
        raise InputError("SOURCE", "no trial of it", seen=repr(source_name), remedy="see: kgen show trials")
    run_id = uuid.uuid4().hex
    wrong = [
        replace(record, run_id=run_id, status="wrong_result", reason=reason, times=(), created_at="")
        for record in latest.values()
        if record.status == "ok"
    ]
    return db.add_all(wrong).added
