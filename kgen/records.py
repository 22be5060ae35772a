"""What a trial leaves behind, and the words it is described in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal[
    "ok", "infeasible", "compile_error", "compile_timeout", "wrong_result", "launch_error", "hang", "device_degraded"
]
"""How a trial ended. Every one but ``ok`` has a reason."""

Evidence = Literal["measured", "proxy", "modelled"]
"""``measured``: timed on the target's own architecture; ``proxy``: timed on another architecture inside the target's
limits; ``modelled``: never timed."""

EVIDENCE_ORDER: tuple[Evidence, ...] = ("measured", "proxy", "modelled")
"""Best first: what the dispatcher prefers."""

PROTOCOL_VERSION = 2
"""Raised when the way of timing or modelling changes; results of two protocols are never compared."""


@dataclass(frozen=True)
class DeviceFingerprint:
    """What must agree before two timings may be compared. ``name`` is a label only."""

    compute_capability: str
    sms: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_clock_khz: int
    name: str
    driver_version: str


@dataclass(frozen=True)
class PointTime:
    """The time of one call at one workload point, in microseconds; a modelled one has no samples.

    ``reference_us`` is the time of the trial's reference in the same interleaved rounds.
    """

    point: Mapping[str, int]
    time_us: float
    time_us_min: float
    time_us_max: float
    samples_us: tuple[float, ...] = ()
    relative_error: float | None = None
    reference_us: float | None = None


@dataclass(frozen=True)
class TrialRecord:
    """One candidate, tried once.

    ``target`` is whom the result is for, ``arch`` what was compiled, ``envelope`` whose limits the launch kept;
    ``checked_on`` is ``emulator``, ``device`` or empty where nothing ran; ``reference`` identifies the candidate that
    was timed in the same rounds (see `kgen.db.winners`), empty where none was.
    """

    run_id: str
    family: str
    spec_sha256: str
    layout_name: str
    layout: Mapping[str, Any]
    target: str
    arch: str
    envelope: str
    candidate: Mapping[str, Any]
    source_name: str
    source_sha256: str
    toolchain: str
    flags: str
    evaluator: Literal["device", "model"]
    evidence: Evidence
    protocol_version: int
    status: Status
    reason: str = ""
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    blocks_per_sm: int | None = None
    checked_on: str = ""
    relative_error: float | None = None
    device: DeviceFingerprint | None = None
    seed: int = 0
    number: int = 0
    created_at: str = ""
    kgen_version: str = ""
    reference: str = ""
    times: tuple[PointTime, ...] = field(default=())


@dataclass(frozen=True)
class Rejection:
    """A person's word on a source: it is out; or, where ``undoes`` is a rejection's SHA-256, that one is taken back.

    A source is out while one rejection of it is not taken back, whatever trials say and in whatever order they arrived.
    """

    family: str
    source_name: str
    source_sha256: str
    reason: str
    undoes: str = ""
    created_at: str = ""
    kgen_version: str = ""
