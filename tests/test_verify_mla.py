"""verify_mla at its edges, in the emulator: lengths far apart, many requests, few blocks, numbers that are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mla_schedule import Item, chosen_length, dealt, dealt_by_plan, last_end

from kgen.bf16 import from_bf16
from kgen.build import build
from kgen.build.toolchain import find_toolchain
from kgen.emulator import EmulatedModule
from kgen.families.verify_mla_binding import LOG2_E, softmax_scale
from kgen.families.verify_mla_schedule import equal_splits, grid_for
from kgen.families.verify_mla_tiling import COPY_REGISTERS, Tiling
from kgen.family import Array, Candidate, Case, Plan
from kgen.render import render
from kgen.resources import SPECS
from kgen.space import enumerate_space
from kgen.spec import load_spec
from kgen.validate import compare, validate_in_emulator
from kgen.validate.launchers import Call, EmulatorLauncher

SPEC = load_spec(SPECS / "verify_mla.yaml")
FAMILY, LAYOUT = SPEC.family, SPEC.layout("h8_p1")
HEADS = int(LAYOUT["heads"])
FLASH: dict[str, Candidate] = {
    "default": SPEC.default,
    "eager": {**SPEC.default, "refill": "eager", "gather": "cp_async"},
    "small": {**SPEC.default, "tile_m": 16, "warps": 4, "row_groups": 1},
}
KERNELS = {**FLASH, "oracle": SPEC.oracle}
NAN, INFINITY = 0x7FC0, 0x7F80


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "emulator"


def case_of(prefixes: list[int], nodes: list[int], **options: Any) -> Case:
    return Case("edge", {"prefixes": prefixes, "nodes": nodes, "lse": True, **options})


def plan_of(candidate: Candidate, case: Case, sms: int) -> Plan:
    return FAMILY.plan(candidate, LAYOUT, FAMILY.capacity(case), sms=sms, resident_blocks=1)


def run(
    candidate: Candidate,
    case: Case,
    plan: Plan,
    inputs: Mapping[str, Array | None],
    cache_dir: Path,
    **more: Array,
) -> Mapping[str, Array]:
    """Every output, and what the launches leave in the arrays of ``more``."""
    source = render(FAMILY, candidate, LAYOUT)
    (built,) = build([source], arch="emulator", toolchain=find_toolchain("emulator"), cache_dir=cache_dir, jobs=1)
    assert built.path is not None, built.log
    outputs = {**FAMILY.output_arrays(LAYOUT, case, inputs), **more}
    call = Call(inputs, outputs, FAMILY.scalars(LAYOUT, case, inputs))
    (outcome,) = EmulatorLauncher(EmulatedModule(built.path)).run(FAMILY, plan, [call])
    assert outcome.changed_inputs == outcome.broken_guards == ()
    return outcome.outputs


def check(candidate: Candidate, case: Case, sms: int, cache_dir: Path) -> None:
    """Against the reference, within the spec's tolerances."""
    inputs = FAMILY.make_inputs(LAYOUT, case, 0)
    found = run(candidate, case, plan_of(candidate, case, sms), inputs, cache_dir)
    for name, reference in FAMILY.reference(LAYOUT, case, inputs).items():
        array = FAMILY.as_float(name, found[name])
        result = compare(array, reference, SPEC.tolerances[name], name=case.name, seed=0, output=name)
        assert result.ok, result.reason


def most_splits(candidate: Candidate, case: Case, sms: int) -> list[int]:
    """How many splits each request with nodes has."""
    items = dealt_by_plan(
        plan_of(candidate, case, sms), candidate, HEADS, case.options["prefixes"], case.options["nodes"]
    )
    return [splits for _, splits in sorted({item.request: item.splits for item in items}.items())]


# --- Lengths ---------------------------------------------------------------------------------------------------------

RAGGED = case_of([2000, 20, 20, 0], [2, 1, 3, 2])
MANY = case_of(
    [90, 0, 3, 130, 17, 0, 64, 1] * 5,
    [1, 0, 2, 0, 9, 3, 0, 1] * 4 + [0, 0, 0, 0, 1, 0, 0, 9],
)


