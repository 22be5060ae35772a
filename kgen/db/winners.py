"""Which candidate is the fastest for each head layout and workload point of a target: a query, never stored.

1. *Relevant* to target T are the trials with ``target == T``, and, as ``proxy``, those measured for another target
   on another architecture inside T's limits (``envelope == T``, ``arch`` not T's, evidence ``measured``).
2. A source is *out* everywhere while a rejection of it stands (`kgen.db.reject`), and *out* for a candidate and layout
   when the latest relevant trial that ran it found it bad (``wrong_result``, ``launch_error``, ``hang``), whatever an
   earlier trial said.
3. Per layout and point only the best evidence class present counts (measured, proxy, modelled); of it only the newest
   protocol version; of that only one device (fingerprint without name and driver) and envelope: those with the most
   trials, then the smallest. Times of two groups are never compared.
   A time without samples is a quick estimate that ruled its candidate out there, and counts for nothing.
4. Of a candidate tried more than once in the group, the latest trial counts.
5. Where all of the group were timed beside the same reference, in the same rounds, candidates are compared by their
   time over the reference's, which a clock that drifts between batches does not change; else by their time.
6. A candidate whose registers spill wins only where every one does: a spill grows with the next compiler, or chip.
7. The fastest candidate ties with every candidate whose fastest sample is no slower than its median; modelled, with
   every one within 1 %. Of tied candidates the winner has the least shared memory, then the fewest registers (unknown
   counts as most), then the smaller candidate key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import and_, or_

from kgen.canonical import canonical_json, key_text
from kgen.db.database import TuningDatabase
from kgen.db.record_form import StoredTrial
from kgen.db.reject import rejected
from kgen.db.schema import trial
from kgen.records import EVIDENCE_ORDER, DeviceFingerprint, Evidence, PointTime, TrialRecord

MODELLED_TIE = 0.01
"""Modelled times closer than this share of the fastest are a tie."""

_RAN = {"ok", "wrong_result", "launch_error", "hang"}


@dataclass(frozen=True)
class Winner:
    """The winner at one point, with what a pack needs of its trial.

    ``reference_us`` is the time of the trial's reference in the same rounds; ``runner_up_*`` is the fastest other.
    """

    layout_name: str
    layout: Mapping[str, Any]
    point: Mapping[str, int]
    candidate: Mapping[str, Any]
    candidate_key: str
    source_name: str
    source_sha256: str
    evidence: Evidence
    time_us: float
    time_us_min: float
    time_us_max: float
    reference_us: float | None
    registers: int | None
    shared_bytes: int | None
    spill_bytes: int | None
    blocks_per_sm: int | None
    checked_on: str
    relative_error: float | None
    device: DeviceFingerprint | None
    arch: str
    toolchain: str
    protocol_version: int
    trial_sha256: str
    runner_up_key: str | None
    runner_up_time_us: float | None
    tie: bool


@dataclass(frozen=True)
class _Entry:
    stored: StoredTrial
    time: PointTime
    candidate_key: str

    @property
    def record(self) -> TrialRecord:
        return self.stored.record


def device_key(device: DeviceFingerprint | None) -> tuple[str | int, ...]:
    """What must agree between two devices for their times to be compared; empty for none."""
    if device is None:
        return ()
    return (
        device.compute_capability,
        device.sms,
        device.shared_bytes_per_block,
        device.l2_bytes,
        device.memory_clock_khz,
    )


def winners(
    db: TuningDatabase,
    *,
    family: str,
    target: str,
    layout: str | Mapping[str, Any] | None = None,
    arch: str | None = None,
    sources: Collection[str] | None = None,
) -> list[Winner]:
    """One winner for every layout and point that any ok trial timed, by the rule above; by layout, then point.

    ``layout`` is a name or the fields themselves; ``arch`` is the target's own where it is not called like it;
    ``sources``, where given, are the digests of the only sources that may win, e.g. those that render today.
    """
    out = rejected(db)
    relevant = _relevant(db, family, target, arch or target, layout)
    found = [_as_seen_from(target, stored) for stored in relevant if stored.record.source_sha256 not in out]
    if sources is not None:
        found = [stored for stored in found if stored.record.source_sha256 in sources]
    entries: dict[tuple[str, str], list[_Entry]] = defaultdict(list)
    for stored in _not_found_bad(found):
        key = key_text(stored.record.candidate)
        for time in stored.record.times:
            if stored.record.evidence != "modelled" and not time.samples_us:
                continue
            place = canonical_json(stored.record.layout).decode(), canonical_json(time.point).decode()
            entries[place].append(_Entry(stored, time, key))
    chosen = [(place[0], _winner(group)) for place, group in entries.items()]
    return [winner for _, winner in sorted(chosen, key=lambda item: (item[0], sorted(item[1].point.items())))]


def _relevant(
    db: TuningDatabase, family: str, target: str, arch: str, layout: str | Mapping[str, Any] | None
) -> list[StoredTrial]:
    proxy = and_(trial.c.envelope == target, trial.c.arch != arch, trial.c.evidence == "measured")
    condition = and_(trial.c.family == family, or_(trial.c.target == target, proxy))
    if isinstance(layout, str):
        condition &= trial.c.layout_name == layout
    elif layout is not None:
        condition &= trial.c.layout == canonical_json(layout).decode()
    return db.select(condition)


def _as_seen_from(target: str, stored: StoredTrial) -> StoredTrial:
    if stored.record.target == target:
        return stored
    return replace(stored, record=replace(stored.record, evidence="proxy"))


def _not_found_bad(found: Iterable[StoredTrial]) -> list[StoredTrial]:
    """The ok trials whose source, candidate and layout no later run found bad."""
    runs: dict[tuple[str, str, str], list[StoredTrial]] = defaultdict(list)
    for stored in found:
        record = stored.record
        if record.status in _RAN:
            runs[canonical_json(record.layout).decode(), key_text(record.candidate), record.source_sha256].append(
                stored
            )
    good: list[StoredTrial] = []
    for tried in runs.values():
        if max(tried, key=lambda stored: stored.order).record.status == "ok":
            good += [stored for stored in tried if stored.record.status == "ok"]
    return good


def _comparable(entries: list[_Entry]) -> list[_Entry]:
    """The entries of the best evidence class, newest protocol and most used device and envelope."""
    evidence = min((entry.record.evidence for entry in entries), key=EVIDENCE_ORDER.index)
    entries = [entry for entry in entries if entry.record.evidence == evidence]
    protocol = max(entry.record.protocol_version for entry in entries)
    groups: dict[tuple[str | int, ...], list[_Entry]] = defaultdict(list)
    for entry in entries:
        if entry.record.protocol_version == protocol:
            groups[entry.record.envelope, *device_key(entry.record.device)].append(entry)
    return min(groups.items(), key=lambda item: (-len(item[1]), item[0]))[1]


def _latest_of_each(entries: list[_Entry]) -> list[_Entry]:
    latest: dict[str, _Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.stored.order):
        latest[entry.candidate_key] = entry
    return list(latest.values())


def _units_us(entries: list[_Entry]) -> dict[str, float]:
    """What each candidate's times are divided by before they are compared: its reference's time, or nothing."""
    references = {entry.record.reference for entry in entries}
    units_us = {entry.candidate_key: entry.time.reference_us or 0.0 for entry in entries}
    paired = len(references) == 1 and all(units_us.values())
    return units_us if paired else dict.fromkeys(units_us, 1.0)


def _ties(fastest: _Entry, other: _Entry, units_us: Mapping[str, float]) -> bool:
    least = fastest.time.time_us / units_us[fastest.candidate_key]
    if fastest.record.evidence == "modelled":
        return other.time.time_us / units_us[other.candidate_key] <= least * (1 + MODELLED_TIE)
    return other.time.time_us_min / units_us[other.candidate_key] <= least


def _without_spills(entries: list[_Entry]) -> list[_Entry]:
    return [entry for entry in entries if not entry.record.spill_bytes] or entries


def _preference(entry: _Entry) -> tuple[float, float, str]:
    record = entry.record
    unknown = float("inf")
    return (
        unknown if record.shared_bytes is None else record.shared_bytes,
        unknown if record.registers is None else record.registers,
        entry.candidate_key,
    )


def _winner(entries: list[_Entry]) -> Winner:
    compared = _without_spills(_latest_of_each(_comparable(entries)))
    units_us = _units_us(compared)
    ranked = sorted(
        compared, key=lambda entry: (entry.time.time_us / units_us[entry.candidate_key], _preference(entry))
    )
    tied = [entry for entry in ranked if _ties(ranked[0], entry, units_us)]
    best = min(tied, key=_preference)
    runner_up = next((entry for entry in ranked if entry is not best), None)
    record = best.record
    return Winner(
        layout_name=record.layout_name,
        layout=record.layout,
        point=best.time.point,
        candidate=record.candidate,
        candidate_key=best.candidate_key,
        source_name=record.source_name,
        source_sha256=record.source_sha256,
        evidence=record.evidence,
        time_us=best.time.time_us,
        time_us_min=best.time.time_us_min,
        time_us_max=best.time.time_us_max,
        reference_us=best.time.reference_us,
        registers=record.registers,
        shared_bytes=record.shared_bytes,
        spill_bytes=record.spill_bytes,
        blocks_per_sm=record.blocks_per_sm,
        checked_on=record.checked_on,
        relative_error=record.relative_error,
        device=record.device,
        arch=record.arch,
        toolchain=record.toolchain,
        protocol_version=record.protocol_version,
        trial_sha256=best.stored.trial_sha256,
        runner_up_key=runner_up.candidate_key if runner_up else None,
        runner_up_time_us=runner_up.time.time_us if runner_up else None,
        tie=len(tied) > 1,
    )
