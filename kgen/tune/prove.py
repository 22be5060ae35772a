"""Proving modelled candidates right in the emulator, several at once, each in a process that may die."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from kgen.build import EMULATOR, build
from kgen.build.toolchain import Toolchain
from kgen.errors import EmulatorError
from kgen.family import Candidate, Family, Tolerance
from kgen.records import TrialRecord
from kgen.space import candidate_key
from kgen.tune.evaluate import Study, Variant
from kgen.validate import Verdict, validate_in_emulator

MIN_GAIN = 0.01
"""Share of the mean time that another candidate must save to be worth a proof and a place in a pack."""
TIE = 0.005
"""Shares of the mean time closer than this are the same to a model."""
SEEDS = (0,)
"""Inputs that a modelled winner is proven with; ``kgen check`` uses more."""

SourceKey = tuple[str, str]
"""What one proof is of: layout name and source digest."""


@dataclass(frozen=True)
class Proof:
    """What the emulator said of one source for one layout; ``relative_error`` is the worst of all cases."""

    ok: bool
    relative_error: float | None
    reason: str


def choose_few(
    trials: Sequence[TrialRecord], weights: Sequence[float], first: Candidate, most: int
) -> list[TrialRecord]:
    """At most ``most`` of the trials of one layout, which together serve every point nearly as fast as all would.

    Greedy: the candidate ``first`` where it is among them, then again and again the one that lowers the weighted mean
    log time the most, until it would save less than `MIN_GAIN`. Of those that save the same within `TIE`, it is the one
    that differs from ``first`` in the fewest tunables, then the smaller candidate key: what the model cannot see, the
    hand that picked ``first`` could. Every trial is ok and has the times of the same points, one a weight.
    """
    left = {candidate_key(trial.candidate): trial for trial in trials}
    chosen = [left.pop(candidate_key(first))] if candidate_key(first) in left else []
    while left and len(chosen) < most:
        costs = {key: _mean_log_us([*chosen, trial], weights) for key, trial in left.items()}
        least = min(costs.values())
        if chosen and _mean_log_us(chosen, weights) - least < MIN_GAIN:
            break
        tied = [key for key, cost in costs.items() if cost - least <= TIE]
        chosen.append(left.pop(min(tied, key=lambda key: (_differences(left[key].candidate, first), key))))
    return chosen


def _differences(candidate: Candidate, other: Candidate) -> int:
    return sum(candidate.get(name) != value for name, value in other.items())


def _mean_log_us(chosen: Sequence[TrialRecord], weights: Sequence[float]) -> float:
    """The weighted mean over the points of the log of the fastest trial's time."""
    fastest_us = [min(time.time_us for time in times) for times in zip(*(trial.times for trial in chosen), strict=True)]
    return sum(weight * math.log(time_us) for weight, time_us in zip(weights, fastest_us, strict=True))


def proven_trial(trial: TrialRecord, proof: Proof) -> TrialRecord:
    """The trial as it is kept once the emulator has spoken: checked, or a wrong result without times."""
    checked = replace(trial, checked_on="emulator", relative_error=proof.relative_error, created_at="")
    return checked if proof.ok else replace(checked, status="wrong_result", reason=proof.reason, times=())


@dataclass(frozen=True)
class _Task:
    """One proof, as a worker process is given it."""

    variant: Variant
    family: Family
    tolerances: Mapping[str, Tolerance]
    toolchain: Toolchain
    cache_dir: Path
    sms: int
    resident_blocks: int

    def run(self) -> Proof:
        verdict = validate_in_emulator(
            self.variant.source,
            self.family,
            self.variant.candidate,
            self.variant.layout,
            self.tolerances,
            toolchain=self.toolchain,
            cache_dir=self.cache_dir,
            target_sms=self.sms,
            resident_blocks=self.resident_blocks,
            seeds=SEEDS,
        )
        return Proof(verdict.ok, _finite(verdict), verdict.reason)


def prove(
    study: Study,
    variants: Mapping[SourceKey, tuple[Variant, int]],
    on_proof: Callable[[SourceKey, Proof], None],
) -> None:
    """Prove each variant, given with its resident blocks, in a process of its own; ``on_proof`` hears of each at once.

    A process that dies takes its own proof with it, not the run.
    """
    _build_for_emulator(study, [variant for variant, _ in variants.values()])
    tasks = {key: _task(study, variant, resident) for key, (variant, resident) in variants.items()}
    with _pool(study.jobs) as pool:
        with _interrupts_held():
            futures = {pool.submit(task.run): key for key, task in tasks.items()}
        for future in as_completed(futures):
            on_proof(futures[future], _outcome(tasks[futures[future]], future))


def _outcome(task: _Task, future: Future[Proof]) -> Proof:
    """The proof; one whose pool died, by its own fault or another's, is done again alone."""
    try:
        return future.result()
    except BrokenProcessPool:
        return _prove_alone(task)


def _prove_alone(task: _Task) -> Proof:
    """The proof from a process whose end is looked at: a kernel may crash it, but only the machine kills it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(task, sender))
    with _interrupts_held():
        process.start()
    sender.close()
    try:
        answer: Proof | Exception = receiver.recv()
        process.join()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            remedy = "free memory, or use fewer --jobs, and run again to go on"
            raise EmulatorError(
                task.variant.source.name, "the process that proves it was killed", remedy=remedy
            ) from None
        return Proof(False, None, f"the emulator's process died, exit code {process.exitcode}")
    finally:
        process.kill()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run_and_send(task: _Task, sender: Connection) -> None:
    try:
        sender.send(task.run())
    except Exception as error:  # noqa: BLE001 - the other process raises it
        sender.send(error)


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that do not hear Ctrl-C, and say nothing of it; where the body raises, they are killed."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a pool starts processes, which inherit the mask for good.

    The mask alone would do for them; here another thread may still get the signal, in the middle of a start. Only the
    main thread is interrupted by it, and only there can it be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda signum, _: held.append(signum))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _task(study: Study, variant: Variant, resident_blocks: int) -> _Task:
    return _Task(
        variant=variant,
        family=study.family,
        tolerances=study.spec.tolerances,
        toolchain=study.toolchain,
        cache_dir=study.cache_dir,
        sms=study.target.sms,
        resident_blocks=resident_blocks,
    )


def _build_for_emulator(study: Study, variants: Sequence[Variant]) -> None:
    """Build each source once, so that workers that share one find it in the cache."""
    build(
        [variant.source for variant in variants],
        arch=EMULATOR,
        toolchain=study.toolchain,
        cache_dir=study.cache_dir,
        jobs=study.jobs,
    )


def _finite(verdict: Verdict) -> float | None:
    worst = verdict.worst
    return float(worst.relative_l2) if worst is not None and math.isfinite(worst.relative_l2) else None
