"""The emulator computes what the hardware's instructions compute, and catches each planted bug."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kgen.emulator import (
    EMULATOR_FLAGS,
    EMULATOR_LIBRARIES,
    FAULT_KINDS,
    Buffer,
    CopyTiming,
    EmulatedModule,
    EmulatorFault,
)
from kgen.errors import EmulatorError, InputError

KERNELS = Path(__file__).parent / "emulator_kernels"
INCLUDE = Path(__file__).parent.parent / "templates" / "include"
SEEDS = range(20)

Floats = npt.NDArray[np.float32]
Load = Callable[[str], EmulatedModule]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Compiles tests/emulator_kernels/<name>.cu once a test run (workers share it), with warnings as errors."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    modules: dict[str, EmulatedModule] = {}

    def module(name: str) -> EmulatedModule:
        if name not in modules:
            output = shared / f"emulated_{name}.so"
            with output.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not output.exists():
                    compile_kernels(KERNELS / f"{name}.cu", output)
            modules[name] = EmulatedModule(output)
        return modules[name]

    return module


def compile_kernels(source: Path, output: Path) -> None:
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = ["g++", *warnings, "-I", str(INCLUDE), *EMULATOR_FLAGS, str(source), "-o", str(output)]
    subprocess.run([*command, *EMULATOR_LIBRARIES], check=True)


def buffer(name: str, array: npt.NDArray[np.generic], *, writable: bool = False) -> Buffer:
    return Buffer(name, array.ctypes.data, array.nbytes, writable)


def fault_line(name: str, marker: str) -> str:
    """The ``file:line`` of the comment ``fault: <marker>``."""
    lines = (KERNELS / f"{name}.cu").read_text().splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if re.search(rf"// fault: {marker}$", text))
    return f"{KERNELS / name}.cu:{line}"


def aligned(count: int) -> Floats:
    """Zeros at a 64-byte aligned address."""
    raw = np.zeros(count + 16, np.float32)
    first = -raw.ctypes.data % 64 // 4
    return raw[first : first + count]


def launch(
    module: EmulatedModule,
    entry: str,
    *,
    threads: int,
    seed: int = 0,
    inputs: Floats | None = None,
    tiles: int | None = None,
    shared_bytes: int = 1024,
    grid: tuple[int, int, int] = (1, 1, 1),
    copies: CopyTiming = "seeded",
    max_steps: int = 10_000,
    elements: int = 64,
) -> Floats:
    """Runs a kernel with an ``in`` and an ``out`` buffer of ``elements`` floats; returns ``out``."""
    source = aligned(elements) if inputs is None else inputs
    out = aligned(elements)
    params = struct.pack("QQ", source.ctypes.data, out.ctypes.data)
    if tiles is not None:
        params += struct.pack("i4x", tiles)
    written = bytearray(out.nbytes)
    buffers = [buffer("in", source), Buffer("out", out.ctypes.data, out.nbytes, True, written)]
    module.launch(
        entry,
        grid=grid,
        threads=threads,
        shared_bytes=shared_bytes,
        params=params,
        buffers=buffers,
        seed=seed,
        copies=copies,
        max_steps=max_steps,
    )
    return out


def fault_of(
    run: Callable[[int], object], kind: str, *, also: Collection[str] = (), seeds: range = SEEDS
) -> EmulatorFault:
    """Every seed meets a fault, of ``kind`` or (depending on who comes first) of the kinds in ``also``; one of
    ``kind`` is returned. The same seed gives the same report."""
    faults = []
    for seed in seeds:
        with pytest.raises(EmulatorFault) as caught:
            run(seed)
        with pytest.raises(EmulatorFault) as again:
            run(seed)
        assert without_addresses(str(again.value)) == without_addresses(str(caught.value))
        assert again.value.thread == caught.value.thread
        faults.append(caught.value)
    assert {fault.kind for fault in faults} <= {kind, *also} <= set(FAULT_KINDS)
    return next(fault for fault in faults if fault.kind == kind)


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


# --- Faults of memory, order and collectives -------------------------------------------------------------------------

MEMORY = [
    ("global_read", 32, "out_of_bounds", ["nearest buffer 'in' (256 bytes)", "byte offset 256"]),
    ("global_write", 32, "out_of_bounds", ["nearest buffer 'out' (256 bytes)", "byte offset -4"]),
    ("global_align", 32, "misaligned", ["16-byte alignment", "thread 3 "]),
    ("read_only", 32, "read_only_write", ["buffer 'in'"]),
    ("unwritten_global", 32, "unwritten_global_read", ["byte offset 28 of buffer 'out'", "thread 7 "]),
    ("shared_index", 32, "out_of_bounds", ["element 32 ", "array of 32 elements"]),
    ("shared_size", 32, "out_of_bounds", ["bytes 256 to 384", "gives 256"]),
    ("unwritten_shared", 32, "unwritten_shared_read", ["byte 36 was never written", "thread 9 "]),
    ("ldmatrix_range", 32, "out_of_bounds", ["ldmatrix row of 16 bytes at shared byte offset 512", "lane 31"]),
    ("register_index", 32, "out_of_bounds", ["index 4 of an array of the thread's own"]),
    ("ldmatrix_align", 32, "misaligned", ["ldmatrix row", "16-byte alignment", "lane 5"]),
]
GRIDS = {"global_read": (2, 1, 1), "global_write": (2, 1, 1)}
SHARED_BYTES = {"shared_size": 256}


@pytest.mark.parametrize(("name", "threads", "kind", "told"), MEMORY, ids=[row[0] for row in MEMORY])
def test_memory_fault(load: Load, name: str, threads: int, kind: str, told: list[str]) -> None:
    def run(entry: str, seed: int) -> Floats:
        grid, shared_bytes = GRIDS.get(name, (1, 1, 1)), SHARED_BYTES.get(name, 1024)
        return launch(load("memory"), entry, threads=threads, seed=seed, grid=grid, shared_bytes=shared_bytes)

    for seed in SEEDS:
        run(f"{name}_right", seed)
    fault = fault_of(lambda seed: run(f"{name}_wrong", seed), kind)
    assert fault.source_line == fault_line("memory", name)
    assert all(text in str(fault) for text in told), str(fault)


def test_fault_says_where(load: Load) -> None:
    with pytest.raises(EmulatorFault) as caught:
        launch(load("memory"), "global_read_wrong", threads=32, grid=(2, 1, 1))
    assert caught.value.block == (1, 0, 0)
    assert caught.value.thread == 31
    assert str(caught.value).startswith(
        f"{fault_line('memory', 'global_read')}: global memory access outside every buffer"
    )


def test_endless_loop_ends_at_the_step_limit(load: Load) -> None:
    def run(seed: int) -> Floats:
        return launch(load("memory"), "endless_wrong", threads=32, seed=seed)

    assert fault_of(run, "step_limit", seeds=range(2)).source_line == fault_line("memory", "endless")


# name, threads, kind, other kinds that some orders give, told
ORDER = [
    ("block_barrier", 64, "race", [], ["reads it at", "is written"]),
    ("write_after_read", 64, "race", [], ["writes it at", "is read"]),
    ("warp_order", 32, "race", [], ["(warp 0, lane"]),
    ("named_pair", 128, "race", ["unwritten_shared_read"], ["nothing orders the two"]),
    ("two_blocks", 32, "race", [], ["byte offset 124 of buffer 'out' is written, and block ("]),
    ("through_global", 64, "race", ["unwritten_global_read"], ["race on global memory", "of buffer 'out'"]),
    ("half_words", 64, "race", [], ["nothing orders the two"]),
    ("elected_wait", 64, "race", [], ["thread 32 (warp 1, lane 0)"]),
    ("unpublished_init", 64, "race", ["mbarrier_misuse"], ["initialised by thread 0 at"]),
    ("init_fence", 32, "missing_fence", [], ["initialised by thread 0 at"]),
    ("mbarrier_bytes", 32, "mbarrier_misuse", [], ["shared byte offset 0 is written"]),
]


@pytest.mark.parametrize(("name", "threads", "kind", "also", "told"), ORDER, ids=[row[0] for row in ORDER])
def test_order_fault(load: Load, name: str, threads: int, kind: str, also: list[str], told: list[str]) -> None:
    module, grid = load("order"), (2 if name == "two_blocks" else 1, 1, 1)
    for seed in SEEDS:
        launch(module, f"{name}_right", threads=threads, seed=seed, grid=grid, elements=128)

    def run(seed: int) -> Floats:
        return launch(module, f"{name}_wrong", threads=threads, seed=seed, grid=grid, elements=128)

    fault = fault_of(run, kind, also=also)
    assert all(text in str(fault) for text in told), str(fault)
    if name in (
        "two_blocks",
        "warp_order",
        "half_words",
        "elected_wait",
        "init_fence",
        "mbarrier_bytes",
        "unpublished_init",
    ):
        assert fault.source_line == fault_line("order", name)
    if kind == "race" and name != "unpublished_init":
        assert len(set(re.findall(r"order\.cu:\d+", str(fault)))) == (
            1 if name in ("half_words", "two_blocks") else 2
        ), str(fault)


COLLECTIVES = [
    (
        "subset_vote",
        32,
        "divergent_collective",
        [],
        ["in warp_any", "exited"],
    ),
    ("two_places", 32, "divergent_collective", [], ["is in shuffle_xor", "in shuffle_xor, waiting for the rest"]),
    ("divergent_barrier", 64, "divergent_collective", [], ["in block_sync, waiting for the rest of the warp"]),
    (
        "barrier_count",
        96,
        "deadlock",
        [],
        ["threads 0-63: in named_barrier_sync (barrier 3): 64 of 96 threads arrived, at ", "threads 64-95: exited"],
    ),
    ("two_counts", 64, "barrier_misuse", ["deadlock"], ["barrier 2: 32 threads here, 64 by those who wait"]),
    (
        "too_few_arrivals",
        64,
        "deadlock",
        [],
        ["threads 0-31: in mbarrier_wait (shared address 1024, parity 0): phase 0 has 64 of 65 arrivals and 0 bytes"],
    ),
    ("too_many_arrivals", 32, "mbarrier_misuse", [], ["phase 0 has all 1 arrivals and 16 bytes to come"]),
    ("uninitialised", 32, "mbarrier_misuse", [], ["mbarrier_arrive at shared address 1032"]),
]


@pytest.mark.parametrize(("name", "threads", "kind", "also", "told"), COLLECTIVES, ids=[row[0] for row in COLLECTIVES])
def test_collective_fault(load: Load, name: str, threads: int, kind: str, also: list[str], told: list[str]) -> None:
    module = load("collectives")
    for seed in SEEDS:
        launch(module, f"{name}_right", threads=threads, seed=seed, elements=128)

    def run(seed: int) -> Floats:
        return launch(module, f"{name}_wrong", threads=threads, seed=seed, elements=128)

    fault = fault_of(run, kind, also=also)
    assert all(text in str(fault) for text in told), str(fault)
    assert (fault.thread is None) == (kind == "deadlock")
    if name not in ("two_places", "two_counts"):
        assert fault.source_line == fault_line("collectives", name)


# entry, kind, other kinds that some orders give, where, told
HANDOFF = [
    ("early", "race", [], "writes", ["is written, and thread ", "reads it at"]),
    # In some orders the second arrival finds the next phase, and lets the writer go on too early.
    ("twice", "barrier_misuse", ["race"], None, ["a warp arrives twice at a named barrier in one phase"]),
    (
        "nobody",
        "deadlock",
        [],
        None,
        [
            "threads 0-31: in named_barrier_sync (barrier 2): 32 of 64 threads arrived",
            "threads 32-63: in named_barrier_sync (barrier 1): 32 of 64 threads arrived",
            "threads 64-95: exited",
        ],
    ),
    ("count", "barrier_misuse", [], None, ["a named barrier was given two counts", "barrier 1: "]),
    ("outside", "barrier_misuse", [], "arrives", ["an impossible id or count", "barrier 1 with 128 of 96 threads"]),
    ("zero", "barrier_misuse", [], "arrives", ["an impossible id or count", "barrier -1 with 64 of 96 threads"]),
    ("some_lanes", "divergent_collective", [], None, ["named_barrier_arrive"]),
]


@pytest.mark.parametrize(("bug", "kind", "also", "where", "told"), HANDOFF, ids=[row[0] for row in HANDOFF])
def test_arrival_fault(load: Load, bug: str, kind: str, also: list[str], where: str | None, told: list[str]) -> None:
    def run(seed: int) -> Floats:
        return launch(load("arrivals"), f"handoff_{bug}", threads=96, seed=seed, tiles=0)

    fault = fault_of(run, kind, also=also)
    assert all(text in str(fault) for text in told), str(fault)
    if where is not None:
        assert fault.source_line == fault_line("arrivals", where), str(fault)


@pytest.mark.parametrize("again", ["arrives", "waits"])
def test_a_warp_that_arrives_twice_in_one_phase_is_told_so(load: Load, again: str) -> None:
    for seed in SEEDS:
        launch(load("arrivals"), "phases_right", threads=64, seed=seed, tiles=0)
    fault = fault_of(
        lambda seed: launch(load("arrivals"), f"phases_{again}", threads=64, seed=seed, tiles=0), "barrier_misuse"
    )
    assert "a warp arrives twice at a named barrier in one phase" in str(fault)
    assert "barrier 1: 32 of 64 threads are there, warp 0's too" in str(fault)
    assert fault.source_line == fault_line("arrivals", f"{again} again")


def test_who_only_arrives_hands_over_what_it_wrote_and_read(load: Load) -> None:
    values = aligned(64)
    values[:] = np.arange(64) ** 2
    for seed in SEEDS:
        out = launch(load("arrivals"), "handoff_right", threads=96, seed=seed, inputs=values, tiles=0)
        np.testing.assert_array_equal(out[:32], 3 * values[:32][::-1] + 3)


def votes() -> Floats:
    """By round and thread: one vote among 96, none but the other 32's, and the last of the 96."""
    votes = aligned(3 * 128)
    votes[70] = 1
    votes[128 + 96 : 256] = 1
    votes[256 + 95] = 1
    return votes


