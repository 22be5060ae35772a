"""Validation finds every planted fault, and says which: on the GPU's launcher and on the emulator's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import fake_cuda
import numpy as np
import pytest
import toy_family

from kgen.device import CudaError, Device, cuda_driver
from kgen.device.envelope import load_kernels
from kgen.emulator import Buffer
from kgen.errors import EmulatorError
from kgen.family import MANY_SMS, Candidate, Case, Layout, Plan, Point, Tolerance
from kgen.validate import Problems, Verdict, compare, reversed_lengths, validate
from kgen.validate.launchers import DeviceLauncher, EmulatorLauncher, Launcher

FAMILY = toy_family.ToyFamily()


class ToyModule:
    """What the launcher needs of an emulated module; keeps what it was given."""

    def __init__(self) -> None:
        self.entries = toy_family.kernels()
        self.buffers: list[Sequence[Buffer]] = []
        self.seeds: list[int] = []

    def launch(
        self,
        entry: str,
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: bytes,
        buffers: Sequence[Buffer],
        seed: int = 0,
    ) -> None:
        self.buffers.append(buffers)
        self.seeds.append(seed)
        raw = np.frombuffer(params, np.uint8).copy()
        try:
            self.entries[entry](raw.ctypes.data)
        except MemoryError as error:
            raise EmulatorError("toy.cuh:7", "out of bounds", seen="block 0, thread 3") from error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    fake = fake_cuda.FakeCuda(toy_family.kernels())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    cuda_driver.driver.cache_clear()
    yield fake
    cuda_driver.driver.cache_clear()


def on_device(candidate: Mapping[str, int | str]) -> Launcher:
    names = " ".join(str(name) for name in candidate.values()).encode()
    device = Device.open()
    return DeviceLauncher(device, load_kernels(device, names, FAMILY.kernels(candidate, toy_family.LAYOUT)))


def in_emulator(candidate: Mapping[str, int | str]) -> Launcher:
    return EmulatorLauncher(ToyModule())  # type: ignore[arg-type]


def check(candidate: Mapping[str, int | str], launcher: Launcher, cases: Sequence[Case] | None = None) -> Verdict:
    return validate(
        FAMILY,
        candidate,
        toy_family.LAYOUT,
        toy_family.TOLERANCES,
        launcher,
        target_sms=4,
        resident_blocks=1,
        cases=cases,
    )


@pytest.mark.parametrize("launcher", [on_device, in_emulator])
def test_right_kernel_passes_every_case_seed_and_replay(cuda: fake_cuda.FakeCuda, launcher: object) -> None:
    assert callable(launcher)
    candidate = toy_family.candidate()
    verdict = check(candidate, launcher(candidate))
    assert verdict.ok, verdict.reason
    assert verdict.reason == ""
    found = {(result.name, result.seed, result.output) for result in verdict.cases}
    replays = {("ragged, replayed", 1000, output) for output in ("total", "log")}
    replays |= {("one, replayed", 1000, output) for output in ("total", "log")}
    assert found == replays | {(n, s, o) for n in ("ragged", "one") for s in (0, 1) for o in ("total", "log")}
    assert verdict.worst is not None
    assert 0 < verdict.worst.relative_l2 < 1e-6
    assert cuda.memory == {}, "every buffer is given back"


FAULTS = [
    ("forgets_last", "finish", r"total of ragged, seed 0: 1 of 3 elements are NaN or never written, first \[2\]"),
    ("adds_to_workspace", "finish", r"total of ragged, replayed, seed 1000: relative L2 error"),
    ("remembers_lengths", "finish", r"total of ragged, replayed, seed 1000: relative L2 error"),
    ("sorts_inputs", "finish", r"ragged, seed 0: the kernel changed its inputs: values"),
    ("segment_sum", "writes_past", r"ragged, seed 0: the kernel wrote outside of: total"),
    ("segment_sum", "finite_log", r"log of ragged, seed 0: 1 elements must be infinite and are not, first \[1\]"),
    ("segment_sum", "slightly_off", r"total of ragged, seed 0: relative L2 error 0.001 \(at most 1e-05\), largest 0.0"),
]


@pytest.mark.parametrize("launcher", [on_device, in_emulator])
@pytest.mark.parametrize(("first", "last", "reason"), FAULTS)
def test_planted_fault_is_named(cuda: fake_cuda.FakeCuda, launcher: object, first: str, last: str, reason: str) -> None:
    import re

    assert callable(launcher)
    candidate = toy_family.candidate(first, last)
    verdict = check(candidate, launcher(candidate))
    assert not verdict.ok
    assert re.search(reason, verdict.reason), verdict.reason


def test_emulator_fault_is_a_verdict(cuda: fake_cuda.FakeCuda) -> None:
    candidate = toy_family.candidate("illegal")
    verdict = check(candidate, in_emulator(candidate))
    assert (verdict.ok, verdict.cases) == (False, ())
    assert verdict.reason == "ragged, seed 0: toy.cuh:7: out of bounds, block 0, thread 3"


def test_sticky_device_error_is_raised_and_not_hidden_by_the_cleanup(cuda: fake_cuda.FakeCuda) -> None:
    candidate = toy_family.candidate("illegal")
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS") as raised:
        check(candidate, on_device(candidate))
    assert raised.value.is_sticky


class SpreadFamily(toy_family.ToyFamily):
    """Its blocks are as many as there are SMs; where they are ``faulty`` many, the first kernel forgets a segment."""

    def __init__(self, faulty: int) -> None:
        self.faulty = faulty
        self.planned: list[tuple[int, int]] = []

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        self.planned.append((sms, resident_blocks))
        first = "forgets_last" if sms == self.faulty else "segment_sum"
        plan = super().plan(toy_family.candidate(first), layout, capacity, sms=sms, resident_blocks=resident_blocks)
        launches = tuple(replace(launch, grid=(sms, 1, 1)) for launch in plan.launches)
        return replace(plan, launches=launches)


def check_spread(family: SpreadFamily, seeds: Sequence[int] = (0, 1)) -> Verdict:
    return validate(
        family,
        toy_family.candidate(),
        toy_family.LAYOUT,
        toy_family.TOLERANCES,
        in_emulator(toy_family.candidate()),
        target_sms=4,
        resident_blocks=2,
        seeds=seeds,
    )


def test_every_case_runs_under_the_longest_and_the_most_blocks_too() -> None:
    family = SpreadFamily(faulty=0)
    verdict = check_spread(family)
    assert verdict.ok, verdict.reason
    assert family.planned == [(4, 2), (1, 1), (4 * MANY_SMS, 2)] * 2, "for both cases, the target's first"
    ragged = [(r.name, r.seed) for r in verdict.cases if r.name.startswith("ragged") and r.output == "total"]
    assert ragged == [
        ("ragged", 0),
        ("ragged, replayed", 1000),
        ("ragged", 1),
        ("ragged in 1 x 128 + 1 x 32 threads", 0),
        ("ragged in 16 x 128 + 16 x 32 threads", 0),
    ]
    assert check_spread(family, seeds=()).reason == "no output of any case was checked"


@pytest.mark.parametrize(
    ("faulty", "name"),
    [(4, "ragged"), (1, "ragged in 1 x 128 + 1 x 32 threads"), (16, "ragged in 16 x 128 + 16 x 32 threads")],
)
def test_a_fault_of_one_plan_only_is_found_and_the_plan_named(faulty: int, name: str) -> None:
    verdict = check_spread(SpreadFamily(faulty))
    assert verdict.reason == f"total of {name}, seed 0: 1 of 3 elements are NaN or never written, first [2]"


def test_equal_plans_run_once() -> None:
    arguments = (toy_family.candidate(), toy_family.LAYOUT, {"batch": 1, "length": 5})
    assert len(FAMILY.proving_plans(*arguments, sms=4, resident_blocks=2)) == 1
    plans = SpreadFamily(faulty=0).proving_plans(*arguments, sms=1, resident_blocks=2)
    assert [plan.launches[0].grid[0] for plan in plans] == [1, MANY_SMS]


def test_no_cases_is_no_proof(cuda: fake_cuda.FakeCuda) -> None:
    candidate = toy_family.candidate()
    verdict = check(candidate, on_device(candidate), cases=())
    assert (verdict.ok, verdict.reason) == (False, "no output of any case was checked")


def test_device_replays_one_captured_graph(cuda: fake_cuda.FakeCuda) -> None:
    candidate = toy_family.candidate()
    assert check(candidate, on_device(candidate), cases=[Case("two", {"lengths": [2, 9]})]).ok
    assert len(cuda.launches) == 4, "seed 0: captured once for two calls; seed 1: launched"


def test_emulator_gets_bounds_writability_and_a_new_seed_each_call() -> None:
    module = ToyModule()
    assert check(toy_family.candidate(), EmulatorLauncher(module, seed=40)).ok  # type: ignore[arg-type]
    buffers = {buffer.name: buffer for buffer in module.buffers[0]}
    assert {name: buffer.size_bytes for name, buffer in buffers.items()} == {
        "values": 88, "offsets": 16, "total": 12, "log": 12, "partial": 12,
    }  # fmt: skip
    assert [name for name, buffer in buffers.items() if buffer.writable] == ["total", "log", "partial"]
    assert all(buffer.address % 256 == 0 for buffer in buffers.values())
    assert module.seeds[:6] == [40, 40, 41, 41, 42, 42], "both launches of a call; call, replay, second seed"


def test_compare_wants_shape_finiteness_and_both_tolerances() -> None:
    def result(found: list[float], reference: list[float], relative: float, largest: float) -> tuple[bool, str]:
        compared = compare(
            np.array(found), np.array(reference), Tolerance(relative, largest), name="case", seed=3, output="out"
        )
        return compared.ok, compared.reason

    assert result([1.0, 2.0], [1.0, 2.0], 1e-9, 1e-9) == (True, "")
    assert result([], [], 1e-9, 1e-9) == (True, "")
    assert result([0.0], [0.0], 1e-9, 1e-9) == (True, "")
    assert result([1e-3], [0.0], 1.0, 1.0)[0] is False, "any error is infinite against a reference of zeros"
    assert result([1.0, 2.1], [1.0, 2.0], 1.0, 0.05)[0] is False
    assert result([1.0, 2.1], [1.0, 2.0], 0.01, 1.0)[0] is False
    assert result([np.inf, 2.0], [1.0, 2.0], 1.0, 1.0)[0] is False
    assert result([-np.inf, 2.0], [-np.inf, 2.0], 1e-9, 1e-9) == (True, "")
    assert result([np.inf, 2.0], [-np.inf, 2.0], 1e-9, 1e-9)[0] is False
    assert result([1.0], [1.0, 2.0], 1.0, 1.0) == (False, "out of case, seed 3: has shape (1,), its reference (2,)")


def test_replay_changes_lengths_but_not_the_parameter_struct() -> None:
    problems = Problems(FAMILY, toy_family.LAYOUT)
    case = Case("ragged", {"lengths": [5, 0, 17], "flag": ("x", "y")})
    assert reversed_lengths(case).options == {"lengths": [17, 0, 5], "flag": ("x", "y")}
    (replay,) = problems.replays(case, 0)
    first = problems.first(case, 0)
    assert replay.call.scalars == first.call.scalars
    assert [list(p.call.inputs["offsets"]) for p in (first, replay)] == [[0, 5, 5, 22], [0, 17, 17, 22]]  # type: ignore[arg-type]
    assert problems.first(case, 0) is first, "made once"


def check_sharing(family: toy_family.SharingToy, launcher: Launcher) -> Verdict:
    candidate = toy_family.candidate("sum_kept")
    return validate(
        family, candidate, toy_family.LAYOUT, toy_family.TOLERANCES, launcher, target_sms=4, resident_blocks=1
    )


@pytest.mark.parametrize("on_gpu", [False, True])
def test_calls_that_may_share_are_proven_alone_and_sharing(cuda: fake_cuda.FakeCuda, on_gpu: bool) -> None:
    def launcher(family: toy_family.SharingToy) -> Launcher:
        if not on_gpu:
            return EmulatorLauncher(ToyModule())  # type: ignore[arg-type]
        kernels = family.kernels(toy_family.candidate("sum_kept"), toy_family.LAYOUT)
        device = Device.open()
        return DeviceLauncher(device, load_kernels(device, " ".join(k.entry for k in kernels).encode(), kernels))

    family = toy_family.SharingToy()
    verdict = check_sharing(family, launcher(family))
    assert verdict.ok, verdict.reason
    names = [result.name for result in verdict.cases if result.output == "log" and result.name.startswith("ragged")]
    more = "in 3 x 32 + 3 x 128 + 3 x 32 threads"
    assert names == ["ragged", "ragged, replayed", "ragged", f"ragged {more}", f"ragged, replayed {more}"]
    verdict = check_sharing(faulty := toy_family.SharingToy("keep_most_offsets"), launcher(faulty))
    assert verdict.reason.startswith("total of ragged in 3 x 32 + 3 x 128 + 3 x 32 threads, seed 0: relative L2 error")


def test_a_plan_whose_calls_may_share_runs_alone_unless_told() -> None:
    family, candidate, module = toy_family.SharingToy(), toy_family.candidate("sum_kept"), ToyModule()
    plan = family.plan(candidate, toy_family.LAYOUT, {"batch": 3, "length": 17}, sms=4, resident_blocks=1)
    problem = Problems(family, toy_family.LAYOUT).first(family.cases(toy_family.LAYOUT)[0], 0)
    launcher = EmulatorLauncher(module)  # type: ignore[arg-type]
    for ran in (plan, plan.alone(), plan.sharing()):
        launcher.run(family, ran, [problem.call])
    shared = [any(buffer.name == "kept" for buffer in buffers) for buffers in module.buffers]
    assert shared == [False] * 4 + [True] * 3
    assert plan.alone() == plan.alone().sharing() == plan.alone().alone()
