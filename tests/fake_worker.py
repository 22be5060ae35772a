"""A measuring worker without a GPU: its jobs' candidates say what they do. Arguments: log file, canary times, parent.

``does`` of a candidate is ``ok`` or what goes wrong; ``time_us`` is its time, ``slow_at`` a batch where it takes
ten times as long.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgen.device.cuda_driver import CudaError
from kgen.errors import DeviceError, InputError
from kgen.measure.job import Job
from kgen.measure.worker import run


class FakeBackend:
    def __init__(self, log: Path, canaries: list[float]) -> None:
        self.log, self.canaries = log, canaries
        self.jobs: dict[str, Job] = {}
        self.prepared: set[int] = set()
        self.armed: set[tuple[str, int]] = set()

    def note(self, *words: object) -> None:
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(" ".join(map(str, words)) + "\n")

    def does(self, name: str) -> str:
        return str(self.jobs[name].candidate["does"])

    def misbehave(self, stage: str, name: str) -> None:
        match self.does(name).split():
            case ["hang", at] if at == stage:
                subprocess.Popen(["sleep", "60"])  # a child that must go with the worker
                time.sleep(60)
            case ["abort", at] if at == stage:
                os.write(2, b"last words\n")
                os.abort()
            case ["sticky", at] if at == stage:
                raise CudaError("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")
            case ["fails", at] if at == stage:
                raise DeviceError("cuMemAlloc", "failed")
            case ["bug", at] if at == stage:
                raise ZeroDivisionError("a bug")
            case ["noise", at] if at == stage:
                sys.stdout.write("printed by a library\n")
                ctypes.CDLL(None).write(1, b"and by C\n", 9)

    def open(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self.note("open", os.getpid())
        if settings["ordinal"] == 7:
            raise DeviceError("device", "no such ordinal")
        return {
            "compute_capability": "9.0",
            "sms": 132,
            "shared_bytes_per_block": 232448,
            "l2_bytes": 62914560,
            "memory_clock_khz": 3201000,
            "name": "fake",
            "driver_version": "13.0",
        }

    def prepare(self, family: str, layout: Mapping[str, Any], point: Mapping[str, int]) -> None:
        if point["batch"] == 99:
            raise DeviceError("inputs", "do not fit")
        self.prepared.add(point["batch"])

    def load(self, job: Job) -> Mapping[str, int]:
        self.jobs[job.name] = job
        self.note("load", job.name)
        self.misbehave("load", job.name)
        if self.does(job.name) == "infeasible":
            raise InputError("target sm_120", "no block of this shape fits an SM")
        return {"registers": 168, "shared_bytes": 100_000, "local_bytes": 0, "blocks_per_sm": 2}

    def check(self, name: str) -> Mapping[str, Any]:
        self.note("check", name)
        self.misbehave("check", name)
        ok = self.does(name) != "wrong"
        return {"ok": ok, "reason": "" if ok else "out of ragged: off", "relative_error": 2e-3 if ok else 0.5}

    def arm(self, name: str, point: Mapping[str, int]) -> None:
        assert name in self.jobs
        assert point["batch"] in self.prepared
        self.note("arm", name, point["batch"])
        self.armed.add((name, point["batch"]))
        self.misbehave("arm", name)

    def sample(self, name: str, point: Mapping[str, int], replays: int) -> list[float]:
        assert (name, point["batch"]) in self.armed
        self.note("sample", name, point["batch"], replays)
        self.misbehave("sample", name)
        candidate = self.jobs[name].candidate
        slow = candidate.get("slow_at") == point["batch"]
        return [float(candidate["time_us"]) * (10 if slow else 1)] * replays

    def confirm(self, name: str, point: Mapping[str, int]) -> Mapping[str, Any]:
        self.note("confirm", name, point["batch"])
        ok = self.does(name) != "wrong when timed"
        return {"ok": ok, "reason": "" if ok else "out at batch=1: off", "relative_error": None}

    def disarm(self, name: str, point: Mapping[str, int]) -> None:
        self.armed.remove((name, point["batch"]))

    def unload(self, name: str) -> None:
        assert not [job for job, _ in self.armed if job == name]
        del self.jobs[name]

    def canary(self) -> float:
        return self.canaries.pop(0) if self.canaries else 100.0


if __name__ == "__main__":
    run(FakeBackend(Path(sys.argv[1]), [float(word) for word in sys.argv[2].split(",") if word]))
