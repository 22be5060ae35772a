"""slot_remap: slot numbers to what a move made of them, in place: request-to-token maps and flat lists of slots.

``slot_map[s]`` is where slot ``s`` went (itself, if it stayed). The first ``lengths[r]`` elements of row ``r`` of
``req_to_token``, and all of ``slot_list`` (radix values, prefix indices, a free list), are replaced by it; numbers that
are no slot of the map stay as they are, so padding with -1 is kept. Either of the two may be left out.

How many slots move decides which kernel is fastest, and no tensor's shape says it: the workload axis ``moved_percent``
comes from a call's hint, or is what the call was prepared for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kgen.binding import Binding
from kgen.families.slot_remap_binding import VECTOR_BYTES, WIDE_ARRAYS, SlotRemapBinding, call_scalars
from kgen.family import (
    Array,
    Candidate,
    Case,
    Constraint,
    Family,
    Kernel,
    Launch,
    LaunchDemand,
    Layout,
    Parameter,
    ParameterStruct,
    Plan,
    Point,
    Value,
    Work,
)
from kgen.targets import Target

REGISTER_SLACK = 24
LOOP_REGISTERS = 12  # besides, where blocks loop: the next part's place
MARK_THREADS = 256
MARK_BLOCKS_PER_SM = 4
FILTER_BYTES = 1 << 16  # a bit for each of half a million slots, or for two of a million
FILTER_THREADS = 512  # of a block with a filter, at least
POINT_SLOTS = 1 << 20  # of the map that workload points are timed with
SECTOR_BYTES = 32  # that a look-up in random order takes of the L2 cache
TEST_BYTES = 14  # of shared memory's bandwidth that a bit takes: 32 lanes at random meet in a bank 3.5 times
ELEMENT_FLOP = 64.0  # what comparing one element with the reference costs the host, in the terms of `sample_rows`
PADDING = -1


def integer(values: Mapping[str, Value], name: str) -> int:
    """A tunable that is a whole number."""
    return int(values[name])


def _is_oracle(candidate: Candidate) -> bool:
    return candidate["algorithm"] == "oracle"


def _threads(candidate: Candidate) -> int:
    return 32 if _is_oracle(candidate) else integer(candidate, "warps") * 32


def _filter_bytes(candidate: Candidate) -> int:
    return FILTER_BYTES if candidate["algorithm"] == "filter" else 0


def _shared_bytes(candidate: Candidate) -> int:
    """Of the rewriting kernel: the filter, and the mbarrier that says that it is there."""
    filter_bytes = _filter_bytes(candidate)
    return filter_bytes + 8 if filter_bytes else 0


def _fills_multiprocessor(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """One filter takes most of the shared memory, so few warps are resident beside it but the block's own."""
    return not _filter_bytes(candidate) or _threads(candidate) >= FILTER_THREADS