@pytest.mark.parametrize("name", FLASH)
def test_a_request_that_is_a_hundred_times_longer_has_nearly_all_blocks(name: str, cache_dir: Path) -> None:
    assert most_splits(FLASH[name], RAGGED, sms=40) == [32, 1, 1, 1]
    check(FLASH[name], RAGGED, 40, cache_dir)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sms", [2, 60, 188])
def test_forty_requests_of_which_some_are_empty(name: str, sms: int, cache_dir: Path) -> None:
    assert len(MANY.options["nodes"]) == 40
    check(KERNELS[name], MANY, sms, cache_dir)


@pytest.mark.parametrize("name", FLASH)
def test_fewer_blocks_to_split_for_than_row_tiles(name: str, cache_dir: Path) -> None:
    case = case_of([200, 70, 0], [9, 1, 2])
    plan = plan_of(FLASH[name], case, 2)
    assert len(plan.launches) == 2, "the combine runs, and finds nothing to do"
    assert plan.launches[0].grid[0] > plan.scalars["work_slots"] == 2
    assert most_splits(FLASH[name], case, sms=2) == [1, 1, 1]
    check(FLASH[name], case, 2, cache_dir)


def test_a_batch_in_which_nobody_has_nodes(cache_dir: Path) -> None:
    """Only the grid knows of requests: every block finds nothing to do, and no output has a row."""
    case = case_of([70, 3], [0, 0])
    found = run(SPEC.default, case, plan_of(SPEC.default, case, 188), FAMILY.make_inputs(LAYOUT, case, 0), cache_dir)
    assert found["out"].size == found["lse"].size == 0


# --- The schedule ----------------------------------------------------------------------------------------------------

BATCHES = {
    "one request": ([700], [1], 188),
    "one request, few blocks": ([700], [1], 5),
    "one request of many rows": ([300], [20], 31),
    "ragged": ([700, 20, 0, 133], [2, 1, 3, 9], 23),
    "too few blocks": ([300, 40], [9, 9], 3),
    "more requests than lanes": ([0, 70, 5] * 13, [1, 2, 0] * 13, 60),
}


def item_lse(inputs: Mapping[str, Array | None], item: Item) -> Array:
    """The log-sum-exp (base 2) of each row of an item over the item's keys."""
    arrays = {name: array for name, array in inputs.items() if array is not None}
    first, last = arrays["qo_indptr"][item.request : item.request + 2].tolist()
    begin, end = arrays["kv_indptr"][item.request : item.request + 2].tolist()
    slots = arrays["kv_indices"][begin:end]
    keys = from_bf16(np.concatenate([arrays["kv_pool"][slots], arrays["draft_kv"][first:last]]))
    rows = np.arange(item.first_row, item.last_row)
    q = from_bf16(arrays["q"][first:last]).reshape(-1, keys.shape[1])[rows]
    places = np.arange(item.first_key, item.last_key)
    score = q @ keys[places].T * softmax_scale(LAYOUT)
    hidden = places[None] - (end - begin) > rows[:, None] // HEADS  # a chain: up to oneself
    with np.errstate(divide="ignore"):
        lse: Array = np.log2(np.where(hidden, 0.0, np.exp(score)).sum(axis=1))
    return lse


def left_and_told(name: str, batch: str, cache_dir: Path, **changes: int) -> tuple[Array, Array]:
    """The log-sum-exp that the block of each split leaves, and what it is by a schedule with other scalars."""
    candidate, (prefixes, nodes, sms) = FLASH[name], BATCHES[batch]
    case = case_of(prefixes, nodes, mask="chain")
    plan = plan_of(candidate, case, sms)
    shape = plan.workspace_bytes["partial_lse"] // 4 // int(candidate["tile_m"]), int(candidate["tile_m"])
    inputs = FAMILY.make_inputs(LAYOUT, case, 0)
    left = {"partial_lse": np.full(shape, np.nan, np.float32)}
    found = run(candidate, case, replace(plan, launches=plan.launches[:1]), inputs, cache_dir, **left)["partial_lse"]
    items = dealt_by_plan(replace(plan, scalars={**plan.scalars, **changes}), candidate, HEADS, prefixes, nodes)
    assert len(items) <= plan.launches[0].grid[0]
    told = np.full(shape, np.nan)
    for place, item in enumerate(items):
        if item.splits > 1:
            told[place, : item.last_row - item.first_row] = item_lse(inputs, item)
    return found, told