def test_a_vote_is_of_all_that_meet_and_of_this_round(load: Load) -> None:
    expected = np.zeros((3, 128), np.float32)
    expected[0, :96] = expected[1, 96:] = expected[2, :96] = 1
    for seed in SEEDS:
        out = launch(load("arrivals"), "vote_right", threads=128, seed=seed, inputs=votes(), tiles=0, elements=3 * 128)
        np.testing.assert_array_equal(out.reshape(3, 128), expected)


VOTES = [
    ("early", "race", ["unwritten_shared_read"], "reads_votes", ["nothing orders the two"]),
    ("count", "deadlock", [], None, ["in named_barrier_any (barrier 1): 96 of 128 threads arrived"]),
    ("some_lanes", "divergent_collective", [], None, ["named_barrier_any"]),
]


@pytest.mark.parametrize(("bug", "kind", "also", "where", "told"), VOTES, ids=[row[0] for row in VOTES])
def test_vote_fault(load: Load, bug: str, kind: str, also: list[str], where: str | None, told: list[str]) -> None:
    def run(seed: int) -> Floats:
        return launch(
            load("arrivals"), f"vote_{bug}", threads=128, seed=seed, inputs=votes(), tiles=0, elements=3 * 128
        )

    fault = fault_of(run, kind, also=also)
    assert all(text in str(fault) for text in told), str(fault)
    if where is not None:
        assert str(fault).count(fault_line("arrivals", where)) == 1, str(fault)


