"""From builds and measurements to trials: what is recorded of a candidate, and its score."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tuning_doubles import TOOLCHAIN, small_spec

from kgen.build import BuildResult, EntryResources
from kgen.family import Point
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult, LoadedResources, PointDrop
from kgen.model import Footprint, predict
from kgen.records import DeviceFingerprint, PointTime, TrialRecord
from kgen.render import render
from kgen.space import candidate_key
from kgen.tune import evaluate
from kgen.tune.device_trials import DeviceTrials
from kgen.tune.evaluate import ModelEvaluator, Study, Variant, floors_us, score

SPEC = small_spec()
LAYOUT = SPEC.layouts["h8_p1"]
GPU = DeviceFingerprint("9.0", 132, 232448, 62914560, 3201000, "GPU", "580")
FITS = {
    "verify_mla_flash": EntryResources(200, 0, 0, 0, 0),
    "verify_mla_combine": EntryResources(64, 0, 0, 0, 0),
    "verify_mla_schedule": EntryResources(32, 0, 0, 0, 0),
}


def study(target: str = "sm_120", envelope: str = "sm_120") -> Study:
    return Study(SPEC, SPEC.targets[target], SPEC.targets[envelope], TOOLCHAIN, Path("cache"), 1, 0, "run")


def variant(**changes: int | str) -> Variant:
    candidate = dict(SPEC.default) | changes
    return Variant(0, "h8_p1", LAYOUT, candidate, render(SPEC.family, candidate, LAYOUT))


def built(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Every build gives the same result."""

    def build_each(sources: Sequence[Any], *, arch: str, **_: object) -> Generator[BuildResult]:
        plain: dict[str, Any] = {
            "arch": arch, "status": "ok", "path": Path("kernel.cubin"), "sha256": "digest", "resources": FITS,
            "log": "", "key": "key", "seconds": 7.0, "cached": False,
        }  # fmt: skip
        for source in {source.sha256: source for source in sources}.values():
            yield BuildResult(source=source, **plain | changes)

    monkeypatch.setattr(evaluate, "build_each", build_each)


def modelled(of: Study | None = None, **changes: int | str) -> TrialRecord:
    (record,) = ModelEvaluator(of or study()).evaluate([variant(**changes)])
    return record


