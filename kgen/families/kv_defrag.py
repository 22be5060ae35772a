"""kv_defrag: rows of a KV pool to other slots, in all layers at once.

Move ``i < count`` copies ``row_bytes`` bytes from slot ``src_slots[i]`` to slot ``dst_slots[i]`` in every layer. The
result is that of a simultaneous move: each destination holds what its source held before the call, whatever overlaps.
A move onto itself, or from or to a slot outside the pool, does nothing; other destinations must differ from each other.
Layouts with ``moves: disjoint`` promise besides that no destination is a source, and take one launch at any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kgen.binding import Binding, Sizes, TensorRule
from kgen.errors import TensorError
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

SLOT_ARRAYS = ("src_slots", "dst_slots")  # their places are bits of wide_slots
SLOT_DTYPES = ("int32", "int64")
MAX_ROW_BYTES = 1 << 20
MIN_SLICE_BYTES = 128  # of a row: narrower slices would split what DRAM reads at once
VECTOR_BYTES = 16  # of every load and store
MOVE_WAVES = 32  # of resident blocks at most: where few of a long list count, each takes 0.4 us to find nothing
STAGE_BLOCKS_PER_SM = 2  # that share the layers of what is staged
STAGED_MOVES = 32  # of a block of the stage kernel: one a lane
REGISTER_SLACK = 28  # for addresses, indices and loops, beside the rows in flight
DISTINCT_WORDS = 1 << 22  # random numbers drawn for a pool; a larger one repeats them
WORD_FLOP = 400.0  # what comparing four bytes with the reference costs the host, in the terms of `sample_rows`


def integer(values: Mapping[str, Value], name: str) -> int:
    """A tunable or layout field that is a whole number."""
    return int(values[name])


def _is_oracle(candidate: Candidate) -> bool:
    return candidate["algorithm"] == "oracle"


def _threads(candidate: Candidate) -> int:
    return integer(candidate, "warps") * 32


def _stage_shared_bytes(candidate: Candidate) -> int:
    """Of every warp: 128 destinations to compare with, and what it found about the block's moves."""
    return integer(candidate, "warps") * (128 + STAGED_MOVES) * 4


def _block_rows(candidate: Candidate) -> int:
    """Moves of a block of the move kernel."""
    return _threads(candidate) // integer(candidate, "lanes")


