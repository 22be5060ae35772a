"""One candidate's trial: compiled, then modelled without a GPU, or proven and timed on one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, cast

import kgen
from kgen.build import NVCC_FLAGS, BuildResult, build
from kgen.build.toolchain import Toolchain
from kgen.canonical import canonical_json
from kgen.device.cuda_driver import cubin_needs
from kgen.family import Candidate, Family, Kernel, Layout, Point
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult
from kgen.model import Footprint, floor_us, predict
from kgen.records import PROTOCOL_VERSION, DeviceFingerprint, Evidence, PointTime, Status, TrialRecord
from kgen.render import Source
from kgen.space import candidate_key
from kgen.spec import Spec
from kgen.targets import Target

COMPILE_LIMIT_S = 120.0
"""Longest compile of one candidate."""
PROMISING = 3
"""Candidates a workload point that a device times because the model ranks them first."""


@dataclass(frozen=True)
class Study:
    """What all trials of one run share. ``target`` is whom to tune for, ``envelope`` whose limits a launch keeps."""

    spec: Spec
    target: Target
    envelope: Target
    toolchain: Toolchain
    cache_dir: Path
    jobs: int
    seed: int
    run_id: str

    @property
    def family(self) -> Family:
        """The kernel family of the spec."""
        return self.spec.family

    @property
    def points(self) -> tuple[Point, ...]:
        """The shapes of the workload."""
        return tuple(item.point for item in self.spec.workload.points)


@dataclass(frozen=True)
class Variant:
    """One candidate for one layout, rendered. ``number`` is its place in the layout's trials."""

    number: int
    layout_name: str
    layout: Layout
    candidate: Candidate
    source: Source


