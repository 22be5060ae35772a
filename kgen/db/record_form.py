"""A trial, or a rejection, as one line of JSON and as rows, and what must hold for either to be kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kgen.canonical import canonical_json, key_text, plain
from kgen.records import DeviceFingerprint, PointTime, Rejection, TrialRecord

_DEVICE_FIELDS = tuple(item.name for item in fields(DeviceFingerprint))
_SCALAR_FIELDS = tuple(
    item.name for item in fields(TrialRecord) if item.name not in ("layout", "candidate", "device", "times")
)
_INT64 = 2**63
Kind = TypeVar("Kind", TrialRecord, Rejection)


@dataclass(frozen=True)
class StoredTrial:
    """A trial as the database holds it; ``trial_sha256`` is of its canonical JSON."""

    id: int
    trial_sha256: str
    record: TrialRecord

    @cached_property
    def order(self) -> tuple[datetime, str, int, str]:
        """Sorts trials by when they were made, the same way in every database that holds them."""
        record = self.record
        return datetime.fromisoformat(record.created_at), record.run_id, record.number, self.trial_sha256


@cache
def _trial_adapter() -> TypeAdapter[TrialRecord]:
    return TypeAdapter(TrialRecord)


@cache
def _rejection_adapter() -> TypeAdapter[Rejection]:
    return TypeAdapter(Rejection)


def _document(record: TrialRecord) -> dict[str, Any]:
    """The trial in JSON's own types; what says that there was no reference is left out."""
    document: dict[str, Any] = plain(record)
    if not record.reference:
        del document["reference"]
    for time in document["times"]:
        if time["reference_us"] is None:
            del time["reference_us"]
    return document


def trial_line(record: TrialRecord) -> bytes:
    """The trial as one line of canonical JSON, without its newline. Raises ValueError."""
    return canonical_json(_document(record))


def trial_sha256(record: TrialRecord) -> str:
    """What makes a trial itself: the SHA-256 of its line.

    The run, number and time of the trial are in it, so that two honest trials of one candidate are two rows, be their
    results equal or not, and the same trial that arrives twice, by import or merge, is one.
    """
    return sha256(trial_line(record)).hexdigest()


def parse_trial(line: bytes) -> TrialRecord:
    """The trial that a line holds. Raises ValueError: not JSON, a wrong, missing or unknown field, or `check_trial`."""
    record = _validated(_trial_adapter(), line)
    _check_as_written(line, _document(record))
    check_trial(record)
    return record


def parse_rejection(line: bytes) -> Rejection:
    """The rejection that a line holds. Raises ValueError: not JSON, a wrong, missing or unknown field, no reason."""
    rejection = _validated(_rejection_adapter(), line)
    _check_as_written(line, plain(rejection))
    if not rejection.reason.strip():
        raise ValueError("reason: is empty")
    if not _is_utc(rejection.created_at):
        raise ValueError("created_at: not an ISO 8601 time in UTC")
    return rejection


def rejection_sha256(rejection: Rejection) -> str:
    """What makes a rejection itself, and what another names to take it back: the SHA-256 of its line."""
    return sha256(canonical_json(rejection)).hexdigest()


def _validated(adapter: TypeAdapter[Kind], line: bytes) -> Kind:
    try:
        return adapter.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "line"
        raise ValueError(f"{place}: {first['msg']}, {first['input']!r:.80}") from None