def test_a_modelled_trial_has_real_resources_and_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = dict(FITS) | {"verify_mla_flash": EntryResources(255, 0, 48, 40, 60)}
    built(monkeypatch, resources=spilling)
    record = modelled()
    (main, combine, _), point = SPEC.family.kernels(SPEC.default, LAYOUT), study().points[0]
    assert (record.status, record.evidence, record.checked_on) == ("ok", "modelled", "")
    assert (record.registers, record.spill_bytes, record.blocks_per_sm) == (255, 100, 1)
    assert record.shared_bytes == main.shared_bytes
    assert [time.point for time in record.times] == list(study().points)
    plan = SPEC.family.plan(SPEC.default, LAYOUT, point, sms=188, resident_blocks=1)
    beside = study().target.resident_blocks(threads=combine.threads, registers=64, shared_bytes=combine.shared_bytes)
    footprints = {main.entry: Footprint(main.threads, 1, 100), combine.entry: Footprint(combine.threads, beside, 0)}
    expected = predict(study().target, SPEC.family.demand(SPEC.default, LAYOUT, point, plan), footprints)
    assert record.times[0].time_us == expected.time_us


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        (
            {"status": "compile_error", "path": None, "resources": {}, "log": "x.cu(3): error: no"},
            "compile_error",
            "no",
        ),
        ({"status": "compile_timeout", "path": None, "resources": {}}, "compile_timeout", "stopped after 7 s"),
        ({"status": "compile_killed", "path": None, "resources": {}}, "compile_timeout", "machine killed the compiler"),
        (
            {"resources": dict(FITS) | {"verify_mla_combine": EntryResources(64, 102_000, 0, 0, 0)}},
            "infeasible",
            "verify_mla_combine: no SM holds a block of ",
        ),
    ],
)
def test_a_failure_is_a_trial_with_a_reason(
    changes: Mapping[str, Any], status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(monkeypatch, **changes)
    record = modelled()
    assert record.status == status
    assert reason in record.reason
    assert record.times == ()
    assert score(study(), record) is None


def test_the_envelope_bounds_residency(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch, resources=dict(FITS) | {"verify_mla_flash": EntryResources(100, 0, 0, 0, 0)})
    assert modelled(study("sm_90", "sm_90")).blocks_per_sm == 2
    assert modelled(study("sm_90", "sm_120")).blocks_per_sm == 1


def test_the_score_is_the_weighted_geometric_mean_over_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    floors = floors_us(study(), LAYOUT)
    factors = [2.0, 4.0, 16.0]
    assert len(floors) == len(factors)
    times = tuple(
        PointTime(dict(point), floor * factor, floor * factor, floor * factor)
        for point, floor, factor in zip(study().points, floors, factors, strict=True)
    )
    record = replace(modelled(), times=times)
    assert score(study(), record) == pytest.approx(math.prod(factors) ** (1 / 3))
    weights = dict(SPEC.workload.weights) | {"prefix": {4096: 2.0, 16384: 1.0, 65536: 1.0}}
    heavy = replace(SPEC, workload=replace(SPEC.workload, weights=weights))
    assert score(replace(study(), spec=heavy), record) == pytest.approx((2 * 2 * 4 * 16) ** (1 / 4))


def test_beside_a_reference_the_score_is_the_mean_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    factors = [0.5, 4.0, 32.0]
    times = tuple(
        PointTime(dict(point), 7.0 * factor, 7.0 * factor, 7.0 * factor, reference_us=7.0)
        for point, factor in zip(study().points, factors, strict=True)
    )
    record = replace(modelled(), times=times)
    assert score(study(), record) == pytest.approx(4.0)
    alone = replace(record, times=(*times[:2], replace(times[2], reference_us=None)))
    floors = floors_us(study(), LAYOUT)
    expected = math.prod(time.time_us / floor for time, floor in zip(times, floors, strict=True)) ** (1 / 3)
    assert score(study(), alone) == pytest.approx(expected), "all points or none"


class PretendedMeasure:
    """A GPU that needs 5 us a call and 10 for the reference, rules out the last point, or ends as it is told."""

    fingerprint = GPU

    def __init__(self, **ending: Any) -> None:
        self.ending = ending
        self.batches: list[tuple[list[str], str]] = []
        self.rounds: list[tuple[list[str], Point, str]] = []

    def evaluate(self, jobs: Sequence[Job], points: Sequence[Point], reference: Job | None = None) -> list[JobResult]:
        self.batches.append(([job.name for job in jobs], reference.name if reference else ""))
        times = tuple(self._time(point) for point in points[:-1])
        dropped = (PointDrop(points[-1], 50.0, "slow", 11.0),)
        result = JobResult(jobs[0], "ok", "", times, dropped, 1e-3, LoadedResources(200, 116_000, 0, 1))
        return [replace(result, job=job, **self.ending) for job in jobs]

    def check(self, job: Job) -> JobResult:
        return JobResult(job, "ok", "", (), (), 3e-3, LoadedResources(40, 116_000, 0, 1))

    def time_candidates(self, jobs: Sequence[Job], point: Point, *, reference: str) -> list[JobResult]:
        self.rounds.append(([job.name for job in jobs], point, reference))
        return [JobResult(job, "ok", "", (self._time(point),), (), 2e-3) for job in jobs]

    def _time(self, point: Point) -> PointTime:
        return PointTime(dict(point), 5.0, 4.0, 6.0, (4.0, 5.0, 6.0), 1e-3, 10.0)


def on_gpu(measure: PretendedMeasure, target: str = "sm_120") -> DeviceTrials:
    return DeviceTrials(study(target), cast("DeviceEvaluator", measure), SPEC.targets["sm_90"])


def test_a_timed_trial_is_a_proxy_on_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    (record,) = on_gpu(PretendedMeasure()).evaluate([variant()])
    assert (record.status, record.evidence, record.arch, record.envelope) == ("ok", "proxy", "sm_90", "sm_120")
    assert (record.checked_on, record.relative_error, record.device) == ("device", 1e-3, GPU)
    assert (record.shared_bytes, record.blocks_per_sm) == (116_000, 1)
    (own,) = on_gpu(PretendedMeasure(), "sm_90").evaluate([variant()])
    assert own.evidence == "measured"


def test_the_oracle_is_proven_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch, resources={"verify_mla_oracle": EntryResources(40, 0, 0, 0, 0)})
    measure = PretendedMeasure()
    oracle = Variant(0, "h8_p1", LAYOUT, SPEC.oracle, render(SPEC.family, SPEC.oracle, LAYOUT))
    (record,) = on_gpu(measure).evaluate([oracle])
    assert (record.status, record.checked_on, record.relative_error, record.times) == ("ok", "device", 3e-3, ())
    assert measure.batches == []