@pytest.mark.parametrize("name", ["sum", "ballot"])
def test_a_reduction_needs_all_lanes(load: Load, name: str) -> None:
    fault = fault_of(
        lambda seed: launch(load("arrivals"), f"{name}_some_lanes", threads=32, seed=seed, tiles=0),
        "divergent_collective",
    )
    assert fault.source_line == fault_line("arrivals", name)
    assert f"in warp_{name}" in str(fault)


# --- Asynchronous copies ---------------------------------------------------------------------------------------------

TILES = 23


def run_ring(load: Load, entry: str, seed: int, copies: CopyTiming = "seeded") -> tuple[Floats, Floats]:
    tiles = aligned(TILES * 64)
    tiles[:] = np.arange(TILES * 64, dtype=np.float32) % 97
    return tiles, launch(load("copies"), entry, threads=96, seed=seed, inputs=tiles, tiles=TILES, copies=copies)


def test_ring_of_two_stages_streams_every_tile(load: Load) -> None:
    for copies in ("late", "random"):
        for seed in SEEDS:
            tiles, out = run_ring(load, "ring_right", seed, copies)
            np.testing.assert_array_equal(out, tiles.reshape(TILES, 64).sum(axis=0))


RING = [
    ("ring_no_wait", "missing_wait", ["race"], "kNoWait", "nothing waited for the copy issued at"),
    ("ring_no_expect", "missing_wait", [], "kNoWait", "nothing waited for the copy issued at"),
    ("ring_no_release", "race", ["missing_wait"], "kNoRelease", "is the destination of bulk_copy, and thread "),
    ("ring_wrong_parity", "missing_wait", ["race", "deadlock"], "kNoWait", "nothing waited for the copy issued at"),
    ("ring_short_expect", "deadlock", [], "deadlock", "phase 0 has 1 of 1 arrivals and 16 bytes too many"),
]


