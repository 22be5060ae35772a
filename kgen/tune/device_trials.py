"""Trials on a GPU: proven, then timed in the same rounds as the default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, cast

from kgen.build import BuildResult
from kgen.canonical import canonical_json
from kgen.device.cuda_driver import cubin_needs
from kgen.family import Candidate
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult
from kgen.records import DeviceFingerprint, Evidence, PointTime, Status, TrialRecord
from kgen.render import render
from kgen.space import candidate_key
from kgen.targets import Target
from kgen.tune.evaluate import ModelEvaluator, Study, Variant, blank_record, build_all, not_built

PROMISING = 3
"""Candidates a workload point that a device times because the model ranks them first."""


class DeviceTrials:
    """Proves and times candidates on a GPU, whose target is ``own``; where that is not the study's, as a proxy."""

    name: Literal["device"] = "device"

    def __init__(self, study: Study, measure: DeviceEvaluator, own: Target) -> None:
        self._study, self._measure, self._own, self.arch = study, measure, own, own.nvcc_arch
        self._defaults: dict[str, Variant] = {}
        self._references: dict[str, Job | None] = {}
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
        """One trial a variant, ``jobs`` of them timed at once: in interleaved rounds, with the default in each round.

        The oracle is proven and not timed: it would take longer than all the others together, and never wins. Those
        timed at once also end at once: each has a part in every round, and the canary after the last round speaks of
        all. So a kill loses up to ``jobs`` trials.
        """
        for first in range(0, len(variants), self._study.jobs):
            yield from self._evaluate_few(variants[first : first + self._study.jobs])

    def _evaluate_few(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        timed: list[tuple[TrialRecord, BuildResult, Job]] = []
        for variant, result in build_all(self._study, variants, self.arch):
            record = blank_record(self._study, variant, self)
            if result.status != "ok":
                yield not_built(record, result)
                continue
            job = self._job(variant, result)
            if variant.candidate == self._study.spec.oracle:
                yield self._trial(record, result, [self._measure.check(job)])
            else:
                timed.append((record, result, job))
        if timed:
            reference = self._reference(variants[0].layout_name)
            found = self._measure.evaluate([job for _, _, job in timed], self._study.points, reference)
            for (record, result, _), one in zip(timed, found, strict=True):
                yield self._trial(record, result, [one])

    def _default(self, layout_name: str) -> Variant:
        if layout_name not in self._defaults:
            layout, default = self._study.spec.layout(layout_name), self._study.spec.default
            source = render(self._study.family, default, layout)
            self._defaults[layout_name] = Variant(0, layout_name, layout, default, source)
        return self._defaults[layout_name]

    def _reference(self, layout_name: str) -> Job | None:
        """The default as a job; None where it does not compile."""
        if layout_name not in self._references:
            ((variant, result),) = build_all(self._study, [self._default(layout_name)], self.arch)
            self._references[layout_name] = self._job(variant, result) if result.status == "ok" else None
        return self._references[layout_name]

    def finish(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        """The finalists in interleaved rounds at every point."""
        finalists = list(build_all(self._study, variants, self.arch))
        jobs = [self._job(variant, result) for variant, result in finalists]
        beside = _job_name(self._default(variants[0].layout_name))
        rounds = [self._measure.time_candidates(jobs, point, reference=beside) for point in self._study.points]
        for index, (variant, result) in enumerate(finalists):
            yield self._trial(blank_record(self._study, variant, self), result, [found[index] for found in rounds])

    def _job(self, variant: Variant, result: BuildResult) -> Job:
        return Job(
            name=_job_name(variant),
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
        times = self._times(found)
        if any(time.reference_us is not None for time in times):
            default = self._default(record.layout_name)
            record = replace(record, reference=f"{default.source.sha256} {candidate_key(default.candidate)}")
        return replace(record, status="ok", times=times)

    def _times(self, found: Sequence[JobResult]) -> tuple[PointTime, ...]:
        """In the order of the points; one that was dropped is represented by its estimate, without samples."""
        if not any(item.times or item.dropped for item in found):
            return ()
        timed = {canonical_json(time.point): time for item in found for time in item.times}
        for drop in (drop for item in found for drop in item.dropped):
            estimate = PointTime(
                dict(drop.point),
                drop.estimate_us,
                drop.estimate_us,
                drop.estimate_us,
                reference_us=drop.reference_us,
            )
            timed.setdefault(canonical_json(drop.point), estimate)
        return tuple(timed[canonical_json(dict(point))] for point in self._study.points)


def _job_name(variant: Variant) -> str:
    return f"{variant.layout_name} {candidate_key(variant.candidate)}"
