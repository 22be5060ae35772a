"""verify_mla: absorbed MLA attention of the nodes of draft trees over a gathered KV cache.

Row ``r`` of request ``b`` is node ``r // heads``, head ``r % heads``. Key ``j`` of the request is pool row
``kv_indices[kv_indptr[b] + j]`` for ``j < prefix`` and draft row ``j - prefix`` after it: a row of
``draft_kv``, or pool row ``draft_slots[...]``. Every node sees the whole prefix, and draft row ``i`` where
bit ``i`` of its mask words is set (without a mask: ``i`` up to itself). K is the whole row of latent +
rope elements times ``kv_scale``, V its first ``latent`` ones; the softmax scale is 1/sqrt(scale_dim). The rows' dtype
is the layout's: bf16, or e4m3 without scales of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from kgen.bf16 import from_bf16
from kgen.binding import Binding
from kgen.errors import TensorError
from kgen.families.verify_mla_binding import (
    ELEMENT_BYTES,
    INDEX_ARRAYS,
    VerifyMlaBinding,
    call_scalars,
    softmax_scale,
)
from kgen.families.verify_mla_problem import attend, draw_inputs, present, rows_within
from kgen.families.verify_mla_schedule import (
    SCHEDULE_WARPS,
    SCHEDULE_WORDS,
    SPLIT_ROOM,
    Grid,
    equal_splits,
    grid_for,
)
from kgen.families.verify_mla_tiling import (
    COPY_REGISTERS,
    COPY_WARPS,
    PROBABILITY_PAD,
    Tiling,
    element_bytes,
    group_copies_in_bulk,
    integer,
    is_flash,
    refills_one_way,
    registers_fit,
    shared_fits,
    tiles_divide,
)
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

LAYOUT_LIMITS = {  # least and most; int32 row counts and a kernel's registers bound them
    "heads": (1, 1024),
    "latent": (128, 1024),
    "rope": (0, 256),
    "page_size": (1, 65536),
    "scale_dim": (1, 65536),
}
COMBINE_THREADS = 4  # most threads that share four columns of a row where one block has all of them
COMBINE_COLUMNS = 128  # fewest columns of a combine block: one warp
COMBINE_LOADS = 12  # splits that one thread of the combine can have in flight at once
FEW_SMS, LONG_PREFIX = 5, 1000  # of proofs: splits of requests so long have several tiles
WORK_SCALARS = ("work_slots", "min_split_tiles", "item_overhead_tiles", "combine_groups", "combine_parts")
GATHER_COST = {"bulk": 1.0, "cp_async": 1.3}  # 16-byte copies reach 1.3 to 1.7 times fewer bytes a clock (H200)


class VerifyMla(Family):
    """The family; shapes and dtypes of its parameters are beside them."""

    name: ClassVar[str] = "verify_mla"
    plan_version: ClassVar[int] = 6
    template: ClassVar[str] = "verify_mla.cu.j2"
    params: ClassVar[ParameterStruct] = ParameterStruct(
        (
            Parameter("q", "pointer"),  # bf16 [tokens, heads, head_dim]
            Parameter("kv_pool", "pointer"),  # the layout's dtype [slots, head_dim], rows kv_stride_bytes apart
            Parameter("draft_kv", "pointer"),  # of that dtype [tokens, head_dim], or null: draft rows are in the pool
            Parameter("kv_indices", "pointer"),  # int32 or int64 [sum of prefixes]
            Parameter("kv_indptr", "pointer"),  # int32 or int64 [batch + 1], prefixes only
            Parameter("qo_indptr", "pointer"),  # int32 or int64 [batch + 1], nodes
            Parameter("draft_slots", "pointer"),  # int32 or int64 [tokens], or null with draft_kv
            Parameter("tree_mask", "pointer"),  # uint32 [tokens, mask_words], or null: a chain
            Parameter("out", "pointer"),  # bf16 [tokens, heads, latent]
            Parameter("lse", "pointer"),  # float32 [tokens, heads], natural logarithm, or null
            Parameter("partial_out", "pointer"),  # bf16 [partial items, tile_m, latent]
            Parameter("partial_lse", "pointer"),  # float32 [partial items, tile_m], base 2
            Parameter("merges", "pointer"),  # uint32 [tokens x heads, 4]: first partial row, stride, splits, 0
            Parameter("schedule", "pointer"),  # uint32 [blocks, 12]: what each block does, or null: it finds it itself
            Parameter("kv_stride_bytes", "int32"),  # from one pool row to the next
            Parameter("batch", "int32"),
            Parameter("heads", "int32"),
            Parameter("work_slots", "int32"),  # blocks that run at once
            Parameter("min_split_tiles", "int32"),  # KV tiles that a split has at least
            Parameter("item_overhead_tiles", "int32"),  # KV tiles that a block could do while it starts and ends
            Parameter("combine_groups", "int32"),  # threads that share a column of the combine
            Parameter("combine_parts", "int32"),  # blocks that share a row of the combine
            Parameter("mask_words", "int32"),
            Parameter("wide_indices", "int32"),  # bit set of the index arrays that are int64, in the order above
            Parameter("scale_log2", "float32"),  # softmax scale x kv_scale x log2(e)
            Parameter("kv_scale", "float32"),  # what elements of KV rows are multiplied by
        )
    )
    layout_constants: ClassVar[tuple[str, ...]] = ("latent", "rope", "dtype")
    inputs: ClassVar[tuple[str, ...]] = (
        "q", "kv_pool", "draft_kv", "kv_indices", "kv_indptr", "qo_indptr", "draft_slots", "tree_mask",
    )  # fmt: skip
    streamed: ClassVar[tuple[str, ...]] = ("kv_pool",)  # q was just made, and all layers share lengths and indices
    outputs: ClassVar[tuple[str, ...]] = ("out", "lse")
    axes: ClassVar[tuple[str, ...]] = ("batch", "nodes", "prefix")
    known_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "algorithm": ("flash", "oracle"),
        "gather": ("bulk", "cp_async"),
        "refill": ("late", "eager"),
        "copiers": tuple(COPY_WARPS),
    }
    constraints: ClassVar[tuple[Constraint, ...]] = (
        Constraint("tiles divide evenly among warps", tiles_divide),
        Constraint("shared memory fits", shared_fits),
        Constraint("registers fit", registers_fit),
        Constraint("copying warps refill one way", refills_one_way),
        Constraint("a group copies in bulk", group_copies_in_bulk),
    )

    def layout_problem(self, layout: Layout) -> tuple[str, str, str] | None:
        for field, (least, most) in LAYOUT_LIMITS.items():
            value = layout.get(field, "missing")
            if not isinstance(value, int) or not least <= value <= most:
                return field, f"must be a whole number from {least} to {most}", str(value)
        if layout.get("dtype") not in ELEMENT_BYTES:
            return "dtype", f"must be {' or '.join(ELEMENT_BYTES)}", str(layout.get("dtype", "missing"))
        if integer(layout, "latent") % 128:
            return "latent", "must be a multiple of 128", str(layout["latent"])
        if integer(layout, "rope") % 32:
            return "rope", "must be a multiple of 32", str(layout["rope"])
        return None

    def label(self, candidate: Candidate) -> str:
        if not is_flash(candidate):
            return "oracle"
        return (
            "flash_m{tile_m}_n{tile_n}_s{stages}_w{warps}_g{row_groups}_k{k_split}x{key_split}_{gather}_{refill}_{copiers}_b{blocks_per_sm}"
        ).format_map(candidate)

    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        shared = {name: layout[name] for name in self.layout_constants} | {"algorithm": candidate["algorithm"]}
        if not is_flash(candidate):
            return shared
        tiling = Tiling(candidate, layout)
        # item_overhead_rows is the host's: it is no part of the source, so its values share one cubin.
        compiled = {name: value for name, value in candidate.items() if name != "item_overhead_rows"}
        return shared | compiled | {
            "packet_floats": tiling.packet_floats,
            "copy_warps": tiling.copy_warps,
            "copy_registers": COPY_REGISTERS,
            "warp_registers": tiling.warp_registers,
            "row_bytes": tiling.row_bytes,
            "probability_stride": tiling.tile_n + PROBABILITY_PAD,
            "combine_threads": _combine_threads(layout),
            "combine_groups": _combine_groups(layout),
            "combine_shared_bytes": _combine_shared_bytes(layout),
            "combine_loads": COMBINE_LOADS,
            "split_room": SPLIT_ROOM,
            "schedule_words": SCHEDULE_WORDS,
            "schedule_warps": SCHEDULE_WARPS,
            "shared_bytes": tiling.shared_bytes,
        } | {f"{name}_offset": at for name, at in tiling.offsets.items() if name != "total"}  # fmt: skip

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        if not is_flash(candidate):
            return (Kernel("verify_mla_oracle", 32, 0),)
        tiling = Tiling(candidate, layout)
        return (
            Kernel("verify_mla_flash", tiling.threads, tiling.shared_bytes),
            Kernel("verify_mla_combine", _combine_threads(layout), _combine_shared_bytes(layout)),
            Kernel("verify_mla_schedule", SCHEDULE_WARPS * 32, 0),
        )

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        kernels = self.kernels(candidate, layout)
        rows = capacity["batch"] * capacity["nodes"] * integer(layout, "heads")
        if not is_flash(candidate):
            oracle = kernels[0]
            launch = Launch(oracle.entry, (rows, 1, 1), oracle.threads, oracle.shared_bytes)
            return Plan((launch,), {}, dict.fromkeys(WORK_SCALARS, 0))
        flash, combine, schedule = kernels
        tile_m, tile_n = integer(candidate, "tile_m"), integer(candidate, "tile_n")
        row_tiles = capacity["batch"] * -(-capacity["nodes"] * integer(layout, "heads") // tile_m)
        key_tiles = -(-(capacity["prefix"] + capacity["nodes"]) // tile_n)
        if row_tiles * key_tiles >= 1 << 31:
            raise TensorError("capacity", "is too large for one launch", seen=f"{row_tiles} x {key_tiles} tiles")
        if capacity["batch"] * capacity["prefix"] >= 1 << 31:  # kv_indptr's sums
            seen = f"{capacity['batch']} x {capacity['prefix']} keys"
            raise TensorError("capacity", "is too large for one launch", seen=seen)
        slots = sms * max(resident_blocks, 1)
        grid = grid_for(slots=slots, row_tiles=row_tiles, key_tiles=key_tiles, tile_n=tile_n)
        overhead_tiles = -(-integer(candidate, "item_overhead_rows") // tile_n)
        if grid.partials * tile_m * integer(layout, "latent") >= 1 << 32:  # the combine's offsets
            seen = f"{grid.partials} blocks of {tile_m} rows"
            raise TensorError("capacity", "has too many partial results", seen=seen)
        main = Launch(flash.entry, (grid.blocks, 1, 1), flash.threads, flash.shared_bytes)
        dealers = -(-grid.blocks // SCHEDULE_WARPS)
        deal = Launch(schedule.entry, (dealers, 1, 1), schedule.threads, schedule.shared_bytes)
        workspace = {"schedule": dealers * SCHEDULE_WARPS * SCHEDULE_WORDS * 4}
        scalars = _work_scalars(grid, overhead_tiles)
        if grid.partials == 0:  # no request can be split
            return Plan((main,), workspace, scalars, (deal,), ("schedule",))
        parts = integer(layout, "latent") // COMBINE_COLUMNS if rows <= sms else 1
        splits = equal_splits(scalars, row_tiles, key_tiles)
        groups = min(COMBINE_THREADS * parts, -(-splits // COMBINE_LOADS))
        threads = integer(layout, "latent") // 4 // parts * groups
        merge = Launch(combine.entry, (rows, parts, 1), threads, combine.shared_bytes)
        workspace |= {
            "partial_out": grid.partials * tile_m * integer(layout, "latent") * 2,
            "partial_lse": grid.partials * tile_m * 4,
            "merges": rows * 16,
        }
        scalars |= {"combine_groups": groups, "combine_parts": parts}
        return Plan((main, merge), workspace, scalars, (deal,), ("schedule",))

    def proving_plans(
        self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int
    ) -> tuple[Plan, ...]:
        """Also long requests on few multiprocessors, and other threads in the combine than the plan has.

        Few: splits of several tiles, not all as long. Most threads, as hundreds of splits have them: some are left
        without a split. Two a column: many splits then take more than one round of loads.
        """
        plans = super().proving_plans(candidate, layout, capacity, sms=sms, resident_blocks=resident_blocks)
        if is_flash(candidate) and capacity["prefix"] >= LONG_PREFIX:
            plans += (self.plan(candidate, layout, capacity, sms=FEW_SMS, resident_blocks=1).alone(),)
        grouped = [
            plan for plan in plans if plan.scalars["combine_groups"] > 1 and "schedule" not in plan.workspace_bytes
        ]
        groups = [(plan, count) for plan in grouped for count in (2, COMBINE_THREADS * plan.scalars["combine_parts"])]
        return plans + tuple(_with_groups(plan, count) for plan, count in groups)

    def binding(self, layout: Layout, capacity: Point) -> Binding:
        return VerifyMlaBinding(layout, capacity)

    def cases(self, layout: Layout) -> tuple[Case, ...]:
        def case(name: str, prefixes: list[int], nodes: list[int], **options: Any) -> Case:
            return Case(name, {"prefixes": prefixes, "nodes": nodes} | options)

        heads = integer(layout, "heads")
        few = max(1, 16 // heads)  # keeps many-headed layouts small enough for the emulator
        # More than one mask word where rows are few enough; sources do not depend on the heads.
        many = 65 if heads <= 8 else 33 if heads <= 16 else few
        return (
            case("one_node", [130], [1], lse=True),
            case("empty_prefix", [0], [2 * few + 1], lse=True),
            case("ragged", [0, 257, 33, 1], [few + 1, few, 1, 0], wide=("kv_indices",), lse=True, spare_nodes=1),
            case("scaled", [40], [few], kv_scale=0.375, lse=True),
            case("pool_draft", [70, 5], [few, few + 2], draft="pool", wide=("draft_slots", "qo_indptr"), lse=True),
            case("page_tail", [63, 65], [few, few], wide=("kv_indices", "kv_indptr"), lse=False),
            case("chain", [125 if heads <= 16 else 40], [4 * few + 1], mask="chain", lse=True),  # splits of row tiles
            case("many_nodes", [50], [many], lse=True),
            case("sharp", [150], [few], sharpness=6, lse=True),  # O is rescaled on the way
            case("blind_nodes", [0], [33 if heads <= 16 else few], blind=2, lse=True, spare_batch=1),  # see nothing
            case("padded_request", [90, 1], [few, few], padded=1, lse=True, spare_batch=1),
            case("many_splits", [1030, 70], [1, 1], lse=True),  # more than one combine group, and round of loads
            case("many_requests", [3, 70, *[0] * 34, 1, 130], [1, 1, *[0] * 33, 1, 1, 1], lse=True),  # over 32
        )

    def point_case(self, point: Point) -> Case:
        batch = point["batch"]
        options = {"prefixes": [point["prefix"]] * batch, "nodes": [point["nodes"]] * batch, "lse": False}
        return Case(",".join(f"{axis}={point[axis]}" for axis in self.axes), options)

    def capacity(self, case: Case) -> Point:
        options = case.options
        return {
            "batch": len(options["prefixes"]) + options.get("spare_batch", 0),
            "nodes": max(1, *options["nodes"]) + options.get("spare_nodes", 0),
            "prefix": max(options["prefixes"]),
        }

    def make_inputs(self, layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
        return draw_inputs(layout, case, seed)

    def output_arrays(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> dict[str, Array | None]:
        tokens, heads = present(inputs, "q").shape[:2]
        lse = np.full((tokens, heads), np.nan, np.float32) if case.options["lse"] else None
        return {"out": np.full((tokens, heads, integer(layout, "latent")), 0xFFFF, np.uint16), "lse": lse}

    def scalars(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> Mapping[str, int | float]:
        return call_scalars(
            inputs,
            wide=[array is not None and array.dtype.itemsize == 8 for array in map(inputs.get, INDEX_ARRAYS)],
            kv_stride_bytes=present(inputs, "kv_pool")[0].nbytes,
            batch=present(inputs, "kv_indptr").size - 1,
            heads=integer(layout, "heads"),
            scale=softmax_scale(layout),
            kv_scale=case.options.get("kv_scale", 1.0),
        )

    def reference(
        self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
    ) -> dict[str, Array]:
        return attend(layout, case, inputs, rows)

    def sample_rows(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], flop: float) -> Array:
        return rows_within(layout, inputs, flop)

    def as_float(self, output: str, array: Array) -> Array:
        return from_bf16(array) if output == "out" else array.astype(np.float64)

    def work(self, layout: Layout, point: Point) -> Work:
        latent, head_dim = integer(layout, "latent"), integer(layout, "latent") + integer(layout, "rope")
        rows = point["batch"] * point["nodes"] * integer(layout, "heads")
        keys = point["prefix"] + point["nodes"]
        return Work(
            flop=2.0 * rows * keys * (head_dim + latent),
            bytes=float(point["batch"] * keys * head_dim * element_bytes(layout) + 2 * rows * (head_dim + latent)),
        )

    def demand(self, candidate: Candidate, layout: Layout, point: Point, plan: Plan) -> tuple[LaunchDemand, ...]:
        keys = point["prefix"] + point["nodes"]
        work = self.work(layout, point)
        main = plan.launches[0]
        blocks = math.prod(main.grid)
        if not is_flash(candidate):
            row_bytes = float(element_bytes(layout) * (integer(layout, "latent") + integer(layout, "rope")))
            return (LaunchDemand(main.entry, blocks, keys, 1, 0.0, row_bytes, row_bytes, 1.0, row_bytes, work.bytes),)
        tiling = Tiling(candidate, layout)
        tiles = -(-keys // tiling.tile_n)
        pairs = point["batch"] * -(-point["nodes"] * integer(layout, "heads") // tiling.tile_m)
        splits = equal_splits(plan.scalars, pairs, tiles)
        flash = LaunchDemand(
            main.entry,
            blocks=pairs * splits,
            steps=-(-tiles // splits),
            stages=tiling.stages,
            step_mma_flop=2.0 * tiling.tile_m * tiling.tile_n * (tiling.head_dim + tiling.latent),
            step_shared_bytes=tiling.step_shared_bytes,
            step_gather_bytes=tiling.tile_n * tiling.dense_bytes * GATHER_COST[str(candidate["gather"])],
            step_syncs=2.0 + (tiling.copy_warps == 0),  # where warps copy beside multiplying, a refill waits too
            block_bytes=tiling.tile_m * (2.0 * tiling.head_dim + 2.0 * tiling.latent),
            dram_bytes=work.bytes,
            step_converted=tiling.warp_elements if tiling.element_bytes == 1 else 0.0,
        )
        if len(plan.launches) == 1:
            return (flash,)
        combine = plan.launches[1]
        row_bytes = 2.0 * tiling.latent * (splits + 1) / plan.scalars["combine_parts"]
        merge = LaunchDemand(combine.entry, math.prod(combine.grid), 1, 1, 0.0, 0.0, 0.0, 4.0, row_bytes, 0.0)
        return (flash, merge)


def _work_scalars(grid: Grid, overhead_tiles: int) -> dict[str, int]:
    return dict.fromkeys(WORK_SCALARS, 0) | {
        "work_slots": grid.slots,
        "min_split_tiles": grid.min_split_tiles,
        "item_overhead_tiles": overhead_tiles,
    }


def _with_groups(plan: Plan, groups: int) -> Plan:
    """The plan with as many threads of a combine block to a column."""
    flash, merge = plan.launches
    threads = merge.threads // plan.scalars["combine_groups"] * groups
    return replace(
        plan, launches=(flash, replace(merge, threads=threads)), scalars={**plan.scalars, "combine_groups": groups}
    )


def _combine_threads(layout: Layout) -> int:
    """Of the largest block: four columns a thread."""
    return integer(layout, "latent") // 4 * COMBINE_THREADS


def _combine_groups(layout: Layout) -> int:
    """Most groups of threads that share the splits of a combine block's columns."""
    return _combine_threads(layout) // (COMBINE_COLUMNS // 4)


def _combine_shared_bytes(layout: Layout) -> int:
    """One float4 a thread, and a total and a peak a group."""
    return _combine_threads(layout) * 16 + _combine_groups(layout) * 8