@pytest.mark.parametrize("copies", ["late", "random"])
@pytest.mark.parametrize(("entry", "kind", "also", "marker", "told"), RING, ids=[row[0] for row in RING])
def test_ring_fault(
    load: Load, entry: str, kind: str, also: list[str], marker: str, told: str, copies: CopyTiming
) -> None:
    fault = fault_of(lambda seed: run_ring(load, entry, seed, copies), kind, also=also)
    assert fault.source_line == fault_line("copies", marker)
    assert told in str(fault)


WARP_TILES = 5


def run_warp_copies(load: Load, entry: str, seed: int, copies: CopyTiming) -> tuple[Floats, Floats]:
    tiles = aligned(WARP_TILES * 64 + 4)
    tiles[:] = np.arange(tiles.size, dtype=np.float32)
    module = load("arrivals")
    return tiles, launch(module, entry, threads=64, seed=seed, inputs=tiles, tiles=WARP_TILES, copies=copies)


@pytest.mark.parametrize("copies", ["late", "random"])
def test_a_warp_copies_as_one(load: Load, copies: CopyTiming) -> None:
    for seed in SEEDS:
        tiles, out = run_warp_copies(load, "warp_copies_right", seed, copies)
        np.testing.assert_array_equal(out[:32], tiles[: WARP_TILES * 64].reshape(-1, 32).sum(axis=0))