def _check_as_written(line: bytes, known: dict[str, Any]) -> None:
    given = json.loads(line, object_pairs_hook=_no_duplicates)
    if given != known:
        odd = sorted(name for name in given.keys() | known.keys() if given.get(name) != known.get(name))
        raise ValueError(f"fields missing, unknown, or not as kgen writes them: {', '.join(odd) or 'times'}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def settled(record: TrialRecord) -> TrialRecord:
    """The record as it will be kept: dated now where it has no date, in plain types, checked. Raises ValueError.

    A failed trial's relative error that is not finite is kept as None: the output itself was not.
    """
    record = dated(record)
    if record.status != "ok" and record.relative_error is not None and not abs(record.relative_error) < float("inf"):
        record = replace(record, relative_error=None)
    return parse_trial(trial_line(record))


def dated(record: Kind) -> Kind:
    """The record, made now where it does not say when."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return record if record.created_at else replace(record, created_at=now)


def check_trial(record: TrialRecord) -> None:
    """Raises ValueError where a trial claims what it may not, e.g. a time of a kernel that nothing proved right."""
    for rule, holds in _rules(record):
        if not holds:
            raise ValueError(rule)
    for index, time in enumerate(record.times):
        beside = () if time.reference_us is None else (time.reference_us,)
        numbers = (time.time_us, time.time_us_min, time.time_us_max, *time.samples_us, *beside)
        if not all(0 < number < float("inf") for number in numbers):
            raise ValueError(f"times.{index}: a time that is not finite and above zero")
        if not time.time_us_min <= time.time_us <= time.time_us_max:
            raise ValueError(f"times.{index}: the time is outside of its own minimum and maximum")


def _rules(record: TrialRecord) -> list[tuple[str, bool]]:
    timed_on_device = record.status == "ok" and record.evidence != "modelled"
    whole_numbers = [value for value in plain(record).values() if isinstance(value, int)]
    if record.device is not None:
        whole_numbers += [value for value in plain(record.device).values() if isinstance(value, int)]
    points = [key_text(time.point) for time in record.times]
    return [
        ("created_at: not an ISO 8601 time in UTC", _is_utc(record.created_at)),
        ("status: not ok, but no reason is given", record.status == "ok" or record.reason != ""),
        ("times: only an ok trial may have times", record.status == "ok" or not record.times),
        ("checked_on: an ok trial was timed but not proven right", not timed_on_device or record.checked_on != ""),
        ("checked_on: neither emulator, device nor empty", record.checked_on in ("", "emulator", "device")),
        ("device: a timed trial must say on which device", not timed_on_device or record.device is not None),
        ("evidence: modelled is what a model gives, and only that", _is_modelled(record)),
        ("times: a workload point is given twice", len(set(points)) == len(points)),
        ("a whole number needs more than 64 bits", all(-_INT64 <= value < _INT64 for value in whole_numbers)),
    ]


def _is_modelled(record: TrialRecord) -> bool:
    return (record.evidence == "modelled") == (record.evaluator == "model")


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def trial_row(record: TrialRecord) -> dict[str, Any]:
    """The columns of table ``trial``, but for ``id``; all of ``device_*`` are None where no device was used."""
    device = {f"device_{name}": getattr(record.device, name, None) for name in _DEVICE_FIELDS}
    return {
        **{name: getattr(record, name) for name in _SCALAR_FIELDS},
        **device,
        "layout": canonical_json(record.layout).decode(),
        "candidate": canonical_json(record.candidate).decode(),
        "candidate_key": key_text(record.candidate),
        "trial_sha256": trial_sha256(record),
    }


def time_rows(trial_id: int, record: TrialRecord) -> list[dict[str, Any]]:
    """The rows of table ``point_time`` for one trial."""
    return [
        {
            "trial_id": trial_id,
            "position": position,
            "point": canonical_json(time.point).decode(),
            "point_key": key_text(time.point),
            "time_us": time.time_us,
            "time_us_min": time.time_us_min,
            "time_us_max": time.time_us_max,
            "samples_us": canonical_json(time.samples_us).decode(),
            "relative_error": time.relative_error,
            "reference_us": time.reference_us,
        }
        for position, time in enumerate(record.times)
    ]


def trial_from_rows(row: Mapping[Any, Any], times: Sequence[Mapping[Any, Any]]) -> StoredTrial:
    """The trial of one row of ``trial`` and its rows of ``point_time``, which are in order."""
    device = None
    if row["device_compute_capability"] is not None:
        device = DeviceFingerprint(**{name: row[f"device_{name}"] for name in _DEVICE_FIELDS})
    record = TrialRecord(
        **{name: row[name] for name in _SCALAR_FIELDS},
        layout=json.loads(row["layout"]),
        candidate=json.loads(row["candidate"]),
        device=device,
        times=tuple(_time_from_row(time) for time in times),
    )
    return StoredTrial(row["id"], row["trial_sha256"], record)


def _time_from_row(row: Mapping[Any, Any]) -> PointTime:
    return PointTime(
        point=json.loads(row["point"]),
        time_us=row["time_us"],
        time_us_min=row["time_us_min"],
        time_us_max=row["time_us_max"],
        samples_us=tuple(json.loads(row["samples_us"])),
        relative_error=row["relative_error"],
        reference_us=row["reference_us"],
    )
