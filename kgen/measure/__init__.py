"""Timing candidates on a GPU, in a worker process that may hang, crash or lose its device without harm.

Everything the worker holds (loaded jobs, inputs, graphs) is made again on demand after it was replaced, so a
batch goes on where it was. Only kernels that were proven right are timed; times are medians of graph replays
over rotated inputs, interleaved among the jobs of a batch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from kgen.errors import DeviceError
from kgen.family import Point
from kgen.measure.job import Job, JobResult, LoadedResources, MeasureLimits, PointDrop, key_of
from kgen.measure.process import WORKER_COMMAND, WorkerError, WorkerProcess
from kgen.measure.timing import ESTIMATE_REPLAYS, REPEATS, BestTimes, Canary, interleaved, summarise
from kgen.measure.trial import Trial
from kgen.records import DeviceFingerprint
from kgen.targets import Target


class DeviceEvaluator:
    """Proves and times jobs on one GPU.

    ``target`` holds the device's own limits; with ``envelope`` (another target) every launch keeps to that one's
    occupancy. DeviceError from any method: the device cannot be used (any more), whatever the job.
    """

    def __init__(
        self,
        target: Target,
        envelope: Target | None = None,
        device_ordinal: int = 0,
        limits: MeasureLimits | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.limits = limits or MeasureLimits()
        self.best = BestTimes()
        self.degraded = ""
        self._settings = {
            "ordinal": device_ordinal,
            "target": dataclasses.asdict(target),
            "envelope": None if envelope is None else dataclasses.asdict(envelope),
        }
        self._command = worker_command
        self._canary = Canary()
        self._worker: WorkerProcess | None = None
        self._ready: set[str] = set()
        self._trusted: set[str] = set()
        self._fingerprint: DeviceFingerprint | None = None

    def __enter__(self) -> DeviceEvaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._ready.clear()

    @property
    def fingerprint(self) -> DeviceFingerprint:
        """The device that is measured on."""
        self._open()
        assert self._fingerprint is not None
        return self._fingerprint

    def check(self, job: Job) -> JobResult:
        """Load a job and validate it on the device; nothing is timed."""
        trial = Trial(job)
        self._prove(trial)
        self._forget(job)
        return trial.result({})

    def evaluate(self, jobs: Sequence[Job], points: Sequence[Point], reference: Job | None = None) -> list[JobResult]:
        """Prove every job, then time the right ones at every point in interleaved rounds, the reference in each round.

        A quick estimate rules a job out at points where it is far too slow, but never the reference, which need not be
        among the jobs; then it is proven and confirmed in the first batch only. The results, one a job, hold its times
        beside theirs. When the canary drifts, every result is ``device_degraded`` and later calls raise DeviceError.
        """
        trials = [Trial(job) for job in jobs]
        batch = list(trials)
        if reference is not None and reference not in jobs:
            batch.insert(0, Trial(reference, trusted=reference.name in self._trusted))
        beside = next((trial for trial in batch if trial.job == reference), None)

        def measure() -> None:
            for point in points:
                self._time(self._drop(batch, point, beside), point, REPEATS)
                self._leave(batch, point)

        self._batch(batch, measure)
        if beside is not None:
            (self._trusted.add if beside.alive else self._trusted.discard)(beside.job.name)
        return [trial.result(beside.times_us() if beside is not None else {}) for trial in trials]

    def time_candidates(
        self, jobs: Sequence[Job], point: Point, repeats: int = REPEATS, reference: str = ""
    ) -> list[JobResult]:
        """Prove and time jobs at one point in interleaved rounds, dropping none: the finals.

        ``reference`` names the job whose times the results hold beside their own.
        """
        trials = [Trial(job) for job in jobs]

        def measure() -> None:
            self._time(trials, point, repeats)
            self._leave(trials, point)

        self._batch(trials, measure)
        beside = next((trial.times_us() for trial in trials if trial.job.name == reference), {})
        return [trial.result(beside) for trial in trials]

    def _batch(self, trials: Sequence[Trial], measure: Callable[[], None]) -> None:
        """Prove the jobs and measure them, between two canaries."""
        if self.degraded:
            raise DeviceError(
                "device", "is degraded", seen=self.degraded, remedy="stop other work on it, let it cool, start again"
            )
        degraded = self._canary_says()
        if not degraded:
            for trial in trials:
                if not trial.trusted:
                    self._prove(trial)
            measure()
            for trial in trials:
                self._forget(trial.job)
            degraded = self._canary_says()
        if degraded:
            self.degraded = degraded
            for trial in trials:
                trial.fail("device_degraded", degraded)

    def _canary_says(self) -> str:
        """What is wrong with the device; empty if nothing."""
        with self._study():
            return self._canary.degraded(self._request("canary", self.limits.canary_s))

    def _prove(self, trial: Trial) -> None:
        with self._attempt(trial):
            self._load(trial)
            verdict = self._request("check", self.limits.check_s, name=trial.job.name)
            trial.relative_error = verdict["relative_error"]
            if not verdict["ok"]:
                trial.fail("wrong_result", verdict["reason"])

    def _drop(self, trials: Sequence[Trial], point: Point, keep: Trial | None) -> list[Trial]:
        """The trials that are worth timing at a point, by a quick estimate of each; ``keep`` always is."""
        estimates: list[tuple[Trial, float]] = []
        for trial in [trial for trial in trials if trial.alive]:
            with self._attempt(trial):
                estimate_us = statistics.median(self._sample(trial, point, ESTIMATE_REPLAYS))
                estimates.append((trial, estimate_us))
                self.best.note(_best_key(trial.job, point), estimate_us)
        remaining = []
        for trial, estimate_us in estimates:
            reason = self.best.drop_reason(_best_key(trial.job, point), estimate_us)
            if reason and trial is not keep:
                trial.dropped.append(PointDrop(dict(point), estimate_us, reason))
            else:
                remaining.append(trial)
        return remaining

    def _time(self, trials: Sequence[Trial], point: Point, repeats: int) -> None:
        """Time the trials in turn, ``repeats`` times each, and check what the timed launches computed."""
        samples: list[list[float]] = [[] for _ in trials]
        for index in interleaved(len(trials), repeats):
            if trials[index].alive:
                with self._attempt(trials[index]):
                    samples[index] += self._sample(trials[index], point, 1)
        for trial, samples_us in zip(trials, samples, strict=True):
            if trial.alive:
                with self._attempt(trial):
                    self._finish(trial, point, samples_us)

    def _finish(self, trial: Trial, point: Point, samples_us: Sequence[float]) -> None:
        """Note a trial's time at a point, if the launches that were timed computed the right thing."""
        if trial.trusted:
            trial.times.append(summarise(point, samples_us))
            return
        self._arm(trial, point)
        verdict = self._request("confirm", self.limits.check_s, name=trial.job.name, point=dict(point))
        if not verdict["ok"]:
            trial.fail("wrong_result", verdict["reason"])
            return
        timed = summarise(point, samples_us, verdict["relative_error"])
        trial.times.append(timed)
        self.best.note(_best_key(trial.job, point), timed.time_us)

    def _sample(self, trial: Trial, point: Point, replays: int) -> list[float]:
        self._arm(trial, point)
        name = trial.job.name
        samples: list[float] = self._request(
            "sample", self.limits.time_s, name=name, point=dict(point), replays=replays
        )
        return samples

    def _arm(self, trial: Trial, point: Point) -> None:
        """Have the worker ready to time a trial at a point, whatever it lost before."""
        self._load(trial)
        job, key = trial.job, _arm_key(trial.job, point)
        if key not in self._ready:
            with self._study():  # making inputs runs none of the job's code
                self._request(
                    "prepare", self.limits.prepare_s, family=job.family, layout=dict(job.layout), point=dict(point)
                )
            self._request("arm", self.limits.load_s, name=job.name, point=dict(point))
            self._ready.add(key)

    def _load(self, trial: Trial) -> None:
        self._open()
        key = key_of("load", trial.job.name)
        if key not in self._ready:
            resources = self._request("load", self.limits.load_s, job=trial.job.to_json())
            trial.resources = LoadedResources(**resources)
            self._ready.add(key)

    def _leave(self, trials: Sequence[Trial], point: Point) -> None:
        """Give back what arming took."""
        for trial in trials:
            key = _arm_key(trial.job, point)
            if key in self._ready:
                with self._attempt(trial):
                    self._request("disarm", self.limits.load_s, name=trial.job.name, point=dict(point))
                self._ready.discard(key)

    def _forget(self, job: Job) -> None:
        key = key_of("load", job.name)
        if key in self._ready:
            with self._study():
                self._request("unload", self.limits.load_s, name=job.name)
            self._ready.discard(key)

    def _open(self) -> None:
        if self._worker is None:
            self._worker = WorkerProcess(self._command)
            with self._study():
                found = self._request("open", self.limits.open_s, settings=self._settings)
                self._fingerprint = DeviceFingerprint(**found)

    def _request(self, operation: str, timeout_s: float, **arguments: Any) -> Any:
        self._open()
        assert self._worker is not None
        return self._worker.request(operation, timeout_s, **arguments)

    @contextmanager
    def _attempt(self, trial: Trial) -> Iterator[None]:
        """Do the body; its failure is the trial's, not the batch's."""
        try:
            yield
        except WorkerError as error:
            trial.fail(error.status, str(error))
            if error.lost:
                self.close()

    @contextmanager
    def _study(self) -> Iterator[None]:
        """Do the body, whose failure no job is to blame for: DeviceError."""
        try:
            yield
        except WorkerError as error:
            self.close()
            raise DeviceError("device", "measuring failed", seen=str(error), remedy="run kgen doctor") from error


def _best_key(job: Job, point: Point) -> str:
    return key_of(job.family, dict(job.layout), dict(point))


def _arm_key(job: Job, point: Point) -> str:
    return key_of("arm", job.name, dict(point))