WARP_COPIES = [
    ("disagree", "divergent_collective", [], "copies", ["the lanes of warp_bulk_copy do not agree", "lanes 0 and 7 "]),
    ("some_lanes", "divergent_collective", [], None, ["warp_bulk_copy"]),
    ("no_wait", "missing_wait", ["race"], "adds", ["nothing waited for the copy issued at"]),
    ("no_meeting", "race", ["missing_wait"], "copies", ["is the destination of bulk_copy, and thread ", "reads it at"]),
    ("no_arrival", "deadlock", [], None, ["in named_barrier_sync (barrier 1): 32 of 64 threads arrived"]),
    ("past_array", "out_of_bounds", [], "copies", ["bulk_copy destination of 256 bytes at shared byte offset 144"]),
]


@pytest.mark.parametrize("copies", ["late", "random"])
@pytest.mark.parametrize(("bug", "kind", "also", "where", "told"), WARP_COPIES, ids=[row[0] for row in WARP_COPIES])
def test_warp_copy_fault(
    load: Load, bug: str, kind: str, also: list[str], where: str | None, told: list[str], copies: CopyTiming
) -> None:
    fault = fault_of(lambda seed: run_warp_copies(load, f"warp_copies_{bug}", seed, copies), kind, also=also)
    assert all(text in str(fault) for text in told), str(fault)
    if where is not None:
        assert fault.source_line == fault_line("arrivals", where), str(fault)


def gather_inputs() -> Floats:
    rows = aligned(256)
    rows[:] = np.arange(256, dtype=np.float32)
    return rows


def test_cp_async_gather(load: Load) -> None:
    for seed in SEEDS:
        rows = gather_inputs()
        out = launch(load("copies"), "gather_right", threads=64, seed=seed, inputs=rows, tiles=0, shared_bytes=2048)
        np.testing.assert_array_equal(out, rows.reshape(64, 4).sum(axis=1)[::-1])


@pytest.mark.parametrize(
    ("entry", "kind", "marker"),
    [
        ("gather_no_wait", "race", "gather_issue"),
        ("gather_plain_arrive", "missing_wait", "gather"),
        ("gather_no_arrive", "missing_wait", "gather_issue"),
    ],
)
def test_cp_async_without_a_wait(load: Load, entry: str, kind: str, marker: str) -> None:
    def run(seed: int) -> Floats:
        return launch(
            load("copies"), entry, threads=64, seed=seed, inputs=gather_inputs(), tiles=0, shared_bytes=2048
        )  # fmt: skip

    assert fault_of(run, kind).source_line == fault_line("copies", marker)


def test_cp_async_arrive_does_not_publish_ordinary_stores(load: Load) -> None:
    def run(entry: str, seed: int) -> Floats:
        return launch(load("copies"), entry, threads=32, seed=seed, inputs=gather_inputs(), tiles=0)

    for seed in SEEDS:
        out = run("zero_fill_right", seed)
        np.testing.assert_array_equal(out[12:32], np.arange(0, 80, 4, dtype=np.float32)[::-1])
        assert not out[:12].any()
    fault = fault_of(lambda seed: run("zero_fill_wrong", seed), "race")
    assert fault.source_line == fault_line("copies", "zero_fill")


ONE_COPY = [
    ("copy_misaligned_source", "misaligned", "bulk_copy source"),
    ("copy_misaligned_target", "misaligned", "bulk_copy destination"),
    ("copy_misaligned_size", "misaligned", "120 bytes"),
    ("copy_past_array", "out_of_bounds", "bulk_copy destination of 256 bytes at shared byte offset 144"),
    ("copy_past_buffer", "out_of_bounds", "byte offset 1984 of the nearest buffer 'in' (2048 bytes)"),
    ("copy_abandoned", "missing_wait", "tracked by the mbarrier at shared address 1024"),
]


@pytest.mark.parametrize(("entry", "kind", "told"), ONE_COPY, ids=[row[0] for row in ONE_COPY])
def test_copy_fault(load: Load, entry: str, kind: str, told: str) -> None:
    def run(name: str, seed: int) -> Floats:
        return launch(load("copies"), name, threads=32, seed=seed, inputs=aligned(512), tiles=0, copies="late")

    for seed in SEEDS:
        run("one_copy_right", seed)
    fault = fault_of(lambda seed: run(entry, seed), kind)
    assert fault.source_line == fault_line("copies", "one_copy")
    assert told in str(fault)