class Evaluator(Protocol):
    """Turns variants into trials."""

    @property
    def name(self) -> Literal["device", "model"]:
        """What a trial says that it was evaluated by."""

    @property
    def evidence(self) -> Evidence:
        """What its times are worth."""

    @property
    def arch(self) -> str:
        """What it compiles for."""

    @property
    def device(self) -> DeviceFingerprint | None:
        """What it times on, if it does."""

    def promising(self, variants: Iterable[Variant]) -> list[Candidate]:
        """Candidates that are worth a trial before any result is known, best first."""

    def evaluate(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """One trial a variant, in order, each as soon as it is done."""

    def finish(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """Trials of the finalists of one layout, measured side by side; none where that would tell nothing new."""


def blank_record(study: Study, variant: Variant, evaluator: Evaluator) -> TrialRecord:
    """The trial of a variant before anything is known of it; its status says so: ``infeasible``."""
    return TrialRecord(
        run_id=study.run_id,
        family=study.family.name,
        spec_sha256=study.spec.sha256,
        layout_name=variant.layout_name,
        layout=dict(variant.layout),
        target=study.target.name,
        arch=evaluator.arch,
        envelope=study.envelope.name,
        candidate=dict(variant.candidate),
        source_name=variant.source.name,
        source_sha256=variant.source.sha256,
        toolchain=study.toolchain.fingerprint,
        flags=" ".join(NVCC_FLAGS),
        evaluator=evaluator.name,
        evidence=evaluator.evidence,
        protocol_version=PROTOCOL_VERSION,
        status="infeasible",
        device=evaluator.device,
        seed=study.seed,
        number=variant.number,
        kgen_version=kgen.__version__,
    )


def build_all(study: Study, variants: Sequence[Variant], arch: str) -> Iterator[tuple[Variant, BuildResult]]:
    """The variants with their sources built for ``arch``, in order.

    ``jobs`` are built at a time, and given before the next are begun: no more trials than that are in flight.
    """
    for first in range(0, len(variants), study.jobs):
        few = variants[first : first + study.jobs]
        results = build(
            [variant.source for variant in few],
            arch=arch,
            toolchain=study.toolchain,
            cache_dir=study.cache_dir,
            jobs=study.jobs,
            timeout_s=COMPILE_LIMIT_S,
        )
        yield from zip(few, results, strict=True)


def not_built(record: TrialRecord, result: BuildResult) -> TrialRecord:
    """The trial of a variant that does not compile."""
    status: Status = "compile_timeout" if result.status == "compile_timeout" else "compile_error"
    return replace(record, status=status, reason=result.reason)


class ModelEvaluator:
    """Compiles for the target and predicts; nothing runs, so no trial counts as checked."""

    name: Literal["model"] = "model"
    evidence: Evidence = "modelled"
    device: DeviceFingerprint | None = None

    def __init__(self, study: Study) -> None:
        self._study = study
        self.arch = study.target.nvcc_arch

    def promising(self, variants: Iterable[Variant]) -> list[Candidate]:
        """None: nothing knows more than a trial would."""
        return []

    def finish(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """Nothing: a model says the same twice."""
        yield from ()

    def evaluate(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """One modelled trial a variant; sources that are not built yet are built first, ``jobs`` at a time."""
        for variant, result in build_all(self._study, variants, self.arch):
            yield self._trial(variant, result)

    def _trial(self, variant: Variant, result: BuildResult) -> TrialRecord:
        study = self._study
        record = blank_record(study, variant, self)
        if result.status != "ok":
            return not_built(record, result)
        kernels = study.family.kernels(variant.candidate, variant.layout)
        footprints = {kernel.entry: footprint(kernel, result, study.target, study.envelope) for kernel in kernels}
        main, taken = kernels[0], result.resources[kernels[0].entry]
        record = replace(
            record,
            registers=taken.registers,
            shared_bytes=main.shared_bytes + taken.static_shared_bytes,
            spill_bytes=footprints[main.entry].spill_bytes,
            blocks_per_sm=footprints[main.entry].resident_blocks,
        )
        for kernel in kernels:
            if footprints[kernel.entry].resident_blocks == 0:
                return replace(record, reason=_no_block(kernel, result))
        return replace(record, status="ok", times=self._times(variant, footprints))

    def _times(self, variant: Variant, footprints: Mapping[str, Footprint]) -> tuple[PointTime, ...]:
        times = []
        for point in self._study.points:
            time_us = model_time_us(self._study, variant.layout, variant.candidate, point, footprints)
            times.append(PointTime(dict(point), time_us, time_us, time_us))
        return tuple(times)


def model_time_us(
    study: Study, layout: Layout, candidate: Candidate, point: Point, footprints: Mapping[str, Footprint]
) -> float:
    """The modelled microseconds of one call at ``point``, planned for no more than it."""
    family = study.family
    resident = footprints[family.kernels(candidate, layout)[0].entry].resident_blocks
    capacity = family.capacity(family.point_case(point))
    plan = family.plan(candidate, layout, capacity, sms=study.target.sms, resident_blocks=resident)
    return predict(study.target, family.demand(candidate, layout, point, plan), footprints).time_us


def footprint(kernel: Kernel, result: BuildResult, target: Target, envelope: Target) -> Footprint:
    """What a built kernel takes of one SM of ``target`` without leaving the limits of ``envelope``."""
    taken = result.resources[kernel.entry]
    shared_bytes = kernel.shared_bytes + taken.static_shared_bytes
    resident = min(
        chip.resident_blocks(threads=kernel.threads, registers=taken.registers, shared_bytes=shared_bytes)
        for chip in (target, envelope)
    )
    return Footprint(kernel.threads, resident, taken.spill_store_bytes + taken.spill_load_bytes)


def floors_us(study: Study, layout: Layout) -> tuple[float, ...]:
    """The roofline floor of the target at every workload point, in microseconds."""
    works = [study.family.work(layout, point) for point in study.points]
    return tuple(floor_us(study.target, flop=work.flop, bytes_moved=work.bytes) for work in works)


def score(study: Study, record: TrialRecord) -> float | None:
    """The weighted geometric mean over the workload of time / floor, lower is better; None for a failed trial."""
    if record.status != "ok":
        return None
    floors = floors_us(study, record.layout)
    weighted = zip(study.spec.workload.points, record.times, floors, strict=True)
    return math.exp(sum(item.weight * math.log(time.time_us / floor) for item, time, floor in weighted))


class DeviceTrials:
    """Proves and times candidates on a GPU, whose target is ``own``; where that is not the study's, as a proxy."""

    name: Literal["device"] = "device"

    def __init__(self, study: Study, measure: DeviceEvaluator, own: Target) -> None:
        self._study, self._measure, self._own, self.arch = study, measure, own, own.nvcc_arch
        self.evidence: Evidence = "measured" if self.arch == study.target.nvcc_arch else "proxy"
        self.device: DeviceFingerprint | None = measure.fingerprint

    def promising(self, variants: Iterable[Variant]) -> list[Candidate]:
        """The `PROMISING` fastest at any point in the eyes of the model, those of most points first."""
        model = ModelEvaluator(replace(self._study, target=self._own))
        modelled = [trial for trial in model.evaluate(list(variants)) if trial.status == "ok"]
        chosen: Counter[str] = Counter()
        for place in range(len(self._study.points)):
            modelled.sort(key=lambda trial: (trial.times[place].time_us, candidate_key(trial.candidate)))
            chosen.update(candidate_key(trial.candidate) for trial in modelled[:PROMISING])
        by_key = {candidate_key(trial.candidate): trial.candidate for trial in modelled}
        return [by_key[key] for key, _ in sorted(chosen.items(), key=lambda item: (-item[1], item[0]))]

    def evaluate(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """One trial a variant. The default is timed in full even where a quick estimate rules it out.

        The oracle is proven and not timed: it would take longer than all the others together, and never wins.
        """
        for variant, result in build_all(self._study, variants, self.arch):
            record = blank_record(self._study, variant, self)
            if result.status != "ok":
                yield not_built(record, result)
                continue
            job = self._job(variant, result)
            if variant.candidate == self._study.spec.oracle:
                yield self._trial(record, result, [self._measure.check(job)])
                continue
            keep = {job.name} if variant.candidate == self._study.spec.default else set()
            (found,) = self._measure.evaluate([job], self._study.points, keep)
            yield self._trial(record, result, [found])

    def finish(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """The finalists in interleaved rounds at every point."""
        finalists = list(build_all(self._study, variants, self.arch))
        jobs = [self._job(variant, result) for variant, result in finalists]
        rounds = [self._measure.time_candidates(jobs, point) for point in self._study.points]
        for index, (variant, result) in enumerate(finalists):
            yield self._trial(blank_record(self._study, variant, self), result, [found[index] for found in rounds])

    def _job(self, variant: Variant, result: BuildResult) -> Job:
        return Job(
            name=f"{variant.layout_name} {candidate_key(variant.candidate)}",
            family=self._study.family.name,
            candidate=variant.candidate,
            layout=variant.layout,
            cubin_path=str(result.path),
            cubin_sha256=result.sha256,
            tolerances=self._study.spec.tolerances,
            minimum_cuda=cubin_needs(self.arch, self._study.toolchain.nvcc_version)[0],
        )

    def _trial(self, record: TrialRecord, result: BuildResult, found: Sequence[JobResult]) -> TrialRecord:
        main = result.source.entries[0]
        taken = result.resources[main]
        errors = [item.relative_error for item in found if item.relative_error is not None]
        loaded = next((item.resources for item in found if item.resources is not None), None)
        record = replace(
            record,
            registers=taken.registers,
            shared_bytes=loaded.shared_bytes if loaded else None,
            spill_bytes=taken.spill_store_bytes + taken.spill_load_bytes,
            blocks_per_sm=loaded.blocks_per_sm if loaded else None,
            checked_on="device" if errors else "",
            relative_error=max(errors, default=None),
        )
        failed = next((item for item in found if item.status not in ("ok", "dropped")), None)
        if failed is not None:
            return replace(record, status=cast("Status", failed.status), reason=failed.reason)
        return replace(record, status="ok", times=self._times(found))

    def _times(self, found: Sequence[JobResult]) -> tuple[PointTime, ...]:
        """In the order of the points; one that was dropped is represented by its estimate, without samples."""
        if not any(item.times or item.dropped for item in found):
            return ()
        timed = {canonical_json(time.point): time for item in found for time in item.times}
        for drop in (drop for item in found for drop in item.dropped):
            estimate = PointTime(dict(drop.point), drop.estimate_us, drop.estimate_us, drop.estimate_us)
            timed.setdefault(canonical_json(drop.point), estimate)
        return tuple(timed[canonical_json(dict(point))] for point in self._study.points)


def _no_block(kernel: Kernel, result: BuildResult) -> str:
    taken = result.resources[kernel.entry]
    return (
        f"{kernel.entry}: no SM holds a block of {kernel.threads} threads x {taken.registers} registers and "
        f"{kernel.shared_bytes + taken.static_shared_bytes} shared bytes"
    )
