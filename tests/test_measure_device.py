"""The GPU side of measuring, against a driver in Python: inputs, graphs, envelope, and what is checked."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
import toy_family
from test_device import SM_90, SM_120

from kgen.device import DriverTooOldError, cuda_driver
from kgen.errors import DeviceError, InputError
from kgen.family import Array, Case, Family, Layout, Tolerance
from kgen.measure import gpu as measure_device
from kgen.measure import inputs as measure_inputs
from kgen.measure.gpu import DeviceBackend
from kgen.measure.job import Job

POINT = {"batch": 3, "length": 2000}
SET_BYTES = 24064  # values, which are streamed; offsets are there once
SETS = 7  # 2.5 times the fake device's 64 KiB of L2
LAUNCHES = 21


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    fake = fake_cuda.FakeCuda(toy_family.kernels())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    cuda_driver.driver.cache_clear()

    def find(name: str, where: str) -> Family:
        assert name == "toy"
        return toy_family.ToyFamily()

    monkeypatch.setattr(measure_device, "find_family", find)
    monkeypatch.setattr(measure_device, "WARMUP_S", 0.0)
    yield fake
    cuda_driver.driver.cache_clear()


def opened(envelope: bool = False) -> DeviceBackend:
    backend = DeviceBackend()
    found = backend.open({"ordinal": 0, "target": asdict(SM_90), "envelope": asdict(SM_120) if envelope else None})
    assert found["compute_capability"] == "9.0"
    return backend


def job(folder: Path, first: str = "segment_sum", last: str = "finish", minimum: tuple[int, int] = (13, 0)) -> Job:
    path = folder / f"{first}_{last}.cubin"
    path.write_bytes(f"{first} {last}".encode())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    candidate = toy_family.candidate(first, last)
    return Job(path.name, "toy", candidate, toy_family.LAYOUT, str(path), digest, toy_family.TOLERANCES, minimum)


def armed(backend: DeviceBackend, loaded: Job) -> str:
    backend.load(loaded)
    backend.prepare("toy", toy_family.LAYOUT, POINT)
    backend.arm(loaded.name, POINT)
    return loaded.name


def test_job_from_load_to_unload(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened()
    measured = job(tmp_path)
    resources = backend.load(measured)
    assert resources == {"registers": 64, "shared_bytes": 51200, "local_bytes": 8, "blocks_per_sm": 4}
    verdict = backend.check(measured.name)
    assert verdict["ok"], verdict["reason"]
    assert 0 < verdict["relative_error"] < 1e-5
    cuda.launches.clear()
    name = armed(backend, measured)
    assert len(cuda.launches) == 2 * LAUNCHES, "captured, two kernels a launch"
    samples = backend.sample(name, POINT, 5)
    assert len(samples) == 5
    assert all(sample > 0 for sample in samples)
    verdict = backend.confirm(name, POINT)
    assert verdict["ok"], verdict["reason"]
    assert verdict["relative_error"] < 1e-5
    backend.disarm(name, POINT)
    backend.unload(name)
    assert (cuda.graphs, cuda.events, cuda.modules) == (0, 0, set())


@pytest.mark.parametrize("alone", [False, True])
def test_what_calls_share_is_made_once_before_the_clock_starts(
    cuda: fake_cuda.FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    made: list[bool] = []
    used: list[bool] = []
    monkeypatch.setattr(measure_device, "find_family", lambda name, where: toy_family.SharingToy())

    def keep(struct: int) -> None:
        made.append(not used)
        toy_family.keep_offsets(struct)

    def total(struct: int) -> None:
        used.append(toy_family.kept(struct) is not None)
        toy_family.sum_kept(struct)

    cuda.kernels |= {"keep_offsets": keep, "sum_kept": total}
    backend = opened()
    measured = replace(job(tmp_path, "sum_kept", "finish keep_offsets"), alone=alone)
    measured = replace(measured, candidate=toy_family.candidate("sum_kept"))
    name = armed(backend, measured)
    backend.sample(name, POINT, 1)
    verdict = backend.confirm(name, POINT)
    assert verdict["ok"], verdict["reason"]
    assert made == ([] if alone else [True])
    assert set(used) == {not alone}


def test_every_launch_of_a_rotation_reads_its_own_copy(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    seen: list[int] = []
    plain = cuda.kernels["segment_sum"]

    def spy(struct: int) -> None:
        seen.append(toy_family.Arguments(struct).values.ctypes.data)
        plain(struct)

    cuda.kernels["segment_sum"] = spy
    backend = opened()
    name = armed(backend, job(tmp_path))
    backend.sample(name, POINT, 1)
    assert len(seen) == 2 * LAUNCHES, "one replay to warm up, one timed"
    places = seen[:SETS]
    assert [place - places[0] for place in places] == [SET_BYTES * index for index in range(SETS)]
    assert seen == places * (2 * LAUNCHES // SETS)


def test_inputs_are_shared_by_jobs_and_kept_while_there_is_room(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened()
    first = armed(backend, job(tmp_path))
    blocks = len(cuda.memory)
    second = armed(backend, job(tmp_path, last="slightly_off"))
    assert len(cuda.memory) == blocks + 1, "the second job brings its workspace only"
    for name in (first, second):
        backend.disarm(name, POINT)
    other = {"batch": 1, "length": 10}
    backend.prepare("toy", toy_family.LAYOUT, other)
    assert len(cuda.memory) == 6, "arena and two outputs of each point"
    kept = set(cuda.memory)
    backend.prepare("toy", toy_family.LAYOUT, POINT)
    assert set(cuda.memory) == kept


def test_points_used_least_recently_make_room_unless_in_use(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened()
    backend._budget_bytes = 1  # every further point is one too many
    name = armed(backend, job(tmp_path))
    small, last = {"batch": 1, "length": 10}, {"batch": 2, "length": 10}
    backend.prepare("toy", toy_family.LAYOUT, small)
    backend.prepare("toy", toy_family.LAYOUT, last)
    assert len(cuda.memory) == 3 + 1 + 3, "the point in use, its workspace, the last point"
    assert backend.confirm(name, POINT)["ok"]
    backend.disarm(name, POINT)
    backend.prepare("toy", toy_family.LAYOUT, small)
    assert len(cuda.memory) == 3


def test_wrong_kernels_are_found_in_the_cases_and_in_the_timed_launches(
    cuda: fake_cuda.FakeCuda, tmp_path: Path
) -> None:
    backend = opened()
    name = armed(backend, job(tmp_path, "remembers_lengths"))
    verdict = backend.check(name)
    assert not verdict["ok"]
    assert "total of ragged, replayed" in verdict["reason"]
    name = armed(backend, job(tmp_path, "adds_to_workspace"))
    backend.sample(name, POINT, 1)
    verdict = backend.confirm(name, POINT)
    assert (verdict["ok"], verdict["relative_error"]) == (False, None)
    assert "total of point" in verdict["reason"]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The budget of the reference allows two of the three rows of `POINT`; the rows that a reference was made of."""
    monkeypatch.setattr(measure_inputs, "REFERENCE_FLOP", 2.0 * POINT["length"])
    made: list[list[int]] = []
    plain = toy_family.ToyFamily.reference

    def spy(
        family: toy_family.ToyFamily,
        layout: Layout,
        case: Case,
        inputs: Mapping[str, Array | None],
        rows: Array | None = None,
    ) -> dict[str, Array]:
        if case.name == "point":
            assert rows is not None, "the whole reference is too much work"
            made.append([int(row) for row in rows])
        return plain(family, layout, case, inputs, rows)

    monkeypatch.setattr(toy_family.ToyFamily, "reference", spy)
    return made


