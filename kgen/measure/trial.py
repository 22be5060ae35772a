"""What becomes of one job of a batch while the batch runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kgen.measure.job import Job, JobResult, JobStatus, LoadedResources, PointDrop, key_of
from kgen.records import PointTime, Status

_Timed = TypeVar("_Timed", PointTime, PointDrop)


@dataclass
class Trial:
    """What is known of a job while its batch runs. A ``trusted`` one was proven and confirmed before."""

    job: Job
    trusted: bool = False
    status: Status = "ok"
    reason: str = ""
    times: list[PointTime] = field(default_factory=list)
    dropped: list[PointDrop] = field(default_factory=list)
    relative_error: float | None = None
    resources: LoadedResources | None = None

    @property
    def alive(self) -> bool:
        """Whether it is right so far."""
        return self.status == "ok"

    def fail(self, status: Status, reason: str) -> None:
        """End the job's trial."""
        self.status, self.reason = status, reason

    def times_us(self) -> dict[str, float]:
        """The times by point."""
        return {key_of(dict(time.point)): time.time_us for time in self.times} if self.alive else {}

    def result(self, reference_us: Mapping[str, float]) -> JobResult:
        """How the job ended; ``reference_us`` are the times of what was timed in the same rounds, by point."""
        status: JobStatus = self.status
        reason = self.reason
        if self.alive and self.dropped and not self.times:
            status, reason = "dropped", self.dropped[0].reason
        return JobResult(
            self.job,
            status,
            reason,
            times=tuple(_beside(time, reference_us) for time in self.times) if self.alive else (),
            dropped=tuple(_beside(drop, reference_us) for drop in self.dropped),
            relative_error=self.relative_error,
            resources=self.resources,
        )


def _beside(timed: _Timed, reference_us: Mapping[str, float]) -> _Timed:
    return replace(timed, reference_us=reference_us.get(key_of(dict(timed.point))))
