"""Taking a kernel out of the running by hand: what kgen cannot see by itself, a person or another tool may have.

A rejection is of a source, whatever layout, target, device or toolchain it was tried with, and no trial undoes it.
It stands until another entry takes it back by its digest. What stands is therefore the same in every database that
holds the same entries, whatever order or clock they came by.
"""

from __future__ import annotations

from dataclasses import replace

import kgen
from kgen.db.database import TuningDatabase
from kgen.db.record_form import rejection_sha256
from kgen.errors import InputError
from kgen.records import Rejection


def rejected(db: TuningDatabase) -> dict[str, Rejection]:
    """The sources that are out, by their SHA-256, each with the smallest-digest rejection that stands."""
    return {item.source_sha256: item for _, item in sorted(_standing(db).items(), reverse=True)}


def _standing(db: TuningDatabase) -> dict[str, Rejection]:
    """The rejections that were not taken back, by digest."""
    entries = db.rejections()
    undone = {item.undoes for item in entries if item.undoes}
    found = {rejection_sha256(item): item for item in entries if not item.undoes}
    return {digest: item for digest, item in found.items() if digest not in undone}


def reject(db: TuningDatabase, source: str, reason: str) -> int:
    """Put the source of this name (or SHA-256) out; returns how many sources that were not out before are now.

    Raises InputError where no trial is of such a source, or the reason is empty.
    """
    _check_reason(reason)
    tried = db.trials(source_name=source) or db.trials(source_sha256=source)
    if not tried:
        raise InputError("SOURCE", "no trial of it", seen=repr(source), remedy="see: kgen show trials")
    out = rejected(db)
    new = {
        record.source_sha256: Rejection(
            record.family, record.source_name, record.source_sha256, reason, kgen_version=kgen.__version__
        )
        for record in tried
        if record.source_sha256 not in out
    }
    return db.add_all([], list(new.values())).added


def undo(db: TuningDatabase, source: str, reason: str) -> int:
    """Take every rejection of the source of this name (or SHA-256) back; returns how many there were.

    Raises InputError where none stands, or the reason is empty.
    """
    _check_reason(reason)
    entries = [
        replace(item, reason=reason, undoes=digest, created_at="", kgen_version=kgen.__version__)
        for digest, item in _standing(db).items()
        if source in (item.source_name, item.source_sha256)
    ]
    if not entries:
        raise InputError("SOURCE", "is not rejected", seen=repr(source), remedy="see: kgen show rejected")
    return db.add_all([], entries).added


def rejected_error(where: str, rejection: Rejection) -> InputError:
    """What to say where somebody asks for a source that is out."""
    return InputError(
        where,
        f"its source {rejection.source_name} is rejected",
        seen=rejection.reason,
        remedy=f"choose another, or run: kgen db reject {rejection.source_name} --undo --reason TEXT",
    )


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise InputError("--reason", "is empty", remedy="say who found what")