def _registers_fit(candidate: Candidate, layout: Layout, target: Target) -> bool:
    if _is_oracle(candidate):
        return True
    held = 3 if _filter_bytes(candidate) else 2  # of each vector: before, after, and of the next part
    needed = held * 4 * integer(candidate, "vectors") + REGISTER_SLACK + (LOOP_REGISTERS if held == 3 else 0)
    return needed <= min(target.registers_per_thread, target.registers_per_sm // _threads(candidate))


class SlotRemap(Family):
    """The family; shapes and dtypes of its parameters are beside them."""

    name: ClassVar[str] = "slot_remap"
    template: ClassVar[str] = "slot_remap.cu.j2"
    params: ClassVar[ParameterStruct] = ParameterStruct(
        (
            Parameter("slot_map", "pointer"),  # int32 [slots]
            Parameter("lengths", "pointer"),  # int32 or int64 [requests]
            Parameter("req_to_token", "pointer"),  # int32 [requests, row_stride], or null
            Parameter("slot_list", "pointer"),  # int32 or int64 [entries], or null
            Parameter("moving", "pointer"),  # uint32 [filter bytes / 4]: a bit for every 2^n slots, whether any moves
            Parameter("row_stride", "int64"),  # elements from one row of req_to_token to the next
            Parameter("requests", "int32"),
            Parameter("context", "int32"),  # elements of a row of req_to_token: no length counts for more
            Parameter("slots", "int32"),
            Parameter("entries", "int32"),
            Parameter("wide", "int32"),  # bit set of the arrays that are int64, in the order of WIDE_ARRAYS
            Parameter("whole_vectors", "int32"),  # bit 0: rows of req_to_token are aligned to 16 bytes; 1: slot_list
            Parameter("row_parts", "int32"),  # of a row, each as much as a block rewrites at once
            Parameter("list_row", "int32"),  # first row of parts that has the list
            Parameter("parts", "int32"),
            Parameter("blocks", "int32"),  # that loop over the parts; 0: there is a block for each
            Parameter("mark_blocks", "int32"),  # that share the map
        )
    )
    layout_constants: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[str, ...]] = ("slot_map", "lengths")
    inouts: ClassVar[tuple[str, ...]] = ("req_to_token", "slot_list")
    streamed: ClassVar[tuple[str, ...]] = ("req_to_token", "slot_list")
    outputs: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[tuple[str, ...]] = ("requests", "context", "entries", "moved_percent")
    known_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"algorithm": ("vector", "filter", "oracle")}
    constraints: ClassVar[tuple[Constraint, ...]] = (
        Constraint("registers fit", _registers_fit),
        Constraint("a block with a filter has 16 warps or more", _fills_multiprocessor),
    )
    plan_version: ClassVar[int] = 4

    def layout_problem(self, layout: Layout) -> tuple[str, str, str] | None:
        if layout.get("map") != "int32":
            return "map", "must be int32, the only one there is a kernel for", str(layout.get("map", "missing"))
        return None

    def label(self, candidate: Candidate) -> str:
        if _is_oracle(candidate):
            return "oracle"
        return "{algorithm}_w{warps}_i{vectors}".format_map(candidate)

    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        if _is_oracle(candidate):
            return {"algorithm": "oracle"}
        return dict(candidate) | {
            "filter_bytes": _filter_bytes(candidate),
            "shared_bytes": _shared_bytes(candidate),
            "mark_threads": MARK_THREADS,
        }

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        if _is_oracle(candidate):
            return (Kernel("slot_remap_oracle", _threads(candidate), 0),)
        rewrite = Kernel("slot_remap_rewrite", _threads(candidate), _shared_bytes(candidate))
        mark = Kernel("slot_remap_mark", MARK_THREADS, 0)
        return (rewrite, mark) if _filter_bytes(candidate) else (rewrite,)

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        kernel, *marking = self.kernels(candidate, layout)
        requests, row_parts, list_rows = capacity["requests"], 1, 1
        if not _is_oracle(candidate):
            vectors = _threads(candidate) * integer(candidate, "vectors")
            row_parts = -(-capacity["context"] // (vectors * 4))
            list_rows = -(-capacity["entries"] // (vectors * 2 * row_parts))  # int64: two of them a vector
        rows = requests + list_rows
        parts = row_parts * rows
        scalars = {"row_parts": row_parts, "list_row": requests, "parts": parts, "blocks": 0, "mark_blocks": 0}
        if not marking:
            return Plan((Launch(kernel.entry, (row_parts, rows, 1), kernel.threads, 0),), {}, scalars)
        (mark,) = marking
        blocks, mark_blocks = min(parts, sms * max(resident_blocks, 1)), MARK_BLOCKS_PER_SM * sms
        launches = (
            Launch(mark.entry, (mark_blocks, 1, 1), mark.threads, mark.shared_bytes),
            Launch(kernel.entry, (blocks, 1, 1), kernel.threads, kernel.shared_bytes),
        )
        workspace = {"moving": _filter_bytes(candidate)}
        return Plan(launches, workspace, scalars | {"blocks": blocks, "mark_blocks": mark_blocks})

    def binding(self, layout: Layout, capacity: Point) -> Binding:
        return SlotRemapBinding(capacity)

    def cases(self, layout: Layout) -> tuple[Case, ...]:
        def case(name: str, lengths: list[int], context: int, entries: int, **options: Any) -> Case:
            return Case(name, {"lengths": lengths, "context": context, "entries": entries, "slots": 500} | options)

        return (
            case("ragged", [0, 257, 33, 1], 260, 30),
            case("wide", [5, 64, 7], 64, 1001, wide=WIDE_ARRAYS),
            case("odd_rows", [63, 9, 65], 67, 77),
            case("no_list", [300, 200], 300, 0),
            case("no_requests", [], 4, 4099, wide=("slot_list",)),
            case("lengths_beyond_rows", [70, 3, 1 << 30], 67, 30),
            case("long", [9000, 4097], 9000, 9001),
            case("few_move", [9000, 700], 9000, 300, moved_percent=4),
            case("neighbours_share_a_bit", [2000, 65], 2000, 0, moved_percent=2, slots=(1 << 20) + 5),
        )

    def point_case(self, point: Point) -> Case:
        lengths = [point["context"]] * point["requests"]
        options = {"lengths": lengths, "context": point["context"], "entries": point["entries"], "slots": POINT_SLOTS}
        # Slots that change places, so that every replay of a graph changes as many numbers.
        options |= {"exchange": True, "moved_percent": point["moved_percent"]}
        return Case(",".join(f"{axis}={point[axis]}" for axis in self.axes), options)

    def capacity(self, case: Case) -> Point:
        options = case.options
        return {
            "requests": max(1, len(options["lengths"])),
            "context": options["context"],
            "entries": max(1, options["entries"]),
            "moved_percent": options.get("moved_percent", 100),
        }

    def make_inputs(self, layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
        options, rng = case.options, np.random.default_rng(seed)
        slots, lengths, wide = options["slots"], options["lengths"], options.get("wide", ())

        def numbers(*shape: int) -> Array:
            drawn = rng.integers(0, slots, shape, np.int32)
            return np.where(drawn % 97 == 0, np.int32(PADDING), drawn)

        def index(name: str, values: Array) -> Array:
            return values.astype(np.int64 if name in wide else np.int32)

        def listed(count: int) -> Array:
            values = index("slot_list", numbers(count))
            if "slot_list" in wide:
                values[::7] |= 1 << 32  # no slots, although their lower halves are
            return values

        make_map = _exchange if options.get("exchange") else _compaction
        return {
            "slot_map": make_map(slots, options.get("moved_percent", 100), rng),
            "lengths": index("lengths", np.array(lengths)) if lengths else None,
            "req_to_token": numbers(len(lengths), options["context"]) if lengths else None,
            "slot_list": listed(options["entries"]) if options["entries"] else None,
        }

    def output_arrays(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> dict[str, Array | None]:
        return {}

    def scalars(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> Mapping[str, int | float]:
        tokens, entries, slot_map = inputs["req_to_token"], inputs["slot_list"], inputs["slot_map"]
        assert slot_map is not None
        stride = 0 if tokens is None else tokens.shape[1]
        return call_scalars(
            row_stride=stride,
            requests=0 if tokens is None else len(tokens),
            context=stride,
            slots=slot_map.size,
            entries=0 if entries is None else entries.size,
            wide=[array is not None and array.dtype.itemsize == 8 for array in map(inputs.get, WIDE_ARRAYS)],
            whole=[stride * 4 % VECTOR_BYTES == 0, True],
        )

    def reference(
        self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
    ) -> dict[str, Array]:
        tokens, entries, slot_map = inputs["req_to_token"], inputs["slot_list"], inputs["slot_map"]
        assert slot_map is not None
        found = {}
        if tokens is not None:
            wanted = np.arange(len(tokens)) if rows is None else rows
            used = np.arange(tokens.shape[1]) < np.array(case.options["lengths"])[wanted, None]
            found["req_to_token"] = np.where(used, _remapped(slot_map, tokens[wanted]), tokens[wanted])
        if entries is not None:
            found["slot_list"] = _remapped(slot_map, entries if rows is None else entries[rows])
        return {name: array.astype(np.float64) for name, array in found.items()}

    def sample_rows(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], flop: float) -> Array:
        arrays = [array for array in (inputs["req_to_token"], inputs["slot_list"]) if array is not None]
        rows = min(len(array) for array in arrays)
        count = max(2, int(flop / (ELEMENT_FLOP * case.options["context"])))
        return np.unique(np.linspace(0, rows - 1, min(rows, count)).round().astype(np.int64))

    def as_float(self, output: str, array: Array) -> Array:
        return array.astype(np.float64)

    def work(self, layout: Layout, point: Point) -> Work:
        read = 4.0 * (point["requests"] * point["context"] + point["entries"])
        return Work(flop=0.0, bytes=read * (1 + min(point["moved_percent"], 100) / 100))  # what moves is written

    def demand(self, candidate: Candidate, layout: Layout, point: Point, plan: Plan) -> tuple[LaunchDemand, ...]:
        rewrite, marking = plan.launches[-1], plan.launches[:-1]
        mark_bytes = POINT_SLOTS * 4.0
        marks = tuple(
            LaunchDemand(mark.entry, mark.grid[0], 1, 1, 0.0, 0.0, 0.0, 0.0, mark_bytes / mark.grid[0], mark_bytes)
            for mark in marking
        )
        return (
            *marks,
            _rewrite_demand(candidate, point, plan.scalars["parts"], rewrite, self.work(layout, point).bytes),
        )


def _rewrite_demand(candidate: Candidate, point: Point, parts: int, launch: Launch, work: float) -> LaunchDemand:
    """Every look-up takes a sector of L2; with a filter, a bit of it comes first, and resident blocks take steps."""
    filter_bytes, moved = _filter_bytes(candidate), min(point["moved_percent"], 100) / 100
    blocks, syncs = math.prod(launch.grid), float(_is_oracle(candidate))  # a warp alone waits for each of its loads
    steps = -(-point["context"] // 32) if _is_oracle(candidate) else -(-parts // blocks)
    elements = (point["requests"] * point["context"] + point["entries"]) / (blocks * steps)
    tested = elements * TEST_BYTES if filter_bytes else 0.0
    looked_up = elements * SECTOR_BYTES * (1 - (1 - moved) ** 2 if filter_bytes else 1)  # a bit is about two slots
    return LaunchDemand(
        launch.entry,
        blocks,
        steps,
        2 if filter_bytes else 1,
        step_mma_flop=0.0,
        step_shared_bytes=tested,
        step_gather_bytes=looked_up,
        step_syncs=syncs,
        block_bytes=work / blocks + filter_bytes,
        dram_bytes=work,
    )


def _compaction(slots: int, percent: int, rng: np.random.Generator) -> Array:
    """A map (int32 [slots]) that moves ``percent`` of one half of the slots onto the other half, which stays.

    Twice is as once.
    """
    order, moved = rng.permutation(slots).astype(np.int32), slots // 2 * percent // 100
    slot_map = np.arange(slots, dtype=np.int32)
    slot_map[order[:moved]] = order[slots - moved :]
    return slot_map


def _exchange(slots: int, percent: int, rng: np.random.Generator) -> Array:
    """A map (int32 [slots], an even number) of which ``percent`` change places two and two: twice is as not at all."""
    pairs = rng.permutation(slots).astype(np.int32).reshape(2, -1)[:, : slots // 2 * percent // 100]
    slot_map = np.arange(slots, dtype=np.int32)
    slot_map[pairs] = pairs[::-1]
    return slot_map


def _remapped(slot_map: Array, numbers: Array) -> Array:
    inside = (numbers >= 0) & (numbers < slot_map.size)
    return np.where(inside, slot_map[np.where(inside, numbers, 0)], numbers)
