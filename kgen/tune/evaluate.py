"""One candidate's trial, and how it is made without a GPU: compiled, then modelled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import kgen
from kgen.build import NVCC_FLAGS, BuildResult, build_each
from kgen.build.toolchain import Toolchain
from kgen.family import Candidate, Family, Kernel, Layout, Point
from kgen.model import Footprint, floor_us, predict
from kgen.records import PROTOCOL_VERSION, DeviceFingerprint, Evidence, PointTime, Status, TrialRecord
from kgen.render import Source
from kgen.spec import Spec
from kgen.targets import Target


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
        """One trial a variant of one layout, each as soon as it is done."""

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
    """The variants with their sources built for ``arch``, ``jobs`` at a time, each as soon as it is built."""
    sharing: dict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        sharing[variant.source.sha256].append(variant)
    sources = [variant.source for variant in variants]
    with closing(
        build_each(sources, arch=arch, toolchain=study.toolchain, cache_dir=study.cache_dir, jobs=study.jobs)
    ) as results:
        for result in results:
            for variant in sharing[result.source.sha256]:
                yield variant, result


def not_built(record: TrialRecord, result: BuildResult) -> TrialRecord:
    """The trial of a variant that does not compile."""
    status: Status = "compile_timeout" if result.stopped else "compile_error"
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
        """One modelled trial a variant, as soon as its source is built."""
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
    """The weighted geometric mean over the workload of time / reference, lower is better; None for a failed trial.

    The reference is what was timed in the same rounds; where nothing was, it is the target's floor.
    """
    if record.status != "ok":
        return None
    beside = [time.reference_us for time in record.times if time.reference_us is not None]
    units_us = beside if len(beside) == len(record.times) else floors_us(study, record.layout)
    weighted = zip(study.spec.workload.points, record.times, units_us, strict=True)
    return math.exp(sum(item.weight * math.log(time.time_us / unit_us) for item, time, unit_us in weighted))


def _no_block(kernel: Kernel, result: BuildResult) -> str:
    taken = result.resources[kernel.entry]
    return (
        f"{kernel.entry}: no SM holds a block of {kernel.threads} threads x {taken.registers} registers and "
        f"{kernel.shared_bytes + taken.static_shared_bytes} shared bytes"
    )