def test_a_dropped_point_is_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    (record,) = on_gpu(PretendedMeasure()).evaluate([variant()])
    assert [time.point for time in record.times] == list(study().points)
    assert [(time.time_us, len(time.samples_us), time.reference_us) for time in record.times] == [
        (5.0, 3, 10.0), (5.0, 3, 10.0), (50.0, 0, 11.0),
    ]  # fmt: skip


def test_a_gpu_is_shown_what_the_model_thinks_of_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every point the model's three fastest, and not every candidate."""
    built(monkeypatch)
    every = [
        variant(tile_m=rows, tile_n=keys, stages=stages, k_split=4)
        for rows in (16, 32, 64)
        for keys in (16, 32)
        for stages in (2, 3, 4)
    ]
    found = on_gpu(PretendedMeasure()).promising(iter(every))
    modelled = [trial for trial in ModelEvaluator(study("sm_90")).evaluate(every) if trial.status == "ok"]
    for place in range(len(study().points)):
        fastest = min(modelled, key=lambda trial: trial.times[place].time_us)
        assert fastest.candidate in found
    assert 3 <= len(found) < len(modelled)
    assert ModelEvaluator(study()).promising(iter(every)) == []


def test_jobs_are_timed_in_one_batch_beside_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, in whatever order they are built; two that share a source are two jobs."""
    built(monkeypatch)
    measure = PretendedMeasure()
    changes: list[dict[str, int | str]] = [
        {},
        {"gather": "cp_async"},
        {"stages": 2},
        {"item_overhead_rows": 32},
        {"refill": "eager"},
    ]
    variants = [variant(**change) for change in changes]
    trials = DeviceTrials(replace(study(), jobs=2), cast("DeviceEvaluator", measure), SPEC.targets["sm_90"])
    records = list(trials.evaluate(variants))
    names = [f"h8_p1 {candidate_key(item.candidate)}" for item in variants]
    assert measure.batches == [(names[:2], names[0]), (names[2:4], names[0]), (names[4:], names[0])]
    assert [record.candidate for record in records] == [item.candidate for item in variants]
    assert {record.reference for record in records} == {
        f"{variants[0].source.sha256} {candidate_key(SPEC.default)}"
    }  # fmt: skip


def test_what_was_timed_beside_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    times = tuple(PointTime(dict(point), 5.0, 4.0, 6.0, (5.0,), 1e-3) for point in study().points)
    (record,) = on_gpu(PretendedMeasure(times=times, dropped=())).evaluate([variant()])
    assert (record.status, record.reference) == ("ok", "")


@pytest.mark.parametrize("status", ["wrong_result", "hang", "launch_error", "device_degraded"])
def test_a_failure_on_the_gpu_keeps_its_name(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    ending = {"status": status, "reason": "why", "times": (), "dropped": (), "relative_error": None}
    (record,) = on_gpu(PretendedMeasure(**ending)).evaluate([variant()])
    assert (record.status, record.reason, record.times, record.checked_on) == (status, "why", (), "")


def test_finalists_are_timed_together_at_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    built(monkeypatch)
    measure = PretendedMeasure()
    records = list(on_gpu(measure).finish([variant(), variant(gather="cp_async")]))
    assert [point for _, point, _ in measure.rounds] == list(study().points)
    assert {len(names) for names, _, _ in measure.rounds} == {2}
    assert {reference for _, _, reference in measure.rounds} == {f"h8_p1 {candidate_key(SPEC.default)}"}
    assert [(record.status, len(record.times), record.relative_error) for record in records] == [("ok", 3, 2e-3)] * 2