# --- Numerics --------------------------------------------------------------------------------------------------------


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest even; NaN is 0x7fff."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded).astype(np.uint16)


def bf16_value(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("depth", [16, 64])
@pytest.mark.parametrize("entry", ["product_rows", "product_transposed"])
def test_mma_of_ldmatrix_fragments(load: Load, entry: str, depth: int) -> None:
    random = np.random.default_rng(depth)
    a = bf16_bits(random.standard_normal((16, depth), np.float32))
    b = bf16_bits(random.standard_normal((8, depth), np.float32))
    stored_b = b if entry == "product_rows" else np.ascontiguousarray(b.T)
    d = np.zeros((16, 8), np.float32)
    params = struct.pack("QQQi4x", a.ctypes.data, stored_b.ctypes.data, d.ctypes.data, depth)
    buffers = [buffer("a", a), buffer("b", stored_b), buffer("d", d, writable=True)]
    for seed in SEEDS:
        load("numerics").launch(
            entry, grid=(1, 1, 1), threads=32, shared_bytes=1024, params=params, buffers=buffers, seed=seed
        )
        expected = bf16_value(a).astype(np.float64) @ bf16_value(b).astype(np.float64).T
        np.testing.assert_allclose(d, expected, rtol=0, atol=1e-5 * depth)


def test_mma_of_f16_fragments(load: Load) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((rows, 32), np.float32).astype(np.float16) for rows in (16, 8))
    a[0, :3], b[0, :3] = [2**-24, 2**-15, 65504], [1, 2**-24, 0.5]  # subnormal numbers, and the largest
    d = np.zeros((16, 8), np.float32)
    params = struct.pack("QQQi4x", a.ctypes.data, b.ctypes.data, d.ctypes.data, 32)
    buffers = [buffer("a", a), buffer("b", b), buffer("d", d, writable=True)]
    load("numerics").launch(
        "product_of_f16", grid=(1, 1, 1), threads=32, shared_bytes=1024, params=params, buffers=buffers
    )
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=2e-6, atol=1e-5)


