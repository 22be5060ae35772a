"""Measuring kernels that write their inputs: each launch its own pool through its own table, contents renewed."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from test_device import SM_90

from kgen.device import cuda_driver
from kgen.families.kv_defrag import KvDefrag
from kgen.family import Array
from kgen.measure import gpu as measure_device
from kgen.measure.gpu import DeviceBackend
from kgen.measure.job import Job
from kgen.resources import SPECS
from kgen.spec import load_spec

SPEC = load_spec(SPECS / "kv_defrag.yaml")
LAYOUT = SPEC.layout("mla_fp8_disjoint")
POINT = {"layers": 2, "rows": 20}
LAYER_BYTES = 42 * 576


def words(address: int, count: int, kind: Any) -> Array:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def arguments(struct: int) -> dict[str, Any]:
    params = KvDefrag.params
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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    fake = fake_cuda.FakeCuda({name: mover() for name in ("kv_defrag_move", "kv_defrag_exact", "kv_defrag_stage")})
    fake.struct_bytes = KvDefrag.params.size_bytes
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    cuda_driver.driver.cache_clear()
    monkeypatch.setattr(measure_device, "WARMUP_S", 0.0)
    yield fake
    cuda_driver.driver.cache_clear()


def armed(folder: Path) -> tuple[DeviceBackend, str]:
    path = folder / "cubin"
    path.write_bytes(b"kv_defrag_move kv_defrag_exact kv_defrag_stage")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    job = Job("job", "kv_defrag", SPEC.default, LAYOUT, str(path), digest, SPEC.tolerances, (13, 0))
    backend = DeviceBackend()
    backend.open({"ordinal": 0, "target": asdict(SM_90), "envelope": None})
    backend.load(job)
    backend.prepare("kv_defrag", LAYOUT, POINT)
    backend.arm("job", POINT)
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