def test_no_kernel_vouches_for_itself_at_a_large_point(
    cuda: fake_cuda.FakeCuda, tmp_path: Path, large: list[list[int]]
) -> None:
    backend = opened()
    verdict = backend.confirm(armed(backend, job(tmp_path, last="slightly_off")), POINT)
    assert (verdict["ok"], verdict["relative_error"]) == (False, None), "the first kernel is not believed"
    assert "total of point, seed 0: relative L2 error 0.001 (at most 1e-05)" in verdict["reason"]
    verdict = backend.confirm(armed(backend, job(tmp_path)), POINT)
    assert verdict["ok"], verdict["reason"]
    assert 0 < verdict["relative_error"] < 1e-5, "its own error, whoever was first"
    assert large == [[0, 2]], "made once for all kernels"


def test_tolerances_are_not_widened_at_a_large_point(
    cuda: fake_cuda.FakeCuda, tmp_path: Path, large: list[list[int]]
) -> None:
    backend = opened()
    measured = job(tmp_path, last="slightly_off")
    verdicts = []
    for relative_l2 in (0.00101, 0.00099):  # what it is off by is 0.001
        tolerances = {"total": Tolerance(relative_l2, 100.0), "log": Tolerance(1e-2, 1.0)}
        named = Job(**{**vars(measured), "name": str(relative_l2), "tolerances": tolerances})
        verdicts.append(backend.confirm(armed(backend, named), POINT)["ok"])
    assert verdicts == [True, False]