def _registers_fit(candidate: Candidate, layout: Layout, target: Target) -> bool:
    if _is_oracle(candidate):
        return True
    needed = integer(candidate, "vectors") * 9 + REGISTER_SLACK  # a vector, its source, target, column, addresses
    return needed <= min(target.registers_per_thread, target.registers_per_sm // _threads(candidate))


def _rows_fill_block(candidate: Candidate, layout: Layout, target: Target) -> bool:
    return _is_oracle(candidate) or _threads(candidate) % integer(candidate, "lanes") == 0


class KvDefrag(Family):
    """The family; shapes and dtypes of its parameters are beside them."""

    name: ClassVar[str] = "kv_defrag"
    template: ClassVar[str] = "kv_defrag.cu.j2"
    params: ClassVar[ParameterStruct] = ParameterStruct(
        (
            Parameter("layer_ptrs", "pointer"),  # uint64 [layers], addresses of pools [slots, row_stride bytes]
            Parameter("src_slots", "pointer"),  # int32 or int64 [moves]
            Parameter("dst_slots", "pointer"),  # int32 or int64 [moves]
            Parameter("count", "pointer"),  # int32 [1], how many of the moves to do; or null: all
            Parameter("staging", "pointer"),  # uint8 [moves, layers, row_bytes]
            Parameter("overlaps", "pointer"),  # int32 [moves], whether the row is in staging
            Parameter("row_stride", "int64"),  # bytes from one slot to the next
            Parameter("row_bytes", "int32"),
            Parameter("layers", "int32"),
            Parameter("slots", "int32"),  # of the pool
            Parameter("moves", "int32"),  # entries of the lists
            Parameter("wide_slots", "int32"),  # bit set of the slot lists that are int64, in the order above
            Parameter("slice_vectors", "int32"),  # of 16 bytes of a row, that a block of the exact kernel has
            Parameter("move_blocks", "int32"),  # of the move kernel that share the rows of a layer
            Parameter("stage_blocks", "int32"),  # of the stage kernel that share the layers; 0: it does not run
        )
    )
    layout_constants: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[str, ...]] = ("src_slots", "dst_slots", "count")
    inouts: ClassVar[tuple[str, ...]] = ("pool",)
    pointer_tables: ClassVar[Mapping[str, str]] = {"layer_ptrs": "pool"}
    streamed: ClassVar[tuple[str, ...]] = ("pool",)
    outputs: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[tuple[str, ...]] = ("layers", "rows")
    known_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"algorithm": ("one_pass", "oracle")}
    constraints: ClassVar[tuple[Constraint, ...]] = (
        Constraint("registers fit", _registers_fit),
        Constraint("a block has whole rows", _rows_fill_block),
    )
    plan_version: ClassVar[int] = 3

    def layout_problem(self, layout: Layout) -> tuple[str, str, str] | None:
        row_bytes = layout.get("row_bytes", "missing")
        if not isinstance(row_bytes, int) or not 16 <= row_bytes <= MAX_ROW_BYTES or row_bytes % 16:
            return "row_bytes", f"must be a multiple of 16 up to {MAX_ROW_BYTES}", str(row_bytes)
        if layout.get("moves") not in ("any", "disjoint"):
            return "moves", "must be any or disjoint", str(layout.get("moves", "missing"))
        return None

    def label(self, candidate: Candidate) -> str:
        if _is_oracle(candidate):
            return "oracle"
        return "{algorithm}_w{warps}_l{lanes}_i{vectors}".format_map(candidate)

    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        if _is_oracle(candidate):
            return {"algorithm": "oracle"}
        return dict(candidate) | {"stage_shared_bytes": _stage_shared_bytes(candidate)}

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        if _is_oracle(candidate):
            return Kernel("kv_defrag_oracle_gather", 32, 0), Kernel("kv_defrag_oracle_scatter", 32, 0)
        threads = _threads(candidate)
        return (
            Kernel("kv_defrag_move", threads, 0),
            Kernel("kv_defrag_exact", threads, 0),
            Kernel("kv_defrag_stage", threads, _stage_shared_bytes(candidate)),
        )

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        rows, layers, row_bytes = capacity["rows"], capacity["layers"], integer(layout, "row_bytes")
        staged = {"staging": rows * layers * row_bytes}
        kernels = self.kernels(candidate, layout)
        if _is_oracle(candidate):
            launches = tuple(Launch(kernel.entry, (rows, layers, 1), kernel.threads, 0) for kernel in kernels)
            return Plan(launches, staged, _plan_scalars())
        move, exact, stage = kernels
        slice_vectors = _slice_vectors(candidate, row_bytes, rows) if layout["moves"] == "any" else 0
        if slice_vectors:
            slices = -(-row_bytes // (slice_vectors * VECTOR_BYTES))
            launch = Launch(exact.entry, (slices, layers, 1), exact.threads, exact.shared_bytes)
            return Plan((launch,), {}, _plan_scalars(slice_vectors=slice_vectors))
        most = MOVE_WAVES * sms * max(resident_blocks, 1)
        blocks = min(-(-rows // _block_rows(candidate)), -(-most // layers))
        moving = Launch(move.entry, (blocks, layers, 1), move.threads, move.shared_bytes)
        if layout["moves"] == "disjoint":
            return Plan((moving,), {}, _plan_scalars(move_blocks=blocks))
        columns = -(-rows // STAGED_MOVES)
        stage_blocks = max(1, min(layers, STAGE_BLOCKS_PER_SM * sms // columns))
        staging = Launch(stage.entry, (columns, stage_blocks, 1), stage.threads, stage.shared_bytes)
        workspace = staged | {"overlaps": rows * 4}
        return Plan((staging, moving), workspace, _plan_scalars(move_blocks=blocks, stage_blocks=stage_blocks))

    def binding(self, layout: Layout, capacity: Point) -> Binding:
        return KvDefragBinding(layout, capacity)

    def cases(self, layout: Layout) -> tuple[Case, ...]:
        def case(name: str, pattern: str, counts: list[int], layers: int, slots: int, **options: Any) -> Case:
            return Case(name, {"pattern": pattern, "counts": counts, "layers": layers, "slots": slots} | options)

        apart = (
            case("one_row", "disjoint", [1], 1, 5),
            case("apart", "disjoint", [37], 3, 90, wide=("src_slots",), stride_words=8),
            case("counts", "disjoint", [12, 40], 2, 100, wide=SLOT_ARRAYS),
            case("nothing", "disjoint", [0, 3], 2, 20),
            case("all_of_a_list", "disjoint", [70], 5, 200, counted=False),
        )
        if layout["moves"] == "disjoint":
            return apart
        return (
            *apart,
            case("accept", "accept", [64], 3, 200, wide=SLOT_ARRAYS),
            case("chain", "chain", [50], 2, 80, wide=("dst_slots",), stride_words=4),
            case("cycle", "cycle", [33, 20], 2, 60),
            case("fan_out", "mixed", [90], 2, 100, counted=False),
            case("outside", "chain", [30], 2, 40, wide=("src_slots",), outside=True),
            case("more_than_a_block_holds", "mixed", [600], 1, 640),
            case("long_cycle", "cycle", [580, 600], 1, 620, wide=SLOT_ARRAYS),
        )

    def point_case(self, point: Point) -> Case:
        rows = point["rows"]  # apart, so that every replay of a graph does the same work
        options = {"pattern": "disjoint", "counts": [rows], "layers": point["layers"], "slots": 2 * rows + 2}
        return Case(",".join(f"{axis}={point[axis]}" for axis in self.axes), options)

    def capacity(self, case: Case) -> Point:
        return {"layers": case.options["layers"], "rows": max(1, *case.options["counts"])}

    def make_inputs(self, layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
        options, rng = case.options, np.random.default_rng(seed)
        counts, slots = options["counts"], options["slots"]
        length = max(1, *counts)
        moves = _moves(options["pattern"], length, slots, rng)  # those behind the count must not be done
        if options.get("outside"):
            moves[0, ::5], moves[1, 1::5] = slots, -1
        words = integer(layout, "row_bytes") // 4 + options.get("stride_words", 0)
        shape = (options["layers"], slots, words)
        drawn = rng.integers(0, 1 << 32, min(math.prod(shape), DISTINCT_WORDS), np.uint32)
        wide = options.get("wide", ())
        lists = {
            name: values.astype(np.int64 if name in wide else np.int32)
            for name, values in zip(SLOT_ARRAYS, moves, strict=True)
        }
        counted = options.get("counted", True)
        return {"pool": np.resize(drawn, shape), "count": np.array([counts[0]], np.int32) if counted else None, **lists}

    def output_arrays(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> dict[str, Array | None]:
        return {}

    def scalars(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> Mapping[str, int | float]:
        layers, slots, words = _present(inputs, "pool").shape
        lists = [_present(inputs, name) for name in SLOT_ARRAYS]
        return {
            "row_stride": words * 4,
            "row_bytes": integer(layout, "row_bytes"),
            "layers": layers,
            "slots": slots,
            "moves": lists[0].size,
            "wide_slots": sum((array.dtype.itemsize == 8) << bit for bit, array in enumerate(lists)),
        }

    def reference(
        self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
    ) -> dict[str, Array]:
        pool = _present(inputs, "pool")
        origin = np.arange(pool.shape[1])
        source, target = (_present(inputs, name)[: case.options["counts"][0]] for name in SLOT_ARRAYS)
        inside = (source >= 0) & (source < origin.size) & (target >= 0) & (target < origin.size)
        moves = inside & (source != target)  # a row that stays may be another's destination
        origin[target[moves]] = source[moves]
        layer, slot = np.divmod(np.arange(pool.shape[0] * pool.shape[1]) if rows is None else rows, pool.shape[1])
        moved = pool[layer, slot].astype(np.float64)
        words = integer(layout, "row_bytes") // 4  # what lies between rows stays
        moved[:, :words] = pool[layer, origin[slot], :words]
        return {"pool": moved if rows is not None else moved.reshape(pool.shape)}

    def sample_rows(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], flop: float) -> Array:
        layers, slots, words = _present(inputs, "pool").shape
        count = max(2, int(flop / (WORD_FLOP * words)))
        return np.unique(np.linspace(0, layers * slots - 1, min(layers * slots, count)).round().astype(np.int64))

    def as_float(self, output: str, array: Array) -> Array:
        return array.astype(np.float64)

    def work(self, layout: Layout, point: Point) -> Work:
        return Work(flop=0.0, bytes=2.0 * point["rows"] * point["layers"] * integer(layout, "row_bytes"))

    def demand(self, candidate: Candidate, layout: Layout, point: Point, plan: Plan) -> tuple[LaunchDemand, ...]:
        moved = self.work(layout, point).bytes
        syncs = float(_is_oracle(candidate))  # a warp alone waits for its loads
        demands = []
        for launch in plan.launches:
            blocks = math.prod(launch.grid)
            bytes_moved = 0.0 if launch.entry == "kv_defrag_stage" else moved  # nothing overlaps at a workload point
            share = bytes_moved / blocks
            demands.append(LaunchDemand(launch.entry, blocks, 1, 1, 0.0, 0.0, 0.0, syncs, share, bytes_moved))
        return tuple(demands)


def _plan_scalars(*, slice_vectors: int = 0, move_blocks: int = 0, stage_blocks: int = 0) -> dict[str, int]:
    return {"slice_vectors": slice_vectors, "move_blocks": move_blocks, "stage_blocks": stage_blocks}


def _slice_vectors(candidate: Candidate, row_bytes: int, rows: int) -> int:
    """Vectors of a row so few that one block's registers hold them of all rows; 0 if a slice would be too narrow.

    Slices are as equal as can be.
    """
    most, vectors = _threads(candidate) * integer(candidate, "vectors") // rows, row_bytes // VECTOR_BYTES
    if most * VECTOR_BYTES < min(row_bytes, MIN_SLICE_BYTES):
        return 0
    return -(-vectors // -(-vectors // most))


def _present(inputs: Mapping[str, Array | None], name: str) -> Array:
    array = inputs[name]
    assert array is not None, name
    return array


def _moves(pattern: str, count: int, slots: int, rng: np.random.Generator) -> Array:
    """Sources and destinations, int64 [2, count], in random order; slot 0 is only padding.

    ``disjoint``: no slot twice, destinations ascending. ``chain``: each destination is the next move's source.
    ``cycle``: a chain that ends where it began. ``mixed``: any source, also twice, also its own destination.
    ``accept``: requests of 8 slots whose accepted nodes move to the front, padded with moves of slot 0 onto itself.
    """
    order = rng.permutation(np.arange(1, slots))
    if pattern == "disjoint":
        return np.stack([order[:count], np.sort(order[count : 2 * count])])
    if pattern == "accept":
        return _accepted(count, rng)
    if pattern == "mixed":
        moves = np.stack([rng.integers(1, slots, count), order[:count]])
    else:
        moves = np.stack([order[:count], order[1 : count + 1] if pattern == "chain" else np.roll(order[:count], -1)])
    return moves[:, rng.permutation(count)]


def _accepted(count: int, rng: np.random.Generator) -> Array:
    moves = np.zeros((2, count), np.int64)
    for first in range(0, count, 8):
        accepted = int(rng.integers(1, 8))
        base = 1 + 3 * first  # of 24 draft slots
        nodes = np.sort(rng.choice(np.arange(1, 20), accepted, replace=False))
        moves[0, first : first + accepted] = base + nodes
        moves[1, first : first + accepted] = base + np.arange(accepted)
    return moves


class KvDefragBinding(Binding):
    """The tensors of a call.

    ``layer_ptrs`` is a `kgen.runtime.PointerTable` of the layers, each [slots, ...] with ``row_bytes`` bytes a slot.
    ``count`` (int32 [1], on the device) says how many entries of the slot lists to do; all where it is left out.
    """

    rules = (
        TensorRule("layer_ptrs", (), ("layers",), table=True),
        TensorRule("src_slots", SLOT_DTYPES, ("moves",)),
        TensorRule("dst_slots", SLOT_DTYPES, ("moves",)),
        TensorRule("count", ("int32",), ("1",), optional=True),
    )
    options: ClassVar[tuple[str, ...]] = ()
    plan_axes: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(self, layout: Layout, capacity: Point) -> None:
        self._capacity = capacity
        self._row_bytes, self._apart = int(layout["row_bytes"]), layout["moves"] == "disjoint"

    def sizes(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """Layers and row bytes of the pool, entries of ``src_slots``, within the prepared capacity."""
        table = tensors["layer_ptrs"]
        layers, row_bytes = getattr(table, "entries", None), getattr(table, "row_bytes", None)
        if layers is None:
            seen = type(table).__name__
            raise TensorError("layer_ptrs", "is no PointerTable", seen=seen, remedy="kgen.runtime.PointerTable(layers)")
        if row_bytes != self._row_bytes:
            wrong = f"must have rows of {self._row_bytes} bytes, which the call was prepared for"
            raise TensorError("layer_ptrs", wrong, seen=f"{row_bytes} bytes")
        if not 0 < layers <= self._capacity["layers"]:
            seen = f"{layers}, prepared for {self._capacity['layers']}"
            raise TensorError("layer_ptrs", "has too many layers", seen=seen)
        shape: tuple[int, ...] = getattr(tensors["src_slots"], "shape", ())
        moves = int(shape[0]) if len(shape) == 1 else 0  # a tensor of another shape is refused later
        if moves > self._capacity["rows"]:
            seen = f"{moves}, prepared for {self._capacity['rows']}"
            raise TensorError("src_slots", "has too many moves", seen=seen, remedy="split them, or prepare for more")
        return Sizes(
            dimensions={"layers": layers, "moves": moves, "1": 1},
            point={"layers": layers, "rows": moves},
            extents={"rows": moves},
            is_empty=moves == 0,
        )

    def scalars(self, tensors: Mapping[str, Any], sizes: Sizes, options: Mapping[str, Any]) -> dict[str, int | float]:
        """Shape and stride of the pool, length and width of the slot lists."""
        table = tensors["layer_ptrs"]
        return {
            "row_stride": table.row_stride_bytes,
            "row_bytes": table.row_bytes,
            "layers": table.entries,
            "slots": table.rows,
            "moves": sizes.dimensions["moves"],
            "wide_slots": sum((tensors[name].element_size() == 8) << bit for bit, name in enumerate(SLOT_ARRAYS)),
        }

    def check_content(self, tensors: Mapping[str, Any], sizes: Sizes) -> None:
        """Counts within the lists, slots within the pool, no destination twice, and apart where that was promised."""
        given = tensors["count"]
        count = sizes.dimensions["moves"] if given is None else int(given.item())
        if not 0 <= count <= sizes.dimensions["moves"]:
            raise TensorError("count", "is beyond the slot lists", seen=f"{count} of {sizes.dimensions['moves']}")
        source, target = (tensors[name][:count].cpu().numpy().astype(np.int64) for name in SLOT_ARRAYS)
        _check_moves(source, target, slots=tensors["layer_ptrs"].rows, apart=self._apart)


def _check_moves(source: Any, target: Any, *, slots: int, apart: bool) -> None:
    """Raise TensorError where moves (int64 arrays) are not what the kernels take.

    Slots must be in the pool; destinations of rows that do move must differ, and with ``apart`` be no sources.
    """
    for name, values in (("src_slots", source), ("dst_slots", target)):
        outside = values[(values < 0) | (values >= slots)]
        if outside.size:
            raise TensorError(name, "points outside the pool", seen=f"slot {outside[0]} of {slots}")
    moving = source != target
    found, times = np.unique(target[moving], return_counts=True)
    if (times > 1).any():
        raise TensorError("dst_slots", "has a destination twice", seen=f"slot {found[times > 1][0]}")
    shared = np.intersect1d(found, source[moving]) if apart else found[:0]
    if shared.size:
        wrong, remedy = "overwrites a source of a disjoint move", "use a layout with moves: any"
        raise TensorError("dst_slots", wrong, seen=f"slot {shared[0]}", remedy=remedy)
