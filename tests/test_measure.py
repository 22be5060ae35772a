"""Measuring: what happens to jobs that hang, crash, compute the wrong thing or are slow, without a GPU.

The worker is a real process (tests/fake_worker.py) that runs the product's loop over a backend without a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_device import SM_90, SM_120

from kgen.errors import DeviceError
from kgen.family import Tolerance, Value
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult, MeasureLimits, target_from_json
from kgen.measure.process import WorkerError, WorkerProcess
from kgen.measure.timing import BestTimes, Canary, input_sets, interleaved, launches_per_replay, summarise

WORKER = Path(__file__).with_name("fake_worker.py")
QUICK = MeasureLimits(load_s=2.0, check_s=2.0, time_s=2.0)


class Bench:
    """An evaluator with the fake worker, and the log of what the worker was asked."""

    def __init__(self, folder: Path, canaries: str = "", ordinal: int = 0) -> None:
        self.log_file = folder / "log"
        command = [sys.executable, str(WORKER), str(self.log_file), canaries]
        self.evaluator = DeviceEvaluator(SM_90, SM_120, ordinal, QUICK, command)

    def log(self, word: str) -> list[str]:
        lines = self.log_file.read_text().splitlines()
        return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]

    def pids(self) -> list[int]:
        return [int(pid) for pid in self.log("open")]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.evaluator.close()


def job(name: str, does: str = "ok", time_us: int = 100, **more: int) -> Job:
    candidate: dict[str, Value] = {"does": does, "time_us": time_us, **more}
    return Job(name, "toy", candidate, {"heads": 8}, "/none", "0" * 64, {"out": Tolerance(1e-2, 1e-1)}, (13, 0))


def summary(results: list[JobResult]) -> list[tuple[str, str, list[float]]]:
    return [(result.job.name, result.status, [time.time_us for time in result.times]) for result in results]


def test_right_jobs_are_timed_at_every_point(bench: Bench) -> None:
    points = [{"batch": 1}, {"batch": 2}]
    results = bench.evaluator.evaluate([job("a", time_us=100), job("b", time_us=120)], points)
    assert summary(results) == [("a", "ok", [100.0, 100.0]), ("b", "ok", [120.0, 120.0])]
    first = results[0]
    assert first.relative_error == 2e-3
    assert first.resources is not None
    assert (first.resources.registers, first.resources.blocks_per_sm) == (168, 2)
    assert first.times[1].point == {"batch": 2}
    assert first.times[0].samples_us == (100.0,) * 7
    assert bench.evaluator.fingerprint.sms == 132
    assert len(bench.pids()) == 1


def test_rounds_are_interleaved_and_rotate(bench: Bench) -> None:
    results = bench.evaluator.time_candidates([job("a"), job("b", time_us=900), job("c")], {"batch": 1}, repeats=3)
    assert [line[0] for line in bench.log("sample")] == list("abcbcacab"), "no estimates, everybody in every round"
    assert [len(result.times[0].samples_us) for result in results] == [3, 3, 3]
    assert summary(results)[1] == ("b", "ok", [900.0]), "finals drop nobody"


def test_slow_candidates_are_dropped_where_they_are_slow(bench: Bench) -> None:
    jobs = [job("fast", time_us=100), job("slow", time_us=161), job("mixed", time_us=110, slow_at=2)]
    slow_kept = job("default", time_us=500)
    results = bench.evaluator.evaluate([*jobs, slow_kept], [{"batch": 1}, {"batch": 2}], slow_kept)
    assert summary(results) == [
        ("fast", "ok", [100.0, 100.0]),
        ("slow", "dropped", []),
        ("mixed", "ok", [110.0]),
        ("default", "ok", [500.0, 500.0]),
    ]
    assert results[1].reason == "estimated at 161.0 us, more than 1.6 times the best of 100.0 us"
    assert [(drop.point, drop.estimate_us) for drop in results[2].dropped] == [({"batch": 2}, 1100.0)]
    assert bench.log("sample").count("slow 1 3") == 1
    assert "slow 1 1" not in bench.log("sample"), "a dropped job is not timed to the end"
    (later,) = bench.evaluator.evaluate([job("later", time_us=170)], [{"batch": 1}])
    assert later.status == "dropped", "the best of earlier batches counts"


def test_the_reference_is_in_every_round_and_is_proven_once(bench: Bench) -> None:
    """It need not be a job itself; what is dropped is known beside it too."""
    points, default = [{"batch": 1}, {"batch": 2}], job("d", time_us=100)
    (first,) = bench.evaluator.evaluate([job("a", time_us=90)], points, default)
    assert [(time.time_us, time.reference_us) for time in first.times] == [(90.0, 100.0)] * 2
    alone = [line.split()[0] for line in bench.log("sample") if line.endswith("1 1")]
    assert alone[:6] == ["d", "a", "a", "d", "d", "a"]
    checks = len(bench.log("check"))
    b, c = bench.evaluator.evaluate([job("b", time_us=80), job("c", time_us=85, slow_at=2)], points, default)
    assert [time.reference_us for time in (*b.times, *c.times)] == [100.0] * 3
    assert [(drop.estimate_us, drop.reference_us) for drop in c.dropped] == [(850.0, 100.0)]
    assert bench.log("check")[checks:] == ["b", "c"]
    assert bench.log("confirm").count("d 1") == 1
    own, _ = bench.evaluator.evaluate([default, job("e")], points, default)
    assert [time.reference_us for time in own.times] == [100.0] * 2
    assert bench.log("check")[checks + 2 :] == ["d", "e"], "a job is always proven"


@pytest.mark.parametrize("does", ["wrong", "hang sample", "wrong when timed"])
def test_a_reference_that_fails_leaves_the_others_alone(bench: Bench, does: str) -> None:
    (a,) = bench.evaluator.evaluate([job("a")], [{"batch": 1}], job("d", does))
    assert (a.status, [time.reference_us for time in a.times]) == ("ok", [None])
    (b,) = bench.evaluator.evaluate([job("b")], [{"batch": 1}], job("d"))
    assert bench.log("check") == ["d", "a", "d", "b"], "it is not trusted"
    assert [time.reference_us for time in b.times] == [100.0]


def test_finals_hold_the_times_of_their_reference(bench: Bench) -> None:
    jobs = [job("a", time_us=90), job("d", time_us=120)]
    results = bench.evaluator.time_candidates(jobs, {"batch": 1}, reference="d")
    assert [time.reference_us for result in results for time in result.times] == [120.0, 120.0]
    (none,) = bench.evaluator.time_candidates(jobs[:1], {"batch": 1})
    assert none.times[0].reference_us is None


@pytest.mark.parametrize("stage", ["load", "check", "arm", "sample"])
def test_hanging_job_is_killed_and_the_others_go_on(bench: Bench, stage: str) -> None:
    results = bench.evaluator.evaluate([job("a"), job("bad", f"hang {stage}"), job("c")], [{"batch": 1}])
    assert summary(results) == [("a", "ok", [100.0]), ("bad", "hang", []), ("c", "ok", [100.0])]
    assert results[1].reason == f"{stage}: not done after 2 s"
    pids = bench.pids()
    assert len(pids) == 2, "one replacement"
    assert not process_group(pids[0]), "the killed worker's children are gone too"


def process_group(group: int) -> list[str]:
    """Command lines of the processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("stage", ["load", "check", "sample"])
