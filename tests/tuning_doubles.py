"""An evaluator and a prover that take no time, for tests of what tuning does with their answers."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from kgen.build.toolchain import Toolchain
from kgen.errors import BuildError
from kgen.family import Candidate
from kgen.records import DeviceFingerprint, Evidence, PointTime, Status, TrialRecord
from kgen.resources import SPECS
from kgen.space import candidate_key
from kgen.spec import Spec, load_spec
from kgen.tune import Listener, TuneOptions, TuneReport, run, tune, tuning
from kgen.tune.evaluate import Study, Variant, blank_record
from kgen.tune.prove import Proof, SourceKey

TOOLCHAIN = Toolchain(Path("nvcc"), "13.0.0", ("sm_90", "sm_120"), Path("g++"), "g++ 12", "PATH")


def small_spec() -> Spec:
    """The shipped spec with one workload axis of three values."""
    spec = load_spec(SPECS / "verify_mla.yaml")
    axes = dict(spec.workload.axes) | {"nodes": (8,), "batch": (1,), "prefix": (4096, 16384, 65536)}
    weights = {axis: dict.fromkeys(values, 1.0) for axis, values in axes.items()}
    return replace(spec, workload=replace(spec.workload, axes=axes, weights=weights))


def pretended_us(layout_name: str, candidate: Mapping[str, Any], point: int) -> float:
    """A time that depends on the candidate alone, without order: 10 to 1000 us; the oracle's is 10000."""
    if candidate["algorithm"] == "oracle":
        return 1e4
    digest = hashlib.sha256(f"{layout_name} {candidate_key(candidate)} {point}".encode()).digest()
    return 10.0 + 990.0 * int.from_bytes(digest[:4], "big") / 2**32


@dataclass
class Log:
    """What the doubles were asked for, in order; the hooks may raise, or decide that a source is wrong."""

    evaluated: list[tuple[str, str]] = field(default_factory=list)
    proven: list[SourceKey] = field(default_factory=list)
    before_trial: Callable[[int], None] = lambda number: None
    is_wrong: Callable[[Variant], bool] = lambda variant: False
    how_it_fails: Status = "compile_error"
    does_not_compile: Callable[[Candidate], bool] = lambda candidate: (
        candidate.get("tile_n") == 16 and candidate.get("gather") == "cp_async"
    )


class PretendedEvaluator:
    """Modelled trials without a compiler."""

    name: Literal["model"] = "model"
    evidence: Evidence = "modelled"
    arch = "sm_120"
    device: DeviceFingerprint | None = None

    def __init__(self, study: Study, log: Log) -> None:
        self._study, self._log = study, log

    def evaluate(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        for variant in variants:
            self._log.before_trial(len(self._log.evaluated))
            self._log.evaluated.append((variant.layout_name, candidate_key(variant.candidate)))
            record = blank_record(self._study, variant, self)
            if self._log.does_not_compile(variant.candidate):
                yield replace(record, status=self._log.how_it_fails, reason="pretended")
                continue
            times = []
            for number, point in enumerate(self._study.points):
                time_us = pretended_us(variant.layout_name, variant.candidate, number)
                times.append(PointTime(dict(point), time_us, time_us, time_us))
            yield replace(record, status="ok", blocks_per_sm=1, times=tuple(times))

    def promising(self, variants: Iterable[Variant]) -> list[Candidate]:
        return []

    def finish(self, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        yield from ()


class Heard(Listener):
    """Remembers what a listener is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, total: int, evaluator: str, why: str) -> None:
        self.lines.append(f"started {total} {evaluator}: {why}")

    def phase(self, name: str) -> None:
        self.lines.append(f"phase {name}")

    def trial_done(self, record: TrialRecord) -> None:
        self.lines.append(f"trial {record.status}")

    def proofs(self, done: int, total: int) -> None:
        self.lines.append(f"proofs {done}/{total}")

    def finished(self, report: TuneReport) -> None:
        self.lines.append("finished")


def install(patch: pytest.MonkeyPatch, log: Log) -> None:
    """Put the doubles in place of compiler, model and emulator."""

    def prove(
        study: Study, variants: Mapping[SourceKey, tuple[Variant, int]], on_proof: Callable[[SourceKey, Proof], None]
    ) -> None:
        for place, (variant, _) in variants.items():
            log.proven.append(place)
            wrong = log.is_wrong(variant)
            on_proof(place, Proof(not wrong, None if wrong else 1e-3, "pretended" if wrong else ""))

    patch.setattr(tuning, "find_toolchain", lambda arch: TOOLCHAIN)
    patch.setattr(tuning, "ModelEvaluator", lambda study: PretendedEvaluator(study, log))
    patch.setattr(run, "prove", prove)


@dataclass(frozen=True)
class Task:
    """A proof, as its process is given it, that ends by a signal, or raises where that is 0."""

    signum: int

    @property
    def variant(self) -> Any:
        return SimpleNamespace(source=SimpleNamespace(name="some_kernel"))

    def run(self) -> None:
        if self.signum:
            os.kill(os.getpid(), self.signum)
        raise BuildError("cache", "full", seen="really", remedy="free some")


def options(db: Path, **changes: Any) -> TuneOptions:
    """Two layouts, 20 trials each."""
    settings: dict[str, Any] = {
        "spec": small_spec(), "target": "sm_120", "db": f"sqlite:///{db}", "cache_dir": db.parent,
        "layouts": ("h8_p1", "h16_p64"), "trials": 20, "evaluator": "model",
    }  # fmt: skip
    return TuneOptions(**settings | changes)


def _killed_after(count: int) -> Callable[[int], None]:
    def maybe(number: int) -> None:
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return maybe


if __name__ == "__main__":  # python tuning_doubles.py DATABASE COUNT: tune, and die before trial COUNT
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, Log(before_trial=_killed_after(int(sys.argv[2]))))
        tune(options(Path(sys.argv[1])), Heard())
