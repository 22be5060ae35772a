"""Measuring kernels that write their inputs: each launch its own pool through its own table, contents renewed."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from test_device import SM_90

from kgen.device import cuda_driver
from kgen.families.kv_defrag import KvDefrag
from kgen.families.slot_remap import SlotRemap
from kgen.family import Array, Family, Point, families
from kgen.measure import gpu as measure_device
from kgen.measure.gpu import DeviceBackend
from kgen.measure.job import Job
from kgen.resources import SPECS
from kgen.spec import Spec, load_spec

SPEC = load_spec(SPECS / "kv_defrag.yaml")
LAYOUT = SPEC.layout("mla_fp8_disjoint")
POINT = {"layers": 2, "rows": 20}
REMAP_SPEC = load_spec(SPECS / "slot_remap.yaml")
REMAP_POINT = {"requests": 2, "context": 4000, "entries": 300, "moved_percent": 100}
LAYER_BYTES = 42 * 576
Armed = tuple[DeviceBackend, str]


def words(address: int, count: int, kind: Any) -> Array:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def arguments(struct: int, family: type[Family] = KvDefrag) -> dict[str, Any]:
    params = family.params
    values = params.packer.unpack(ctypes.string_at(struct, params.size_bytes))
    return dict(zip([item.name for item in params.parameters], values, strict=True))


def mover(skip: int = 0) -> Callable[[int], None]:
    """The move kernel, on the host; it leaves the first ``skip`` moves out."""

    def move(struct: int) -> None:
        given = arguments(struct)
        count = given["moves"] if given["count"] == 0 else int(words(given["count"], 1, ctypes.c_int32)[0])
        source, target = (
            words(given[name], count, ctypes.c_int64 if given["wide_slots"] >> bit & 1 else ctypes.c_int32)[skip:]
            for bit, name in enumerate(("src_slots", "dst_slots"))
        )
        for layer in words(given["layer_ptrs"], given["layers"], ctypes.c_uint64):
            rows = words(int(layer), given["slots"] * given["row_stride"], ctypes.c_uint8)
            pool = rows.reshape(given["slots"], -1)
            pool[target, : given["row_bytes"]] = pool[source, : given["row_bytes"]]

    return move


def rewriter(skip: int = 0) -> Callable[[int], None]:
    """The rewrite kernel, on the host, of int32 lists and full rows; it leaves the first ``skip`` entries alone."""

    def rewrite(struct: int) -> None:
        given = arguments(struct, SlotRemap)
        slot_map = words(given["slot_map"], given["slots"], ctypes.c_int32)
        tokens = given["requests"] * given["row_stride"]
        for name, count in (("req_to_token", tokens), ("slot_list", given["entries"])):
            numbers = words(given[name], count, ctypes.c_int32)[skip:]
            numbers[:] = np.where(numbers < 0, numbers, slot_map[numbers])

    return rewrite


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    fake = fake_cuda.FakeCuda({name: mover() for name in ("kv_defrag_move", "kv_defrag_exact", "kv_defrag_stage")})
    fake.struct_bytes = KvDefrag.params.size_bytes
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    cuda_driver.driver.cache_clear()
    monkeypatch.setattr(measure_device, "WARMUP_S", 0.0)
    yield fake
    cuda_driver.driver.cache_clear()


def armed(folder: Path, spec: Spec = SPEC, layout_name: str = "mla_fp8_disjoint", point: Point = POINT) -> Armed:
    family, layout, path = spec.family, spec.layout(layout_name), folder / "cubin"
    path.write_text(" ".join(kernel.entry for kernel in family.kernels(spec.default, layout)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    job = Job("job", family.name, spec.default, layout, str(path), digest, spec.tolerances, (13, 0))
    backend = DeviceBackend()
    backend.open({"ordinal": 0, "target": asdict(SM_90), "envelope": None})
    backend.load(job)
    backend.prepare(family.name, layout, point)
    backend.arm("job", point)
    return backend, "job"


def test_moves_are_checked_and_confirmed(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend, name = armed(tmp_path)
    assert backend.check(name) == {"ok": True, "reason": "", "relative_error": 0.0}
    backend.sample(name, POINT, 2)
    assert backend.confirm(name, POINT) == {"ok": True, "reason": "", "relative_error": 0.0}
    memory = len(cuda.memory)
    backend.disarm(name, POINT)
    backend.unload(name)
    assert len(cuda.memory) == memory, "a disjoint move has no workspace"


def test_a_table_points_at_every_layer_of_its_own_copy(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def spy(struct: int) -> None:
        given = arguments(struct)
        seen.append([int(layer) for layer in words(given["layer_ptrs"], given["layers"], ctypes.c_uint64)])
        mover()(struct)

    cuda.kernels["kv_defrag_move"] = spy
    backend, name = armed(tmp_path)
    backend.sample(name, POINT, 1)
    places = [tables[0] for tables in seen]
    sets = len(set(places))
    assert sets == 4, "2.5 times the fake device's 64 KiB of L2, in pools of 48 KiB"
    assert all(second - first == LAYER_BYTES for first, second in seen)
    assert {place - places[0] for place in places} == {2 * LAYER_BYTES // 256 * 256 * index for index in range(sets)}


def test_a_move_that_is_left_out_is_seen_though_it_was_done_before(cuda: fake_cuda.FakeCuda, tmp_path: Path) -> None:
    backend, name = armed(tmp_path)
    backend.sample(name, POINT, 1)
    cuda.kernels["kv_defrag_move"] = mover(skip=1)
    verdict = backend.confirm(name, POINT)
    assert not verdict["ok"]
    assert "relative L2 error" in verdict["reason"]


@pytest.mark.parametrize("context", [4000, 6000], ids=["5 sets", "4 sets"])
def test_a_rewrite_that_undoes_itself_is_confirmed_after_any_number_of_replays(
    cuda: fake_cuda.FakeCuda, tmp_path: Path, context: int
) -> None:
    point = REMAP_POINT | {"context": context}
    cuda.struct_bytes = SlotRemap.params.size_bytes
    cuda.kernels = {"slot_remap_rewrite": rewriter()}
    backend, name = armed(tmp_path, REMAP_SPEC, "int32", point)
    for replays in (1, 2):
        backend.sample(name, point, replays)
        assert backend.confirm(name, point) == {"ok": True, "reason": "", "relative_error": 0.0}
    cuda.kernels["slot_remap_rewrite"] = rewriter(skip=1)
    assert "relative L2 error" in backend.confirm(name, point)["reason"]
    cuda.kernels["slot_remap_rewrite"] = lambda struct: None
    assert "relative L2 error" in backend.confirm(name, point)["reason"]


INOUT_POINTS = [(SPEC, POINT), (REMAP_SPEC, REMAP_POINT)]


@pytest.mark.parametrize(("spec", "point"), INOUT_POINTS, ids=lambda item: getattr(item, "label", ""))
def test_every_launch_on_a_points_inouts_does_as_much_and_three_leave_what_one_does(spec: Spec, point: Point) -> None:
    family, layout = spec.family, next(iter(spec.layouts.values()))
    case = family.point_case(point)
    inputs, seen = family.make_inputs(layout, case, seed=0), []
    for _ in range(3):
        result = family.reference(layout, case, inputs)
        inputs |= {name: array.astype(_dtype(inputs, name)) for name, array in result.items()}
        seen.append(result)
    assert all(np.array_equal(seen[0][name], seen[2][name]) for name in seen[0])


@pytest.mark.parametrize("percent", [4, 100])
def test_map_rewrites_are_timed_with_a_map_that_moves_so_many_and_undoes_itself(percent: int) -> None:
    family, layout = REMAP_SPEC.family, REMAP_SPEC.layout("int32")
    case = family.point_case(REMAP_POINT | {"moved_percent": percent})
    slot_map = family.make_inputs(layout, case, seed=0)["slot_map"]
    assert slot_map is not None
    slots = np.arange(slot_map.size)
    assert np.array_equal(slot_map[slot_map], slots)
    assert (slot_map != slots).mean() == pytest.approx(percent / 100, abs=1e-5)


def test_what_is_written_in_place_is_streamed_and_tested_here() -> None:
    written = {family.name: set(family.inouts) for family in families().values() if family.inouts}
    assert set(written) == {spec.family.name for spec, _ in INOUT_POINTS}
    assert all(names <= set(families()[name].streamed) for name, names in written.items())


def _dtype(inputs: Mapping[str, Array | None], name: str) -> np.dtype[Any]:
    array = inputs[name]
    assert array is not None
    return array.dtype