def test_crash_is_a_launch_error_with_its_last_words(bench: Bench, stage: str) -> None:
    results = bench.evaluator.evaluate([job("bad", f"abort {stage}"), job("good")], [{"batch": 1}])
    assert summary(results) == [("bad", "launch_error", []), ("good", "ok", [100.0])]
    assert results[0].reason == f"{stage}: the worker ended (signal SIGABRT: last words)"


def test_sticky_error_replaces_the_worker_and_another_does_not(bench: Bench) -> None:
    results = bench.evaluator.evaluate(
        [job("fails", "fails arm"), job("sticky", "sticky sample"), job("good")], [{"batch": 1}]
    )
    assert [result.status for result in results] == ["launch_error", "launch_error", "ok"]
    assert results[0].reason == "arm: cuMemAlloc: failed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in results[1].reason
    assert len(bench.pids()) == 2


def test_wrong_results_are_never_timed(bench: Bench) -> None:
    results = bench.evaluator.evaluate([job("wrong", "wrong"), job("later", "wrong when timed")], [{"batch": 1}])
    assert summary(results) == [("wrong", "wrong_result", []), ("later", "wrong_result", [])]
    assert [result.reason for result in results] == ["out of ragged: off", "out at batch=1: off"]
    assert not [line for line in bench.log("sample") if line.startswith("wrong ")]


def test_job_outside_the_envelope_is_infeasible(bench: Bench) -> None:
    result = bench.evaluator.check(job("big", "infeasible"))
    assert (result.status, result.times) == ("infeasible", ())
    assert result.reason == "load: target sm_120: no block of this shape fits an SM"


def test_check_times_nothing(bench: Bench) -> None:
    assert bench.evaluator.check(job("a")).status == "ok"
    assert bench.evaluator.check(job("a")).status == "ok", "a name can come back"
    assert bench.evaluator.check(job("b", "wrong")).status == "wrong_result"
    assert bench.log("sample") == []


def test_what_libraries_print_is_not_taken_for_a_reply(bench: Bench) -> None:
    assert bench.evaluator.check(job("loud", "noise check")).status == "ok"


def test_a_bug_in_the_worker_shows_its_traceback(bench: Bench) -> None:
    result = bench.evaluator.check(job("bug", "bug check"))
    assert result.status == "launch_error"
    assert "ZeroDivisionError: a bug" in result.reason


@pytest.mark.parametrize(("canaries", "before_batch"), [("100,111", 1), ("100,100,89", 2)])
def test_degraded_device_stops_the_study(tmp_path: Path, canaries: str, before_batch: int) -> None:
    made = Bench(tmp_path, canaries)
    try:
        statuses = []
        for _ in range(before_batch):
            (result,) = made.evaluator.evaluate([job("a")], [{"batch": 1}])
            statuses.append(result.status)
        assert statuses == ["ok"] * (before_batch - 1) + ["device_degraded"]
        assert result.times == ()
        assert "the canary copy took" in result.reason
        with pytest.raises(DeviceError, match="device: is degraded, the canary copy took"):
            made.evaluator.evaluate([job("a")], [{"batch": 1}])
    finally:
        made.evaluator.close()


