"""What the measuring process and its worker say to each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kgen.family import Candidate, Layout, Tolerance
from kgen.records import PointTime, Status
from kgen.targets import Target

JobStatus = Status | Literal["dropped"]
"""``dropped``: right, but too slow at every point to be worth timing to the end."""


@dataclass(frozen=True)
class Job:
    """One built candidate to prove and time. ``name`` is unique among the jobs of an evaluator.

    ``minimum_cuda`` is the CUDA version that the cubin needs of the driver. ``alone``: its calls are timed without what
    calls with the same lengths may share, which otherwise is made before the clock starts.
    """

    name: str
    family: str
    candidate: Candidate
    layout: Layout
    cubin_path: str
    cubin_sha256: str
    tolerances: Mapping[str, Tolerance]
    minimum_cuda: tuple[int, int] | None = None
    alone: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """The job of `to_json`."""
        tolerances = {name: Tolerance(**value) for name, value in data["tolerances"].items()}
        minimum = data["minimum_cuda"]
        return cls(**{**data, "tolerances": tolerances, "minimum_cuda": tuple(minimum) if minimum else None})


def target_from_json(data: Mapping[str, Any]) -> Target:
    """A target from its ``dataclasses.asdict`` after a trip through JSON."""
    return Target(**{**data, "compute_capability": tuple(data["compute_capability"])})


def key_of(*values: Mapping[str, Any] | str) -> str:
    """One string for names, layouts and points, the same for equal ones."""
    return json.dumps(values, sort_keys=True)


@dataclass(frozen=True)
class LoadedResources:
    """What the driver says of a loaded job's main kernel; ``shared_bytes`` is dynamic and padded to the envelope."""

    registers: int
    shared_bytes: int
    local_bytes: int
    blocks_per_sm: int


@dataclass(frozen=True)
class PointDrop:
    """A point at which a job was not timed to the end, with its quick estimate, and the reference's time."""

    point: Mapping[str, int]
    estimate_us: float
    reason: str
    reference_us: float | None = None


@dataclass(frozen=True)
class JobResult:
    """How a job ended. ``times`` is empty unless ``status`` is ``ok``; points that are in neither were not reached.

    ``relative_error`` is the largest relative L2 error of the validation cases.
    """

    job: Job
    status: JobStatus
    reason: str = ""
    times: tuple[PointTime, ...] = ()
    dropped: tuple[PointDrop, ...] = ()
    relative_error: float | None = None
    resources: LoadedResources | None = None


@dataclass(frozen=True)
class MeasureLimits:
    """How long one request of each kind may take before the worker is killed, in seconds."""

    open_s: float = 120.0
    prepare_s: float = 300.0
    load_s: float = 30.0
    check_s: float = 120.0
    time_s: float = 20.0
    canary_s: float = 30.0