def test_f16_rounding_of_edge_cases(load: Load) -> None:
    least = 2**-24  # subnormal
    edges = [
        65519.996,
        65520,
        -65520,
        np.inf,
        np.nan,
        least,
        least / 2,
        least * 0.501,
        least * 1.5,
        6.1e-5,
        2**-14,
        -0.0,
    ]
    random = np.random.default_rng(0)
    drawn = random.standard_normal(2**12 - len(edges)) * 2.0 ** random.integers(-30, 18, 2**12 - len(edges))
    values = np.concatenate([edges, drawn]).astype(np.float32)
    out = np.zeros(values.size // 2, np.uint32)
    params = struct.pack("QQ", values.ctypes.data, out.ctypes.data)
    buffers = [buffer("in", values), buffer("out", out, writable=True)]
    grid = (out.size // 32, 1, 1)
    load("numerics").launch("f16_pairs", grid=grid, threads=32, shared_bytes=0, params=params, buffers=buffers)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    expected[4] = 0x7FFF  # NaN, as the hardware gives it
    np.testing.assert_array_equal(out.view(np.uint16), expected)


def test_every_e4m3_value(load: Load) -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    for first in (0, 128):
        four = bits[first : first + 128].view(np.uint32)
        pairs, floats, swapped = np.zeros(64, np.uint32), np.zeros(128, np.float32), np.zeros(32, np.uint32)
        params = struct.pack("QQQQ", *(array.ctypes.data for array in (four, pairs, floats, swapped)))
        buffers = [buffer("in", four)]
        buffers += [
            buffer(name, array, writable=True)
            for name, array in (("pairs", pairs), ("floats", floats), ("swapped", swapped))
        ]
        load("numerics").launch(
            "e4m3_values", grid=(1, 1, 1), threads=32, shared_bytes=0, params=params, buffers=buffers
        )
        np.testing.assert_array_equal(floats, expected[first : first + 128])
        np.testing.assert_array_equal(pairs.view(np.float16), expected[first : first + 128])
        in_order = four.view(np.uint8).reshape(-1, 4)
        np.testing.assert_array_equal(swapped.view(np.uint8).reshape(-1, 4), in_order[:, [0, 2, 1, 3]])


def test_bf16_rounding_of_edge_cases(load: Load) -> None:
    edges = np.array(
        [
            0x3F808000,  # tie, down to even
            0x3F818000,  # tie, up to even
            0x3F808001,  # just above a tie
            0x3F807FFF,  # just below a tie
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            0x7F800001,  # a NaN whose payload lies in the lost half
            0xFFFFFFFF,
            0x7F7FFFFF,  # the largest float: rounds to infinity
            0x7F7F7FFF,
            0x00000001,
            0x00008000,  # subnormal ties
            0x00018000,
            0x007FFFFF,
            0x80000000,
        ],
        np.uint32,
    ).view(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 2**14 - edges.size, np.uint32).view(np.float32)
    values = np.concatenate([edges, random])
    out = np.zeros(values.size // 2, np.uint32)
    params = struct.pack("QQ", values.ctypes.data, out.ctypes.data)
    load("numerics").launch(
        "bf16_pairs",
        grid=(out.size // 32, 1, 1),
        threads=32,
        shared_bytes=0,
        params=params,
        buffers=[buffer("in", values), buffer("out", out, writable=True)],
    )
    np.testing.assert_array_equal(out.view(np.uint16), bf16_bits(values))
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x7FFF, 0x7FFF, 0x7FFF, 0x7F80, 0x7F7F, 0, 0, 2, 0x80]
    assert out.view(np.uint16)[:16].tolist() == [*expected, 0x8000]


def test_shuffles_and_votes(load: Load) -> None:
    values = np.arange(64, dtype=np.float32)
    out = np.zeros((8, 64), np.float32)
    params = struct.pack("QQ", values.ctypes.data, out.ctypes.data)
    buffers = [buffer("in", values), buffer("out", out, writable=True)]
    load("numerics").launch("shuffles", grid=(1, 1, 1), threads=64, shared_bytes=0, params=params, buffers=buffers)
    threads = np.arange(64)
    for step in range(5):
        np.testing.assert_array_equal(out[step], threads ^ (1 << step))
    np.testing.assert_array_equal(out[5], threads >= 32)
    np.testing.assert_array_equal(out[6], threads // 32 * 32 + threads * 7 % 32)
    np.testing.assert_array_equal(out[7], threads // 32 * 32 + 5)


def test_what_a_warp_reduces_and_rearranges(load: Load) -> None:
    values = np.random.default_rng(0).integers(-1000, 1000, 64, np.int32)
    values[:3] *= 2  # the lowest odd lane is not the first
    out = np.zeros((13, 64), np.int32)
    params = struct.pack("QQ", values.ctypes.data, out.ctypes.data)
    buffers = [buffer("in", values), buffer("out", out, writable=True)]
    threads = np.arange(64)
    warps, odd = values.reshape(2, 32), values.reshape(2, 32) % 2 != 0
    ballots = [sum(1 << lane for lane in np.flatnonzero(lanes).tolist()) for lanes in odd]
    expected = {
        0: np.repeat(warps.sum(axis=1), 32),
        1: np.repeat(np.array(ballots, np.uint32).view(np.int32), 32),
        2: np.repeat([np.flatnonzero(lanes)[0] for lanes in odd], 32),
        3: np.full(64, -1),
        4: values[threads // 32 * 32 + threads * 7 % 32],
        5: values[threads ^ 5],
        6: (values.view(np.uint32) | np.uint32(1 << 31))[threads ^ 9].view(np.int32),
        7: warps.cumsum(axis=1).reshape(-1),
        8: np.repeat(values.reshape(-1, 8).sum(axis=1), 8),
        **{9 + row: 4 * row + threads % 4 for row in range(4)},
    }
    for seed in SEEDS:
        load("numerics").launch(
            "warp_values", grid=(1, 1, 1), threads=64, shared_bytes=0, params=params, buffers=buffers, seed=seed
        )
        for row, numbers in expected.items():
            np.testing.assert_array_equal(out[row], numbers, err_msg=str(row))


def test_the_halves_of_a_bf16_pair(load: Load) -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, 64, np.uint16)
    bits[:4] = 0x7F80, 0xFF80, 0x0001, 0x8000
    out = np.zeros(64, np.float32)
    params = struct.pack("QQ", bits.ctypes.data, out.ctypes.data)
    buffers = [buffer("in", bits), buffer("out", out, writable=True)]
    load("numerics").launch("bf16_halves", grid=(1, 1, 1), threads=32, shared_bytes=0, params=params, buffers=buffers)
    np.testing.assert_array_equal(out.view(np.uint32), bf16_value(bits).view(np.uint32))


def test_exponents_flush_subnormals(load: Load) -> None:
    values = np.linspace(-130, 128, 32, dtype=np.float32)
    values[:4] = -np.inf, np.inf, np.nan, 1e-40
    out = np.zeros((2, 32), np.float32)
    params = struct.pack("QQ", values.ctypes.data, out.ctypes.data)
    buffers = [buffer("in", values), buffer("out", out, writable=True)]
    load("numerics").launch("exponents", grid=(1, 1, 1), threads=32, shared_bytes=0, params=params, buffers=buffers)
    with np.errstate(all="ignore"):
        flushed = np.where(np.abs(values) < 2.0**-126, np.float32(0), values)
        power = np.exp2(values)
        power[power < 2.0**-126] = 0
        np.testing.assert_allclose(out[0], power, rtol=1e-6)
        np.testing.assert_allclose(out[1], np.log2(flushed), rtol=1e-6)


def test_every_block_and_thread_runs_once(load: Load) -> None:
    out = np.full(3 * 2 * 5 * 32, -1, np.int32)
    params = struct.pack("Qii", out.ctypes.data, 5, 2)
    load("numerics").launch(
        "indices",
        grid=(5, 2, 3),
        threads=32,
        shared_bytes=0,
        params=params,
        buffers=[buffer("out", out, writable=True)],
        seed=3,
    )
    np.testing.assert_array_equal(out.reshape(30, 32), np.arange(30)[:, None] * 1000 + np.arange(32))


# --- Launching -------------------------------------------------------------------------------------------------------


def test_written_map_carries_over_to_the_next_launch(load: Load) -> None:
    out = aligned(64)
    written = bytearray(out.nbytes)
    params = struct.pack("QQ", 0, out.ctypes.data)
    target = Buffer("out", out.ctypes.data, out.nbytes, True, written)

    def run(entry: str) -> None:
        load("memory").launch(entry, grid=(1, 1, 1), threads=32, shared_bytes=0, params=params, buffers=[target])

    with pytest.raises(EmulatorFault):
        run("unwritten_global_wrong")
    run("global_write_right")
    run("unwritten_global_wrong")
    assert written == bytearray([1] * 128 + [0] * 128)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"threads": 48}, "multiple of 32"),
        ({"threads": 64}, "more threads than the kernel was compiled for"),
        ({"params": b"\0" * 8}, "8 parameter bytes where the kernel has 16"),
        ({"grid": (1, 0, 1)}, "the grid is empty"),
    ],
)
def test_impossible_launch(load: Load, changes: dict[str, object], told: str) -> None:
    arguments = {"grid": (1, 1, 1), "threads": 32, "shared_bytes": 0, "params": b"\0" * 16, "buffers": []}
    with pytest.raises(EmulatorFault) as caught:
        load("memory").launch("read_only_right", **{**arguments, **changes})  # type: ignore[arg-type]
    assert caught.value.kind == "launch_error"
    assert told in str(caught.value)


def test_unknown_entry_and_unloadable_file(load: Load, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no kernel named 'nothing'"):
        load("memory").launch("nothing", grid=(1, 1, 1), threads=32, shared_bytes=0, params=b"", buffers=[])
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an object")
    with pytest.raises(EmulatorError, match="cannot be loaded"):
        EmulatedModule(broken)


def test_two_launches_at_once_do_not_mix(load: Load) -> None:
    """Some Python threads meet faults while others get right results, in the same module and in another."""

    def right(seed: int) -> bool:
        tiles, out = run_ring(load, "ring_right", seed)
        return np.array_equal(out, tiles.reshape(TILES, 64).sum(axis=0))

    def wrong(seed: int) -> bool:
        kinds = []
        for run in (
            lambda: run_ring(load, "ring_no_expect", seed),
            lambda: launch(load("order"), "block_barrier_wrong", threads=64, seed=seed),
        ):
            with pytest.raises(EmulatorFault) as caught:
                run()
            kinds.append(caught.value.kind)
        return kinds == ["missing_wait", "race"]

    load("copies"), load("order")
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(work, seed) for seed in range(30) for work in (right, wrong)]
        assert all(result.result() for result in results)


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def test_faults_leak_nothing(load: Load) -> None:
    """Mapped memory stays the same over many launches that end in a fault."""

    def run() -> None:
        with pytest.raises(EmulatorFault):
            launch(load("order"), "block_barrier_wrong", threads=64)

    run()
    before = mapped_bytes()
    for _ in range(200):
        run()
    assert mapped_bytes() - before < 32 * 2**20  # the stacks of one launch are 16 MiB


def test_nine_thousand_mma_are_fast(load: Load) -> None:
    """Eight warps, 1200 mma and ldmatrix each, every check on, within 5 s of one core."""
    values, out = aligned(16), aligned(256)
    params = struct.pack("QQi4x", values.ctypes.data, out.ctypes.data, 1200)
    buffers = [buffer("in", values), buffer("out", out, writable=True)]
    module, start = load("numerics"), time.thread_time()
    module.launch("stream", grid=(1, 1, 1), threads=256, shared_bytes=8192, params=params, buffers=buffers)
    np.testing.assert_array_equal(out, np.full(256, 1200 * 16, np.float32))
    assert time.thread_time() - start < 5