def scheduled(items: list[Item], nodes: list[int], prefixes: list[int], tile_m: int, tile_n: int) -> Array:
    """The nine words of each item, as the launch that makes a schedule must write them."""
    words = []
    for item in items:
        first, last = (-(-key // tile_n) for key in (item.first_key, item.last_key))
        row_tiles = -(-nodes[item.request] * HEADS // tile_m)
        request = (
            sum(nodes[: item.request]),
            nodes[item.request],
            sum(prefixes[: item.request]),
            prefixes[item.request],
        )
        words.append((*request, item.first_row, first, last - first, item.splits, row_tiles))
    return np.array(words, np.uint32)


@pytest.mark.parametrize("name", ["default", "small"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_schedule_is_what_is_told(name: str, batch: str, cache_dir: Path) -> None:
    candidate, (prefixes, nodes, sms) = FLASH[name], BATCHES[batch]
    case = case_of(prefixes, nodes)
    plan = plan_of(candidate, case, sms)
    blocks, tile_m, tile_n = plan.launches[0].grid[0], int(candidate["tile_m"]), int(candidate["tile_n"])
    assert plan.workspace_bytes["schedule"] == -(-blocks // 4) * 4 * 48
    left = {"schedule": np.full((-(-blocks // 4) * 4, 12), 7, np.uint32)}
    making = Plan(plan.shared_launches, plan.alone().workspace_bytes, plan.scalars)
    found = run(candidate, case, making, FAMILY.make_inputs(LAYOUT, case, 0), cache_dir, **left)["schedule"]
    items = dealt_by_plan(plan, candidate, HEADS, prefixes, nodes)
    np.testing.assert_array_equal(found[: len(items), :9], scheduled(items, nodes, prefixes, tile_m, tile_n))
    assert (found[len(items) :, 7] == 0).all(), "blocks that find nothing to do"


CLOSE: dict[str, Any] = {"rtol": 0, "atol": SPEC.tolerances["lse"].max_abs * LOG2_E, "equal_nan": True}


@pytest.mark.parametrize("name", ["default", "small"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_device_deals_as_told(name: str, batch: str, cache_dir: Path) -> None:
    """A log-sum-exp is of its block's rows and keys and of no others."""
    found, told = left_and_told(name, batch, cache_dir)
    np.testing.assert_allclose(found, told, **CLOSE)


@pytest.mark.parametrize("changes", [{"work_slots": 9}, {"min_split_tiles": 6}])
def test_a_schedule_that_is_told_wrongly_is_seen(changes: dict[str, int], cache_dir: Path) -> None:
    found, told = left_and_told("default", "one request", cache_dir, **changes)
    assert not np.allclose(found, told, **CLOSE)


def test_the_batches_above_are_dealt_in_every_way() -> None:
    counts = {
        batch: most_splits(SPEC.default, case_of(prefixes, nodes), sms)
        for batch, (prefixes, nodes, sms) in BATCHES.items()
    }
    assert counts == {
        "one request": [22],
        "one request, few blocks": [5],
        "one request of many rows": [10],
        "ragged": [15, 1, 1, 3],
        "too few blocks": [2, 1],
        "more requests than lanes": [1, 3] * 13,
    }


def scalars_for(slots: int, min_split_tiles: int, item_overhead_tiles: int) -> dict[str, int]:
    return {
        "work_slots": slots,
        "min_split_tiles": min_split_tiles,
        "item_overhead_tiles": item_overhead_tiles,
    }


def test_the_host_splits_equal_requests_as_the_device_does() -> None:
    for slots in range(1, 40):
        for row_tiles in range(1, 12):
            for key_tiles in range(1, 40):
                for least in (1, 2, 4):
                    scalars = scalars_for(slots, least, 3)
                    length = chosen_length(scalars, [row_tiles], [key_tiles])
                    assert equal_splits(scalars, row_tiles, key_tiles) == -(-key_tiles // length)


@given(
    requests=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40)), min_size=1, max_size=50),
    slots=st.integers(1, 400),
    tile_m=st.sampled_from([16, 32, 64]),
    tile_n=st.sampled_from([16, 32, 64]),
)
def test_there_is_a_block_for_every_item(requests: list[tuple[int, int]], slots: int, tile_m: int, tile_n: int) -> None:
    prefixes, nodes = [prefix for prefix, _ in requests], [count for _, count in requests]
    most_row_tiles = len(requests) * max(1, -(-max(nodes) * HEADS // tile_m))
    most_key_tiles = -(-(max(prefixes) + max(1, *nodes)) // tile_n)
    grid = grid_for(slots=slots, row_tiles=most_row_tiles, key_tiles=most_key_tiles, tile_n=tile_n)
    scalars = scalars_for(slots, grid.min_split_tiles, 3)
    items = dealt(scalars, tile_m, tile_n, HEADS, prefixes, nodes)
    assert len(items) <= grid.blocks
    assert sum(item.splits > 1 for item in items) <= grid.partials
    assert all(item.last_key > item.first_key for item in items)


SLOTS = 132
LONG_AND_SHORT = {
    "40 equal requests": ([4096] * 40, 1.2),
    "67 equal requests, one row tile more than slots": ([4096] * 67, 1.4),
    "one request a hundred times longer": ([64000] + [640] * 63, 1.25),
    "the long request last": ([640] * 63 + [64000], 1.25),
    "lengths spread evenly": ([256 * i for i in range(1, 65)], 1.25),
    "one request": ([65536], 1.05),
}


@pytest.mark.parametrize("name", LONG_AND_SHORT)
def test_blocks_end_together(name: str) -> None:
    """Beside a division without remainders, of items that all have the overhead once."""
    prefixes, most = LONG_AND_SHORT[name]
    tile_m, tile_n, nodes = 64, 32, [16] * len(prefixes)
    grid = grid_for(
        slots=SLOTS, row_tiles=2 * len(prefixes), key_tiles=-(-(max(prefixes) + 16) // tile_n), tile_n=tile_n
    )
    scalars = scalars_for(SLOTS, grid.min_split_tiles, 3)
    items = dealt(scalars, tile_m, tile_n, HEADS, prefixes, nodes)
    best = sum(item.tiles(tile_n) for item in items) / SLOTS + 3
    assert last_end(scalars, tile_n, items) <= most * best


# --- Rows in e4m3 ----------------------------------------------------------------------------------------------------

FP8: dict[str, Candidate] = {
    "default": SPEC.default,  # 9 steps of 16 elements: the last fetch is half one
    "two slices": {**SPEC.default, "k_split": 2, "tile_n": 32},
    "small": {**SPEC.default, "tile_m": 16, "warps": 4, "row_groups": 1, "stages": 2, "tile_n": 64, "k_split": 2}
    | {"key_split": 2, "gather": "cp_async", "refill": "eager"},
    "oracle": SPEC.oracle,
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("fields", [{}, {"latent": 256, "rope": 32, "heads": 3}], ids=["deepseek", "other"])
def test_rows_in_e4m3(name: str, fields: dict[str, int], cache_dir: Path) -> None:
    layout = {**SPEC.layout("h8_p1_e4m3"), **fields}
    candidate = FP8[name] if not fields else {**FP8[name], "k_split": 2}
    verdict = validate_in_emulator(
        render(FAMILY, candidate, layout), FAMILY, candidate, layout, SPEC.tolerances,
        toolchain=find_toolchain("emulator"), cache_dir=cache_dir, target_sms=188, resident_blocks=1, seeds=(0,),
        cases=[case for case in FAMILY.cases(layout) if case.name in ("ragged", "pool_draft", "scaled", "many_splits")],
    )  # fmt: skip
    assert verdict.ok, verdict.reason
    assert verdict.worst is not None
    assert verdict.worst.relative_l2 < 3e-3


# --- Warps that only copy --------------------------------------------------------------------------------------------

GROUP: Candidate = {**SPEC.default, "copiers": "group"}
SMALL_GROUP: Candidate = {**GROUP, "tile_m": 16, "tile_n": 16, "warps": 4, "row_groups": 1, "blocks_per_sm": 2}
COPIED: dict[str, tuple[str, Candidate]] = {
    "group, n16": ("h8_p1", GROUP),
    "group, n32, four slices alone": ("h8_p1", {**GROUP, "tile_m": 32, "tile_n": 32, "stages": 2, "row_groups": 1}),
    "group, n32, two slices": ("h8_p1_e4m3", {**GROUP, "tile_n": 32, "stages": 2, "k_split": 2}),
    "group, two parts of the keys": (
        "h8_p1_e4m3",
        {**SMALL_GROUP, "tile_n": 32, "stages": 3, "k_split": 2, "key_split": 2},
    ),
    "warp, n16, registers for two blocks": ("h8_p1", {**SMALL_GROUP, "copiers": "warp", "gather": "cp_async"}),
    "warp, n32, two slices": (
        "h8_p1_e4m3",
        {**GROUP, "copiers": "warp", "tile_m": 32, "tile_n": 32, "stages": 2, "k_split": 2, "warps": 4},
    ),
    "group, four row groups": (
        "h8_p1",
        {**GROUP, "row_groups": 4, "k_split": 2},
    ),
}


@pytest.mark.parametrize("name", COPIED)
def test_other_warps_copy_the_rows(name: str, cache_dir: Path) -> None:
    layout_name, candidate = COPIED[name]
    layout = SPEC.layout(layout_name)
    assert candidate in enumerate_space(SPEC, layout_name, SPEC.target("sm_90")).candidates
    verdict = validate_in_emulator(
        render(FAMILY, candidate, layout), FAMILY, candidate, layout, SPEC.tolerances,
        toolchain=find_toolchain("emulator"), cache_dir=cache_dir, target_sms=188, resident_blocks=1, seeds=(0,),
        cases=[case for case in FAMILY.cases(layout) if case.name in ("ragged", "pool_draft", "many_splits")],
    )  # fmt: skip
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("layout_name", ["h8_p1", "h8_p1_e4m3"])
@pytest.mark.parametrize("target_name", ["sm_90", "sm_120"])
def test_registers_that_warps_take_are_handed_on(layout_name: str, target_name: str) -> None:
    """A block's threads, at what the launch gives each, have what all take and keep: nobody waits for ever."""
    layout, target = SPEC.layout(layout_name), SPEC.target(target_name)
    taken = set()
    for candidate in enumerate_space(SPEC, layout_name, target).candidates:
        tiling = Tiling(candidate, layout)
        at_launch = target.registers_per_sm // (tiling.threads * tiling.blocks_per_sm) // 8 * 8
        if tiling.warp_registers:
            assert candidate["copiers"] == "group"
            assert tiling.warp_registers % 8 == 0
            assert at_launch < tiling.warp_registers <= 240
            assert tiling.warps * tiling.warp_registers + 4 * 24 <= (tiling.warps + 4) * at_launch
        taken.add((tiling.warps, tiling.blocks_per_sm, candidate["copiers"], tiling.warp_registers))
    assert {most for most in taken if most[2] == "group"} == {
        (4, 1, "group", 0),
        (8, 1, "group", 240),
        (4, 2, "group", 232),
    }


def test_copying_warps_that_hand_on_registers_are_a_group_of_their_own() -> None:
    """Warps 0 to 3 hand registers on together (PTX ISA, setmaxnreg): half of them cannot copy and half multiply."""
    candidate = {**SMALL_GROUP, "warps": 2, "k_split": 2, "stages": 2}
    assert Tiling({**candidate, "copiers": "all"}, LAYOUT).divides()
    assert not Tiling(candidate, LAYOUT).divides()


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_ptxas_gives_as_many_registers_as_are_handed_on(arch: str, cache_dir: Path) -> None:
    wide = {**GROUP, "tile_n": 32, "stages": 2, "row_groups": 1, "k_split": 2}
    sources = {render(FAMILY, candidate, LAYOUT): Tiling(candidate, LAYOUT) for candidate in (wide, SMALL_GROUP)}
    built = build(list(sources), arch=arch, toolchain=find_toolchain(arch), cache_dir=cache_dir, jobs=2)
    for result in built:
        assert result.status == "ok", result.reason
        tiling, flash = sources[result.source], result.resources["verify_mla_flash"]
        assert tiling.warp_registers > flash.registers
        assert tiling.threads * flash.registers >= tiling.warps * 32 * tiling.warp_registers + 4 * 32 * COPY_REGISTERS


# --- Numbers that are none -------------------------------------------------------------------------------------------

SPOILT = case_of([70, 300, 90], [2, 2, 2])


def spoilt_inputs(**columns: int) -> dict[str, Array | None]:
    """Inputs in which one prefix row of the middle request holds numbers that are none, in the columns given."""
    inputs = FAMILY.make_inputs(LAYOUT, SPOILT, 0)
    pool, indices = inputs["kv_pool"], inputs["kv_indices"]
    assert pool is not None
    assert indices is not None
    row = int(indices[70 + 150])
    for name, column in columns.items():
        pool[row, column] = {"nan": NAN, "infinity": INFINITY}[name]
    return inputs


def spoilt_outputs(name: str, inputs: dict[str, Array | None], cache_dir: Path) -> tuple[Array, Array]:
    """Out and lse by request, node and head; those of the other requests are right."""
    candidate = KERNELS[name]
    if name != "oracle":
        assert most_splits(candidate, SPOILT, sms=188)[1] >= 3
    found = run(candidate, SPOILT, plan_of(candidate, SPOILT, 188), inputs, cache_dir)
    with np.errstate(invalid="ignore"):
        reference = FAMILY.reference(LAYOUT, SPOILT, inputs)
    others = [0, 1, 4, 5]
    for output, expected in reference.items():
        array = FAMILY.as_float(output, found[output])[others]
        assert np.isfinite(array).all()
        result = compare(array, expected[others], SPEC.tolerances[output], name=name, seed=0, output=output)
        assert result.ok, result.reason
    return FAMILY.as_float("out", found["out"])[2:4], FAMILY.as_float("lse", found["lse"])[2:4]


@pytest.mark.parametrize("columns", [{"nan": 7, "infinity": 500}, {"nan": 570}], ids=["both", "nan in rope"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_nan_spoils_all_that_see_it_and_nobody_else(name: str, columns: dict[str, int], cache_dir: Path) -> None:
    out, lse = spoilt_outputs(name, spoilt_inputs(**columns), cache_dir)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("name", KERNELS)
def test_an_infinite_value_spoils_its_column_and_an_infinite_score_its_row(name: str, cache_dir: Path) -> None:
    """The score is +inf or -inf, by the sign of the query there; its weight is then no number, or 0."""
    inputs = spoilt_inputs(infinity=30)
    out, lse = spoilt_outputs(name, inputs, cache_dir)
    q = inputs["q"]
    assert q is not None
    is_positive = from_bf16(q)[2:4, :, 30] > 0
    assert is_positive.any()
    assert not is_positive.all()
    assert np.isnan(out[:, :, 30]).all()
    assert np.array_equal(np.isnan(lse), is_positive)
    assert np.array_equal(np.isnan(out[:, :, 31]), is_positive)
