"""Rows of ``kgen bench``: which errors and times they hold, and what the timed jobs ask of the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from mla_packs import shipped_spec
from packs import invented_pack

from kgen.bench import time_calls
from kgen.errors import DeviceError
from kgen.family import Point
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult, LoadedResources
from kgen.measure.timing import REPEATS, summarise
from kgen.records import DeviceFingerprint

CALLS: list[tuple[str, Point]] = [
    ("h8_p1", {"batch": 1, "nodes": 8, "prefix": 65536}),
    ("h16_p1", {"batch": 900, "nodes": 8, "prefix": 65536}),
]
PROOF_ERROR = 7e-3


class Timed(DeviceEvaluator):
    """An evaluator without a device: jobs take 10, 20 us and are off by 1e-3, 2e-3 where they are timed."""

    def __init__(self, status: str = "ok") -> None:
        self.jobs: list[Job] = []
        self.status = status

    @property
    def fingerprint(self) -> DeviceFingerprint:
        return DeviceFingerprint("12.0", 188, 101376, 128 << 20, 14001000, "fake", "13.0")

    def time_candidates(
        self, jobs: Sequence[Job], point: Point, repeats: int = REPEATS, reference: str = ""
    ) -> list[JobResult]:
        self.jobs += jobs
        results = []
        for number, job in enumerate(jobs, 1):
            time = summarise(point, [10.0 * number], 1e-3 * number)
            resources = LoadedResources(200, 90_000, 0, 1)
            results.append(
                JobResult(job, "ok", times=(time,), relative_error=PROOF_ERROR, resources=resources)
                if self.status == "ok"
                else JobResult(job, "wrong_result", "out at a point: off")
            )
        return results


def test_a_row_holds_the_error_of_its_timed_launches() -> None:
    spec = shipped_spec()
    rows = list(time_calls(spec, invented_pack(), Timed(), spec.targets["sm_120"], CALLS))
    assert [(row.layout, row.variant, row.match) for row in rows] == [
        ("h8_p1", "wide", "exact"),
        ("h16_p1", "default", "default"),
    ]
    assert [(row.time_us, row.default_us, row.relative_error) for row in rows] == [
        (10.0, 20.0, 1e-3),
        (10.0, 10.0, 1e-3),
    ]


def test_jobs_say_which_driver_the_packed_cubins_need() -> None:
    spec, pack, evaluator = shipped_spec(), invented_pack(), Timed()
    archs = {**pack.manifest.archs, "sm_120": replace(pack.manifest.archs["sm_120"], min_cuda=(12, 8))}
    pack = replace(pack, manifest=replace(pack.manifest, archs=archs))
    list(time_calls(spec, pack, evaluator, spec.targets["sm_120"], CALLS[:1]))
    assert [(job.name, job.minimum_cuda) for job in evaluator.jobs] == [
        ("h8_p1 wide", (12, 8)),
        ("h8_p1 default", (12, 8)),
    ]


def test_a_wrong_kernel_is_no_row() -> None:
    spec = shipped_spec()
    with pytest.raises(DeviceError, match="h8_p1 wide: not timed: wrong_result, out at a point: off"):
        list(time_calls(spec, invented_pack(), Timed("wrong"), spec.targets["sm_120"], CALLS))
