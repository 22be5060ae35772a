"""The move and map kernels in the emulator, their contract under planted bugs, and calls on tensors."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.build.toolchain import find_toolchain
from kgen.errors import InputError, TensorError
from kgen.family import Candidate, Case, slice_addresses
from kgen.render import render
from kgen.resources import SPECS, TEMPLATES
from kgen.runtime import PointerTable, PreparedCall, default_pack, prepare
from kgen.space import enumerate_space
from kgen.spec import Spec, load_spec
from kgen.validate import Verdict, validate_in_emulator

TARGET = "sm_120"
MOVES, REMAP = load_spec(SPECS / "kv_defrag.yaml"), load_spec(SPECS / "slot_remap.yaml")
CASES = ("counts", "chain", "cycle", "more_than_a_block_holds")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "emulator"


def validated(
    spec: Spec,
    layout_name: str,
    changes: Candidate,
    cache_dir: Path,
    *,
    templates: Path = TEMPLATES,
    cases: tuple[str, ...] = (),
) -> Verdict:
    layout = spec.layout(layout_name)
    candidate = spec.oracle if changes == spec.oracle else {**spec.default, **changes}
    return validate_in_emulator(
        render(spec.family, candidate, layout, templates),
        spec.family,
        candidate,
        layout,
        spec.tolerances,
        toolchain=find_toolchain("emulator"),
        cache_dir=cache_dir,
        target_sms=spec.target(TARGET).sms,
        resident_blocks=1,
        cases=[case for case in spec.family.cases(layout) if not cases or case.name in cases],
        seeds=(0,),
    )


CHOICES: list[tuple[Spec, str, Candidate]] = [
    (MOVES, "mla_fp8", {}),
    (MOVES, "mla_packed", {"warps": 4, "lanes": 8}),
    (MOVES, "mla_fp8_disjoint", {"warps": 16, "lanes": 16, "vectors": 5}),
    (MOVES, "mha_bf16_disjoint", {"lanes": 32, "vectors": 9}),
    (MOVES, "mla_packed", {"algorithm": "oracle"}),
    (REMAP, "int32", {}),
    (REMAP, "int32", {"warps": 8, "vectors": 8}),
    (REMAP, "int32", {"algorithm": "filter", "warps": 16, "vectors": 4}),
    (REMAP, "int32", {"algorithm": "filter", "warps": 32}),
    (REMAP, "int32", {"algorithm": "oracle"}),
]


@pytest.mark.parametrize(("spec", "layout", "changes"), CHOICES)
def test_the_kernels_are_right(spec: Spec, layout: str, changes: Candidate, cache_dir: Path) -> None:
    verdict = validated(spec, layout, changes, cache_dir)
    assert verdict.ok, verdict.reason


def test_every_candidate_is_validated_in_one_launch_and_in_two() -> None:
    family, layout = MOVES.family, MOVES.layout("mla_bf16")
    for candidate in enumerate_space(MOVES, "mla_bf16", MOVES.target(TARGET)).candidates:
        plans = [
            family.plan(candidate, layout, family.capacity(case), sms=188, resident_blocks=1)
            for case in family.cases(layout)
        ]
        assert {tuple(launch.entry for launch in plan.launches) for plan in plans} == {
            ("kv_defrag_exact",),
            ("kv_defrag_stage", "kv_defrag_move"),
        }


def test_a_slice_of_all_rows_fits_the_registers_of_a_block() -> None:
    family, layout = MOVES.family, MOVES.layout("mla_packed")
    for rows in (1, 7, 64, 96):
        plan = family.plan(MOVES.default, layout, {"layers": 3, "rows": rows}, sms=188, resident_blocks=1)
        vectors, width = 656 // 16, plan.scalars["slice_vectors"]
        assert rows * width <= 8 * 32 * 3
        assert plan.launches[0].grid == (-(-vectors // width), 3, 1)


def test_a_filter_is_made_before_resident_blocks_share_the_parts() -> None:
    family, capacity = REMAP.family, {"requests": 256, "context": 32768, "entries": 65536, "moved_percent": 4}
    candidate: Candidate = {**REMAP.default, "algorithm": "filter", "warps": 32}
    plan = family.plan(candidate, REMAP.layout("int32"), capacity, sms=132, resident_blocks=1)
    assert [(launch.entry, launch.grid, launch.shared_bytes) for launch in plan.launches] == [
        ("slot_remap_mark", (528, 1, 1), 0),
        ("slot_remap_rewrite", (132, 1, 1), (1 << 16) + 8),
    ]
    assert plan.workspace_bytes == {"moving": 1 << 16}
    assert plan.scalars["parts"] == (256 + 4) * 4, "of 8192 tokens, or of 4096 entries that may be int64"


@pytest.mark.parametrize(("tokens", "entries", "counts_as"), [(400, 0, 1), (400, 100, 1), (400, 101, 101), (0, 3, 3)])
def test_a_list_that_is_short_beside_the_tokens_does_not_choose_the_kernel(
    tokens: int, entries: int, counts_as: int
) -> None:
    capacity = {"requests": 4, "context": 100, "entries": 200, "moved_percent": 100}
    lengths = torch.zeros(4, dtype=torch.int32) if tokens else None
    given = {"lengths": lengths, "req_to_token": torch.zeros(4, tokens // 4) if tokens else None}
    sizes = REMAP.family.binding(REMAP.layout("int32"), capacity).sizes(
        given | {"slot_list": torch.zeros(entries) if entries else None}, {}
    )
    assert sizes.point["entries"] == counts_as
    assert "moved_percent" not in sizes.point, "the hint says it, or the capacity"


@dataclass(frozen=True)
class Mutant:
    """A bug: ``old`` becomes ``new`` in a header; ``reason`` is how it is seen."""

    file: str
    old: str
    new: str
    reason: str
    changes: Candidate
    spec: Spec = MOVES


EXACT, MOVE, STAGE, PROBLEM = (f"include/kgen/kv_defrag_{name}.cuh" for name in ("exact", "move", "stage", "problem"))
REWRITE = "include/kgen/slot_remap.cuh"
FILTER: Candidate = {"algorithm": "filter", "warps": 16}
WRONG, RACE, SHARED_RACE = "relative L2 error", "race on global memory", "race on shared memory"
MUTANTS = {
    "stores do not wait for the block's loads": Mutant(EXACT, "  block_sync();\n", "", RACE, {}),
    "a slice is one column too wide": Mutant(
        EXACT, "? slice : row_vectors", "? slice + 1 : row_vectors", "kv_defrag_exact.cuh", {}
    ),
    "only the first tile of destinations is compared": Mutant(
        STAGE, "start < compared; start", "start < kTile; start", RACE, {}
    ),
    "a tile is read before all lanes have filled it": Mutant(
        STAGE, "    warp_sync();\n    KGEN_UNROLL_BY(8)", "    KGEN_UNROLL_BY(8)", SHARED_RACE, {}
    ),
    "a tile is filled before all lanes have read it": Mutant(
        STAGE, "    warp_sync();\n  }\n", "  }\n", SHARED_RACE, {"warps": 4}
    ),
    "what other warps found is forgotten": Mutant(STAGE, "w < kWarps;", "w < 1;", RACE, {}),
    "staged rows are read from the pool": Mutant(MOVE, "params.overlaps.load(listed)", "false", RACE, {}),
    "only the first layer is staged": Mutant(STAGE, "layer < params.layers;", "layer < 0;", WRONG, {}),
    "a row is written beyond its end": Mutant(
        MOVE, "if (column < row_bytes) target", "target", "global memory access outside", {}
    ),
    "a block does its first rows only": Mutant(
        MOVE, "first += params.move_blocks * kBlockRows", "first += count", WRONG, {}
    ),
    "the count is not read": Mutant(PROBLEM, "if (!params.count) return", "return", WRONG, {}),
    "slots outside the pool are moved": Mutant(
        PROBLEM, "if (!inside || source", "if (source", "global memory access outside", {}
    ),
    "what changes in the last element alone is not stored": Mutant(REWRITE, " | (a.w ^ b.w)", "", WRONG, {}, REMAP),
    "an int64 is its lower half": Mutant(REWRITE, "v.y == 0 ? remap", "true ? remap", WRONG, {}, REMAP),
    "a bit is about its first slot alone": Mutant(
        REWRITE, "neighbour < 1 << shift", "neighbour < 1", WRONG, FILTER, REMAP
    ),
    "the filter is read before it is there": Mutant(
        REWRITE, "  mbarrier_wait(filled, 0);\n", "", "shared", FILTER, REMAP
    ),
    "a block does its first part only": Mutant(
        REWRITE, "index += params.blocks", "index += params.parts", WRONG, FILTER, REMAP
    ),
    "the next part is forgotten": Mutant(REWRITE, "values[k] = next[k]", "values[k] = values[k]", WRONG, FILTER, REMAP),
}  # fmt: skip
MUTANT_CASES = {
    "the count is not read": ("counts",),
    "slots outside the pool are moved": ("outside",),
    "a block does its first rows only": ("more_than_a_block_holds",),
    "only the first layer is staged": ("more_than_a_block_holds",),
    "what changes in the last element alone is not stored": ("ragged",),
    "an int64 is its lower half": ("wide",),
    "a bit is about its first slot alone": ("neighbours_share_a_bit",),
    "the filter is read before it is there": ("few_move",),
    "a block does its first part only": ("long",),
    "the next part is forgotten": ("long",),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path, cache_dir: Path) -> None:
    mutant = MUTANTS[name]
    templates = tmp_path / "templates"
    shutil.copytree(TEMPLATES, templates)
    text = (templates / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (templates / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    cases = MUTANT_CASES.get(name, CASES)
    layout = "mla_fp8" if mutant.spec is MOVES else "int32"
    verdict = validated(mutant.spec, layout, mutant.changes, cache_dir, templates=templates, cases=cases)
    assert not verdict.ok
    assert mutant.reason in verdict.reason, verdict.reason


LAYERS, SLOTS = 3, 40


@pytest.fixture(scope="module")
def move(cache_dir: Path) -> PreparedCall:
    """Up to 30 moves of any overlap, without a look at the contents."""
    return prepare_move("mla_fp8", cache_dir, checked=False)


@pytest.fixture(scope="module")
def checked(cache_dir: Path) -> dict[str, PreparedCall]:
    return {name: prepare_move(name, cache_dir, checked=True) for name in ("mla_fp8", "mla_fp8_disjoint")}


def prepare_move(layout: str, cache_dir: Path, *, checked: bool) -> PreparedCall:
    return prepare(
        default_pack("kv_defrag"),
        family="kv_defrag",
        layout=layout,
        capacity={"layers": LAYERS, "rows": 30},
        device="cpu",
        checked=checked,
        cache_dir=cache_dir,
    )


def make_pool(columns: int = 576) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (SLOTS, 1, columns)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(LAYERS)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_moves_are_simultaneous(move: PreparedCall, data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1, max_size=30))
    source = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=len(target), max_size=len(target)))
    count = data.draw(st.integers(0, len(target)))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    pool = make_pool()
    expected = [layer.clone() for layer in pool]
    for layer, before in zip(expected, pool, strict=True):
        layer[target[:count]] = before[source[:count]]
    move(
        layer_ptrs=PointerTable(pool),
        src_slots=torch.tensor(source, dtype=dtype),
        dst_slots=torch.tensor(target),
        count=torch.tensor([count], dtype=torch.int32),
    )
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(pool, expected, strict=True))


def test_calls_share_no_schedule(move: PreparedCall) -> None:
    tensors: dict[str, Any] = {"layer_ptrs": PointerTable(make_pool()), "src_slots": at(1), "dst_slots": at(2)}
    with pytest.raises(InputError, match=r"^schedule: is no argument of this call, 'make'; leave it out$"):
        move(**tensors, count=torch.tensor([1], dtype=torch.int32), schedule="make")


def at(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


BAD_CALLS = [
    ({"dst_slots": at(5, 5)}, "dst_slots: has a destination twice, slot 5"),
    ({"src_slots": at(1, 40)}, "src_slots: points outside the pool, slot 40 of 40"),
    ({"dst_slots": at(-1, 6)}, "dst_slots: points outside the pool, slot -1 of 40"),
    ({"dst_slots": at(5)}, r"dst_slots: must have shape \[2\]"),
    ({"src_slots": at(1, 2).float()}, "src_slots: must have dtype int32 or int64"),
    ({"src_slots": torch.arange(31)}, "src_slots: has too many moves, 31, prepared for 30"),
    ({"count": torch.tensor([3], dtype=torch.int32)}, "count: is beyond the slot lists, 3 of 2"),
    ({"layer_ptrs": None}, "layer_ptrs: is no PointerTable, NoneType"),
    ({"layer_ptrs": make_pool(592)}, "layer_ptrs: must have rows of 576 bytes, .* 592 bytes"),
    ({"layer_ptrs": [*make_pool(), *make_pool()]}, "layer_ptrs: has too many layers, 6, prepared for 3"),
    ({"dst_slots": at(2, 6)}, "disjoint: dst_slots: overwrites a source of a disjoint move, slot 2"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_CALLS)
def test_a_wrong_call_is_refused_by_name_and_writes_nothing(
    checked: dict[str, PreparedCall], change: dict[str, Any], reason: str
) -> None:
    layout, reason = ("mla_fp8_disjoint", reason[10:]) if reason.startswith("disjoint: ") else ("mla_fp8", reason)
    pool = make_pool()
    before = [layer.clone() for layer in pool]
    arguments: dict[str, Any] = {"layer_ptrs": pool, "src_slots": at(1, 2), "dst_slots": at(5, 6)} | change
    if isinstance(arguments["layer_ptrs"], list):
        arguments["layer_ptrs"] = PointerTable(arguments["layer_ptrs"])
    with pytest.raises(TensorError, match=reason):
        checked[layout](**arguments)
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(pool, before, strict=True))


def test_padding_onto_itself_is_no_double_destination(checked: dict[str, PreparedCall]) -> None:
    pool = make_pool()
    row = pool[1][7].clone()
    checked["mla_fp8"](layer_ptrs=PointerTable(pool), src_slots=at(7, 0, 0), dst_slots=at(3, 0, 0))
    assert torch.equal(pool[1][3], row)
    checked["mla_fp8"](layer_ptrs=PointerTable(pool), src_slots=at(0, 7, 0), dst_slots=at(0, 0, 0))
    assert torch.equal(pool[1][0], row), "what stays is nothing to do, so that its slot can be a destination"


def test_the_reference_leaves_out_a_row_that_stays() -> None:
    pool = np.arange(6, dtype=np.uint32).reshape(1, 3, 2)
    inputs = {"pool": pool, "src_slots": np.array([2, 1]), "dst_slots": np.array([1, 1])}
    found = MOVES.family.reference({"row_bytes": 8, "moves": "any"}, Case("twice", {"counts": [2]}), inputs)
    assert found["pool"][0].tolist() == [[0, 1], [4, 5], [4, 5]]


def test_lists_in_the_pool_are_refused(move: PreparedCall) -> None:
    pool = make_pool()
    inside = pool[2].view(-1)[:16].view(torch.int64)
    with pytest.raises(TensorError, match=r"src_slots: shares memory with layer_ptrs\[2\]"):
        move(layer_ptrs=PointerTable(pool), src_slots=inside, dst_slots=at(5, 6))


def rows_of(offset: int, *, columns: int = 576, rows: int = SLOTS) -> torch.Tensor:
    """uint8 [rows, columns] that starts ``offset`` bytes after an aligned address."""
    raw = torch.zeros(rows * columns + 64, dtype=torch.uint8)
    first = -raw.data_ptr() % 16 + offset
    return raw[first : first + rows * columns].view(rows, columns)


SHARED = torch.zeros(2 * SLOTS, 576, dtype=torch.uint8)
BAD_TABLES: list[tuple[list[Any], str]] = [
    ([], "layer_ptrs: has no tensors"),
    ([np.zeros((4, 16), np.uint8)], r"layer_ptrs\[0\]: is no torch tensor, ndarray"),
    ([rows_of(8)], r"layer_ptrs\[0\]: is not aligned to 16 bytes"),
    ([torch.zeros(4, 24, dtype=torch.uint8)], r"layer_ptrs\[0\]: must have rows of a multiple of 16 bytes, 24 bytes"),
    ([torch.zeros(4, 32, dtype=torch.uint8).t()], r"layer_ptrs\[0\]: must have contiguous rows"),
    ([rows_of(0), rows_of(0, rows=SLOTS - 1)], r"layer_ptrs\[1\]: differs from the first layer"),
    ([SHARED[:SLOTS], SHARED[1 : SLOTS + 1]], r"layer_ptrs\[1\]: shares memory with layer_ptrs\[0\]"),
    ([torch.zeros(0, 16)], r"layer_ptrs\[0\]: must have rows, has shape \[0, 16\]"),
]


@pytest.mark.parametrize(("tensors", "reason"), BAD_TABLES)
def test_a_wrong_table_is_refused_by_name(tensors: list[Any], reason: str) -> None:
    with pytest.raises(TensorError, match=reason):
        PointerTable(tensors)


def test_a_table_takes_the_caller_s_own_pointers() -> None:
    pool = make_pool()
    addresses = torch.tensor([layer.data_ptr() for layer in pool])
    assert PointerTable(pool, pointers=addresses).pointers is addresses
    unsigned = addresses.view(torch.uint64)
    assert PointerTable(pool, pointers=unsigned).pointers is unsigned
    with pytest.raises(TensorError, match="layer_ptrs: does not hold the addresses of the tensors"):
        PointerTable(pool, pointers=addresses + 16)
    with pytest.raises(TensorError, match=r"layer_ptrs: must have pointers of dtype uint64 on cpu, torch\.int32"):
        PointerTable(pool, pointers=addresses.int())
    keys_and_values = torch.stack([addresses, addresses + 16], dim=1)
    with pytest.raises(TensorError, match=r"layer_ptrs: must have contiguous pointers, has strides \[2\]"):
        PointerTable(pool, pointers=keys_and_values[:, 0])


def test_rows_apart_keep_what_lies_between(move: PreparedCall) -> None:
    wide = make_pool(640)
    before = [layer.clone() for layer in wide]
    move(layer_ptrs=PointerTable([layer[:, :, :576] for layer in wide]), src_slots=at(1), dst_slots=at(2))
    for layer, old in zip(wide, before, strict=True):
        old[2, :, :576] = old[1, :, :576]
        assert torch.equal(layer, old)


@pytest.fixture(scope="module")
def rewrite(cache_dir: Path) -> PreparedCall:
    return prepare(
        default_pack("slot_remap"),
        family="slot_remap",
        layout="int32",
        capacity={"requests": 4, "context": 70, "entries": 100, "moved_percent": 100},
        device="cpu",
        checked=True,
        cache_dir=cache_dir,
    )


def test_maps_and_lists_follow(rewrite: PreparedCall) -> None:
    slot_map = torch.arange(20, dtype=torch.int32).flip(0).contiguous()
    tokens = torch.arange(3 * 67, dtype=torch.int32).reshape(3, 67) % 20
    lengths, listed = at(0, 67, 5), torch.tensor([3, -1, 19, 20])
    expected = tokens.clone()
    expected[1] = 19 - tokens[1]
    expected[2, :5] = 19 - tokens[2, :5]
    rewrite(slot_map=slot_map, lengths=lengths, req_to_token=tokens, slot_list=listed)
    assert torch.equal(tokens, expected)
    assert listed.tolist() == [16, -1, 0, 20], "what is no slot stays"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slot_map": torch.full((20,), 20, dtype=torch.int32)}, "slot_map: points outside the pool"),
        ({"lengths": at(71, 1)}, "lengths: are not those of rows, 1 to 71 for rows of 70"),
        ({"lengths": None}, "lengths: goes with req_to_token"),
        ({"lengths": at(1)}, r"lengths: must have shape \[2\]"),
        ({"slot_list": torch.zeros(101, dtype=torch.int64)}, "slot_list: has too many entries, 101, prepared for 100"),
    ],
)
def test_a_wrong_rewrite_is_refused_by_name(rewrite: PreparedCall, change: dict[str, Any], reason: str) -> None:
    tokens = torch.zeros(2, 70, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "slot_map": torch.ones(20, dtype=torch.int32),
        "lengths": at(3, 70),
        "req_to_token": tokens,
    } | change
    with pytest.raises(TensorError, match=reason):
        rewrite(**arguments)
    assert not tokens.any()


@pytest.mark.parametrize("axis", ["context", "entries"])
def test_a_rewrite_that_kernels_cannot_count_is_refused(axis: str) -> None:
    capacity = {"requests": 1, "context": 1 << 29, "entries": 1 << 29, "moved_percent": 100}
    REMAP.family.binding(REMAP.layout("int32"), capacity)
    for candidate in enumerate_space(REMAP, "int32", REMAP.target(TARGET)).candidates:
        plan = REMAP.family.plan(candidate, REMAP.layout("int32"), capacity, sms=188, resident_blocks=2)
        last = (plan.scalars["parts"] - plan.scalars["row_parts"] + plan.scalars["blocks"] + 1) * 4
        assert last * int(candidate["warps"]) * 32 * int(candidate["vectors"]) < 1 << 31
    with pytest.raises(InputError, match=rf"^capacity: has more {axis} than 536870912, 536870913$"):
        REMAP.family.binding(REMAP.layout("int32"), capacity | {axis: (1 << 29) + 1})


LAYOUT_PROBLEMS: list[tuple[Spec, Candidate, str]] = [
    (MOVES, {"row_bytes": 1150, "moves": "any"}, "row_bytes"),
    (MOVES, {"row_bytes": 1152, "moves": "some"}, "moves"),
    (MOVES, {"moves": "any"}, "row_bytes"),
    (REMAP, {"map": "int64"}, "map"),
]


@pytest.mark.parametrize(("spec", "layout", "field"), LAYOUT_PROBLEMS)
def test_a_layout_without_a_kernel_is_refused(spec: Spec, layout: Candidate, field: str) -> None:
    problem = spec.family.layout_problem(layout)
    assert problem is not None
    assert problem[0] == field


def test_a_table_holds_one_address_a_slice() -> None:
    assert slice_addresses(4096, np.zeros((3, 5, 2), np.uint16)).tolist() == [4096, 4116, 4136]


@pytest.mark.parametrize("lanes", [24, 513, 1 << 31])
def test_lanes_that_no_block_can_have_are_refused(lanes: int) -> None:
    candidate, layout = {**MOVES.default, "lanes": lanes}, MOVES.layout("mla_bf16_disjoint")
    assert MOVES.family.violation(MOVES.default, layout, MOVES.target("sm_120")) is None
    assert MOVES.family.violation(candidate, layout, MOVES.target("sm_120")) == "a block has whole rows"