def test_elements_outside_the_sample_must_be_written_too(
    cuda: fake_cuda.FakeCuda, tmp_path: Path, large: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_middle(struct: int) -> None:
        arguments = toy_family.Arguments(struct)
        kept = arguments.total[1].copy()
        toy_family.finish(struct)
        arguments.total[1] = kept

    cuda.kernels["forgets_middle"] = forgets_middle
    monkeypatch.setattr(measure_inputs, "UNWRITTEN_CHUNK", 1)
    backend = opened()
    verdict = backend.confirm(armed(backend, job(tmp_path, last="forgets_middle")), POINT)
    assert large == [[0, 2]]
    assert not verdict["ok"]
    assert verdict["reason"] == "total of point, seed 0: 1 of 3 elements are NaN or never written, first [1]"


def test_envelope_pads_every_launch(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened(envelope=True)
    measured = job(tmp_path)
    assert backend.load(measured)["blocks_per_sm"] == 1, "sm_120 holds one block of 51216 bytes and 1024 reserved"
    padded = backend.load(measured)["shared_bytes"]
    assert padded == 115_840 - 16
    armed(backend, measured)
    assert {shared for entry, _, _, shared in cuda.launches if entry == "segment_sum"} == {padded}


def test_damaged_missing_and_too_new_cubins_are_refused(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened()
    good = job(tmp_path)
    Path(good.cubin_path).write_bytes(b"segment_sum finish ")
    with pytest.raises(DeviceError, match=r"segment_sum_finish.cubin: is not the cubin that was built"):
        backend.load(good)
    Path(good.cubin_path).unlink()
    with pytest.raises(DeviceError, match=r"segment_sum_finish.cubin: cannot be read.*build it again"):
        backend.load(good)
    with pytest.raises(DriverTooOldError):
        backend.load(job(tmp_path, minimum=(14, 0)))


def test_device_of_another_architecture_is_refused(cuda: fake_cuda.FakeCuda) -> None:
    with pytest.raises(DeviceError, match="device 0: is not of target sm_120, it is sm_90"):
        DeviceBackend().open({"ordinal": 0, "target": asdict(SM_120), "envelope": None})


def test_kernel_that_fits_no_envelope_is_an_input_error(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    cuda.registers = 300
    with pytest.raises(InputError, match="target sm_120: no block of this shape fits an SM"):
        opened(envelope=True).load(job(tmp_path))
    assert cuda.modules == set()


def test_tolerances_of_the_job_are_used(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend = opened()
    strict = job(tmp_path, last="slightly_off")
    assert not backend.confirm(armed(backend, strict), POINT)["ok"]
    loose = {"total": Tolerance(1e-2, 100.0), "log": Tolerance(1e-2, 1.0)}
    lenient = Job(**{**vars(strict), "name": "lenient", "tolerances": loose})
    verdict = backend.confirm(armed(backend, lenient), POINT)
    assert verdict["ok"]
    assert np.isclose(verdict["relative_error"], 1e-3, rtol=1e-2)


def test_canary_copies_on_the_device(cuda: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_device, "CANARY_BYTES", 1 << 16)
    backend = opened()
    assert backend.canary() > 0
    blocks = len(cuda.memory)
    assert backend.canary() > 0
    assert (len(cuda.memory), cuda.graphs) == (blocks, 0), "its buffers are kept, its graphs are not"