def test_trouble_that_no_job_is_to_blame_for_is_an_error(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"device: measuring failed, prepare: inputs: do not fit; run kgen doctor"):
        bench.evaluator.evaluate([job("a")], [{"batch": 99}])
    with pytest.raises(DeviceError, match="open: device: no such ordinal"):
        Bench(tmp_path, ordinal=7).evaluator.check(job("a"))
    missing = DeviceEvaluator(SM_90, worker_command=[str(tmp_path / "none")])
    with pytest.raises(DeviceError, match="measuring worker: cannot be started"):
        missing.check(job("a"))


def test_worker_dies_with_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = (
        "import os, signal, sys\n"
        "from kgen.measure.process import WorkerProcess\n"
        f"worker = WorkerProcess([sys.executable, {str(WORKER)!r}, {str(log)!r}, ''])\n"
        "worker.request('open', 30, settings={'ordinal': 0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", text], check=False, cwd=Path(__file__).parent.parent)
    (pid,) = [int(line.split()[1]) for line in log.read_text().splitlines()]
    deadline = time.monotonic() + 10
    while process_group(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_group(pid)


def test_worker_runs_this_kgen_wherever_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real worker's answer needs the checkout's modules; any other kgen that Python finds is a broken one here."""
    decoy = tmp_path / "decoy" / "kgen"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise ImportError('another kgen')\n")
    monkeypatch.setenv("PYTHONPATH", str(decoy.parent))
    monkeypatch.chdir(tmp_path)
    worker = WorkerProcess()
    try:
        with pytest.raises(WorkerError, match=r"^load: /none: cannot be read.*build it again$") as caught:
            worker.request("load", 60.0, job=job("a").to_json())
        assert (caught.value.status, caught.value.lost) == ("launch_error", False)
    finally:
        worker.close()


def test_worker_needs_no_installed_kgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without site, Python looks into no environment: it has the path that the worker is given, and numpy there."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("numpy", "numpy.libs"):
        folder = Path(np.__file__).parents[1] / name
        if folder.exists():
            (libraries / name).symlink_to(folder)
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    monkeypatch.chdir(tmp_path)
    worker = WorkerProcess([sys.executable, "-S", "-m", "kgen.measure.worker"])
    try:
        with pytest.raises(WorkerError, match=r"^load: /none: cannot be read"):
            worker.request("load", 60.0, job=job("a").to_json())
    finally:
        worker.close()


def test_close_ends_the_worker(bench: Bench) -> None:
    bench.evaluator.check(job("a"))
    bench.evaluator.close()
    with pytest.raises(ProcessLookupError):
        os.kill(bench.pids()[0], 0)
    assert bench.evaluator.check(job("a")).status == "ok", "and a later call starts another"


def test_job_and_target_survive_json() -> None:
    import dataclasses
    import json

    sent = job("a")
    assert Job.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    assert target_from_json(json.loads(json.dumps(dataclasses.asdict(SM_120)))) == SM_120


def test_statistics() -> None:
    timed = summarise({"batch": 1}, [3.0, 1.0, 2.0, 50.0], 1e-3)
    assert (timed.time_us, timed.time_us_min, timed.time_us_max, timed.relative_error) == (2.5, 1.0, 50.0, 1e-3)
    assert list(interleaved(3, 2)) == [0, 1, 2, 1, 2, 0]
    best = BestTimes()
    assert best.drop_reason("p", 1000.0) == "", "nothing to compare with"
    best.note("p", 100.0)
    best.note("p", 120.0)
    assert best.drop_reason("p", 160.0) == ""
    assert best.drop_reason("p", 160.1) != ""
    assert best.drop_reason("q", 160.1) == ""
    canary = Canary()
    assert [bool(canary.degraded(us)) for us in (100.0, 110.0, 90.0, 110.1, 89.9)] == [False, False, False, True, True]


def test_replays_are_long_enough_and_no_longer() -> None:
    assert launches_per_replay(1, 1.0) == 20
    assert launches_per_replay(7, 1.0) == 21, "whole rotations"
    assert launches_per_replay(1, 200.0) == 5
    assert launches_per_replay(2, 85_000.0) == 2, "one rotation at least"
    assert [launches_per_replay(sets, 1.0, in_place=True) for sets in (1, 4, 10)] == [21, 20, 30], "odd rotations"


def test_input_sets_make_the_cache_cold_within_the_budget() -> None:
    l2 = 60 << 20
    assert input_sets(1 << 20, l2, 1 << 40) == 150, "2.5 caches"
    assert input_sets(1 << 30, l2, 1 << 40) == 1, "one set is larger than 2.5 caches"
    assert input_sets(100 << 20, l2, 1 << 40) == 2
    assert input_sets(1 << 30, l2, 1 << 30) == 1
    assert input_sets(100, l2, 1 << 40) == 256
