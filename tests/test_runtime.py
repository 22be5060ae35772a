"""Calls on torch tensors: right on the CPU through the emulator, refused by name when a tensor is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_packs import shipped_spec, sources_only_pack, tensors_of

from kgen.emulator import EmulatorFault
from kgen.errors import (
    DeviceError,
    ForeignArchError,
    InputError,
    KgenError,
    LayoutMissingError,
    PackError,
    TensorError,
)
from kgen.families.verify_mla_problem import pack_mask
from kgen.family import Case
from kgen.runtime import PreparedCall, mask_words, pack_tree_mask, prepare
from kgen.runtime.backends import EMULATED_SMS
from kgen.runtime.launch import plan_levels
from kgen.runtime.pack_reader import Pack
from kgen.spec import Spec
from kgen.validate import compare

CAPACITY = {"batch": 40, "nodes": 65, "prefix": 1040}
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def spec() -> Spec:
    return shipped_spec()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "emulator"


@pytest.fixture(scope="module")
def pack(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sources_only_pack(spec, tmp_path_factory.mktemp("db"))


@pytest.fixture(scope="module")
def call(pack: Pack, cache_dir: Path) -> PreparedCall:
    return prepare(
        pack, family="verify_mla", layout="h8_p1", capacity=CAPACITY, device="cpu", checked=True, cache_dir=cache_dir
    )


CASES = {case.name: case for case in shipped_spec().family.cases(shipped_spec().layout("h8_p1"))}


def check(spec: Spec, call: PreparedCall, case: Case, change: Change = lambda tensors: None, **options: Any) -> None:
    """Run a case and compare every output with the float64 reference."""
    layout = spec.layout("h8_p1")
    inputs = spec.family.make_inputs(layout, case, 3)
    outputs = spec.family.output_arrays(layout, case, inputs)
    tensors = tensors_of(inputs | outputs)
    change(tensors)
    call(**tensors, kv_scale=case.options.get("kv_scale"), **options)
    reference = spec.family.reference(layout, case, inputs)
    for name, array in outputs.items():
        if array is not None:
            found = spec.family.as_float(name, array)
            result = compare(found, reference[name], spec.tolerances[name], name=case.name, seed=3, output=name)
            assert result.ok, result.reason


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_right_with_the_default_variant(spec: Spec, call: PreparedCall, name: str) -> None:
    check(spec, call, CASES[name], hint={"prefix": 1})
    assert call.last.how == "default"


@pytest.mark.parametrize("name", ["ragged", "pool_draft", "many_nodes"])
def test_every_case_is_right_with_the_winner(spec: Spec, call: PreparedCall, name: str) -> None:
    check(spec, call, CASES[name], hint={"prefix": 256})
    assert call.last.how in ("exact", "bucket")
    assert call.last.variant.startswith("flash_m16_")


def test_the_hint_changes_the_variant_and_never_the_result(spec: Spec, call: PreparedCall) -> None:
    for prefix in (0, 256, 10**9):
        check(spec, call, CASES["page_tail"], hint={"prefix": prefix})


def test_a_hint_beyond_the_capacity_is_the_capacity(spec: Spec, call: PreparedCall) -> None:
    for hint in ({"prefix": 10**9}, {"prefix": 1, "batch": 10**6}, {"nodes": 10**6}):
        check(spec, call, CASES["page_tail"], hint=hint)
        assert call.explain({"prefix": 10**9}).match == call.explain({}).match
    with pytest.raises(InputError, match=r"^hint: names no workload axis, \{'prefx': 1\}; batch, nodes, prefix$"):
        check(spec, call, CASES["page_tail"], hint={"prefx": 1})


def test_pool_rows_may_be_apart_and_have_a_middle_dimension(spec: Spec, call: PreparedCall) -> None:
    def spread(tensors: dict[str, Any]) -> None:
        rows = tensors["kv_pool"].shape[0]
        wide = torch.full((rows, 1, 640), float("nan"), dtype=torch.bfloat16)
        wide[:, :, :576] = tensors["kv_pool"][:, None]
        tensors["kv_pool"] = wide[:, :, :576]
        tensors["draft_kv"] = tensors["draft_kv"][:, None]

    check(spec, call, CASES["ragged"], spread)


@pytest.mark.parametrize("hint", [1, 256])
def test_a_small_batch_after_a_large_one_is_right(spec: Spec, call: PreparedCall, hint: int) -> None:
    """What the large one left in the workspace speaks of split rows that the small one does not have."""
    (place,) = [region.address for region in call._workspace if region.name == "merges"]
    (memory,) = [memory for memory in call._memory if memory.data_ptr() == place]
    merges = memory.view(torch.int32).view(-1, 4)
    merges.zero_()
    for nodes in (3, 1):
        case = Case("long", {"prefixes": [900], "nodes": [nodes], "lse": True})
        check(spec, call, case, hint={"prefix": hint})
        assert (merges[: 3 * 8, 2] > 1).all(), "the rows of three nodes are split"
        assert (merges[3 * 8 :] == 0).all()


def test_indices_may_be_longer_than_needed(spec: Spec, call: PreparedCall) -> None:
    def lengthen(tensors: dict[str, Any]) -> None:
        tensors["kv_indices"] = torch.cat([tensors["kv_indices"], torch.full((9,), 1 << 30)])

    check(spec, call, CASES["chain"], lengthen)


def test_the_scale_can_be_given(spec: Spec, call: PreparedCall) -> None:
    check(spec, call, CASES["chain"], scale=192**-0.5)
    with pytest.raises(AssertionError, match="relative L2 error"):
        check(spec, call, CASES["chain"], scale=576**-0.5)


def test_a_promise_of_fewer_nodes_shrinks_the_grid(
    spec: Spec, call: PreparedCall, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, tiles = [], []
    run = call._backend.run

    def spy(source: str, launches: Any, regions: Any) -> None:
        grids.append(launches[0].grid)
        run(source, launches, regions)

    monkeypatch.setattr(call._backend, "run", spy)
    for nodes, promise in ((32, None), (1, 1)):  # as many nodes as the mask has bits for, and one
        check(spec, call, CASES["one_node"], nodes=promise, hint={"prefix": 256})
        tiles.append(-(-nodes * 8 // int(pack.manifest.variants[call.last.variant].candidate["tile_m"])))
    short = [3 * min(count, EMULATED_SMS) for count in tiles]  # items beside those that run at once
    assert [grid[0] for grid in grids] == [
        EMULATED_SMS + more + count for more, count in zip(short, tiles, strict=True)
    ]
    assert tiles[0] > EMULATED_SMS >= tiles[1]


def test_an_empty_call_launches_nothing(call: PreparedCall, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call._backend, "run", lambda *_: pytest.fail("launched"))
    case = Case("empty", {"prefixes": [3, 0], "nodes": [0, 0], "lse": False})
    inputs = spec.family.make_inputs(spec.layout("h8_p1"), case, 0)
    outputs = spec.family.output_arrays(spec.layout("h8_p1"), case, inputs)
    call(**tensors_of(inputs | outputs))


def test_nothing_is_allocated_or_loaded_after_prepare(
    spec: Spec, call: PreparedCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    monkeypatch.setattr(type(call._backend), "load", lambda *_: pytest.fail("loaded"))
    check(spec, call, CASES["ragged"], hint={"prefix": 256})


def test_all_plans_fit_the_workspace(spec: Spec, call: PreparedCall, pack: Pack) -> None:
    room = {region.name: region.size_bytes for region in (*call._workspace, *call._shared.regions)}
    assert room
    layout = spec.layout("h8_p1")
    for name in {str(key[0]) for key in call._plans}:
        candidate = pack.manifest.variants[name].candidate
        for batch in range(1, CAPACITY["batch"] + 1):
            for nodes in plan_levels(CAPACITY["nodes"]):
                extents = {**CAPACITY, "batch": batch, "nodes": nodes}
                plan = spec.family.plan(candidate, layout, extents, sms=call._backend.sms, resident_blocks=1)
                assert all(size <= room[buffer] for buffer, size in plan.workspace_bytes.items())
                assert batch * nodes * 8 * 16 <= room["merges"], "which a kernel writes that has no combine, too"


@given(st.integers(1, 5000), st.data())
def test_plan_levels_cover_every_extent_without_much_waste(capacity: int, data: st.DataObject) -> None:
    levels = plan_levels(capacity)
    extent = data.draw(st.integers(1, capacity))
    level = min(level for level in levels if level >= extent)
    assert level <= extent * 1.5
    assert levels[-1] == capacity
    assert len(levels) <= 32


def good_tensors(spec: Spec) -> dict[str, Any]:
    layout, case = spec.layout("h8_p1"), Case("two", {"prefixes": [5, 7], "nodes": [2, 3], "lse": True})
    inputs = spec.family.make_inputs(layout, case, 0)
    return tensors_of(inputs | spec.family.output_arrays(layout, case, inputs))


def swap(name: str, make: Callable[[Any], Any]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved


def odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape[0], 577, dtype=tensor.dtype)[:, :576]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", swap("q", lambda t: t.float()), "must have dtype bfloat16, torch.float32"),
        ("q", swap("q", lambda t: t[:, :4]), r"must have shape \[5, 8, 576\], has \[5, 4, 576\]"),
        ("q", swap("q", lambda t: t.view(5, -1)), r"must have shape \[5, 8, 576\], has \[5, 4608\]"),
        ("q", swap("q", lambda t: torch.cat([t, t], 1)[:, ::2]), "must be contiguous, has strides"),
        ("q", swap("q", unaligned), "is not aligned to 16 bytes"),
        ("q", swap("q", lambda t: [1.0]), "is not a torch tensor"),
        ("q", swap("q", lambda t: t.to("meta")), "must be on cpu, which the call was prepared for, is on meta"),
        ("q", swap("q", lambda t: t.repeat(40, 1, 1)), "has too many tokens, 200 for 2 requests of at most 3 nodes"),
        ("kv_pool", swap("kv_pool", lambda t: t.t().contiguous().t()), "must have contiguous rows"),
        ("kv_pool", swap("kv_pool", odd_rows), "is not aligned to 16 bytes, address 0x[0-9a-f]+, 1154 bytes"),
        ("kv_pool", swap("kv_pool", lambda t: t[:, :512]), "must have shape"),
        ("kv_pool", swap("kv_pool", lambda t: None), "is missing"),
        ("kv_indices", swap("kv_indices", lambda t: t.short()), "must have dtype int32 or int64, torch.int16"),
        ("kv_indptr", swap("kv_indptr", lambda t: t.float()), "must have dtype int32 or int64"),
        ("kv_indptr", swap("kv_indptr", lambda t: t.repeat(15)), "44 requests, prepared for 40"),
        ("qo_indptr", swap("qo_indptr", lambda t: t[:2]), r"must have shape \[3\], has \[2\]"),
        ("draft_kv", swap("draft_slots", lambda t: torch.zeros(5, dtype=torch.int64)), "it or draft_slots, both"),
        ("draft_kv", swap("draft_kv", lambda t: None), "give either it or draft_slots, neither"),
        ("draft_kv", swap("draft_kv", lambda t: t[:4]), r"must have shape \[5, 1\?, 576\]"),
        ("tree_mask", swap("tree_mask", lambda t: t.bool()), "must have dtype int32, torch.bool"),
        ("tree_mask", lambda tensors: tensors.update(nodes=33), "has too few words, 32 bits for 33 nodes"),
        ("tree_mask", swap("tree_mask", lambda t: t[:, 0]), r"must have shape \[5, words\], has \[5\]"),
        ("out", swap("out", lambda t: t[:, :, :256]), r"must have shape \[5, 8, 512\]"),
        ("out", lambda tensors: tensors.update(out=tensors["q"][:, :, :512]), "must be contiguous"),
        ("lse", swap("lse", lambda t: t.double()), "must have dtype float32"),
        ("nodes", lambda tensors: tensors.update(nodes=66), "is beyond the capacity, 66, prepared for 65"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused_by_name(
    spec: Spec, call: PreparedCall, name: str, change: Change, says: str
) -> None:
    tensors = good_tensors(spec) | {"nodes": 3}
    change(tensors)
    with pytest.raises(TensorError, match=says) as error:
        call(**tensors)
    assert error.value.where == name


def test_an_output_must_not_share_memory(spec: Spec, call: PreparedCall) -> None:
    tensors = good_tensors(spec)
    memory = torch.zeros(5 * 8 * (576 + 512), dtype=torch.bfloat16)
    tensors["q"] = memory[: 5 * 8 * 576].view(5, 8, 576)
    tensors["out"] = memory[5 * 8 * 576 - 8 :][: 5 * 8 * 512].view(5, 8, 512)
    with pytest.raises(TensorError, match="out: shares memory with q"):
        call(**tensors, nodes=3)
    tensors["out"] = memory[5 * 8 * 576 :].view(5, 8, 512)
    call(**tensors, nodes=3)


@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("kv_indices", 3, -1, "points outside kv_pool, -1 for"),
        ("kv_indices", 11, 1 << 20, "points outside kv_pool, 1048576 for"),
        ("kv_indptr", 0, 1, "must start at 0 and never fall"),
        ("kv_indptr", 1, 13, "must start at 0 and never fall"),
        ("kv_indptr", 2, 20, "ends beyond kv_indices, 20, but kv_indices has 12 entries"),
        ("kv_indptr", 2, 1100, "has a request longer than 1040, 1095"),
        ("qo_indptr", 2, 6, "has a request longer than 3, 4"),
        ("qo_indptr", 2, 4, "must end at the number of tokens, 4 instead of 5"),
    ],
)
def test_checked_mode_looks_at_the_content(
    spec: Spec, call: PreparedCall, name: str, place: int, value: int, says: str
) -> None:
    tensors = good_tensors(spec)
    tensors[name][place] = value
    with pytest.raises(TensorError, match=says) as error:
        call(**tensors, nodes=3)
    assert error.value.where == name


def test_an_unknown_argument_is_refused(spec: Spec, call: PreparedCall) -> None:
    with pytest.raises(InputError, match="custom_mask: is no argument of this call; it takes q, kv_pool"):
        call(**good_tensors(spec), custom_mask=None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nodes": 2.5}, "nodes: must be a whole number, 2.5"),
        ({"scale": "a"}, "scale: must be a finite float32, 'a'"),
        ({"scale": float("nan")}, "scale: must be a finite float32, nan"),
        ({"kv_scale": 1e39}, "kv_scale: must be a finite float32, 1e+39"),
        ({"scale": 1e20, "kv_scale": 1e20}, "scale: is too large for a float32 with kv_scale, 1e+20 x 1e+20"),
        ({"hint": {"prefix": "x"}}, "hint prefix: must be a whole number, not negative, 'x'"),
        ({"hint": {"prefix": -5}}, "hint prefix: must be a whole number, not negative, -5"),
    ],
)
def test_a_wrong_option_is_refused_by_name(spec: Spec, call: PreparedCall, options: dict[str, Any], says: str) -> None:
    with pytest.raises(KgenError, match=f"^{re.escape(says)}"):
        call(**good_tensors(spec), **options)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"layout": {"heads": 9}}, LayoutMissingError, "no head layout"),
        ({"family": "kv_defrag"}, PackError, "is no pack of kv_defrag, it holds verify_mla"),
        ({"capacity": {"batch": 1, "nodes": 1}}, InputError, "capacity: does not fit the family.*batch, nodes, prefix"),
        ({"capacity": {"batch": "1", "nodes": 1, "prefix": 1}}, InputError, "capacity: does not fit the family"),
        ({"capacity": [1, 1, 1]}, InputError, "capacity: does not fit the family"),
        ({"device": "foo"}, InputError, "device: is none that torch knows, 'foo'.*use cpu, cuda or cuda:N"),
        ({"device": None}, InputError, "device: is none that torch knows, None"),
        ({"device": "cuda"}, DeviceError, "cuda: is not there for torch, torch 2.*install a CUDA build, or use cpu"),
        ({"capacity": {"batch": 0, "nodes": 1, "prefix": 1}}, InputError, "positive whole number"),
        ({"device": "meta"}, InputError, "device: must be cpu or cuda, meta"),
        ({"target": "sm_100"}, ForeignArchError, "no such target, 'sm_100'; it has sm_120"),
    ],
)
def test_prepare_refuses_by_name(
    pack: Pack, cache_dir: Path, change: dict[str, Any], kind: type[Exception], says: str
) -> None:
    arguments: dict[str, Any] = {"family": "verify_mla", "layout": "h8_p1", "capacity": CAPACITY, "device": "cpu"}
    with pytest.raises(kind, match=says):
        prepare(pack, **(arguments | change), cache_dir=cache_dir)


def test_a_call_explains_itself(call: PreparedCall) -> None:
    explanation = call.explain({"batch": 4, "nodes": 16, "prefix": 300})
    assert (explanation.match.how, explanation.target, explanation.layout) == ("bucket", "sm_120", "h8_p1")


@given(st.integers(1, 70), st.integers(0, 2), st.integers(0, 1 << 30))
def test_masks_are_packed_like_the_reference(nodes: int, spare: int, seed: int) -> None:
    visible = np.random.default_rng(seed).random((nodes, nodes)) < 0.5
    words = mask_words(nodes) + spare
    expected = pack_mask(visible, words).view(np.int32)
    for form in (torch.from_numpy(visible), torch.from_numpy(visible.astype(np.uint8) * 7)):
        assert np.array_equal(pack_tree_mask(form, words).numpy(), expected)
    batched = pack_tree_mask(torch.from_numpy(visible)[None])
    assert batched.shape == (1, nodes, mask_words(nodes))


def test_mask_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(TensorError, match="words: is too few for 65 nodes, 2"):
        pack_tree_mask(torch.ones(65, 65, dtype=torch.bool), 2)
    with pytest.raises(TensorError, match="visible: must have shape"):
        pack_tree_mask(torch.ones(65, dtype=torch.bool))


def test_the_emulator_stops_a_call_that_reads_past_a_tensor(spec: Spec, pack: Pack, cache_dir: Path) -> None:
    unchecked = prepare(pack, family="verify_mla", layout="h8_p1", capacity=CAPACITY, device="cpu", cache_dir=cache_dir)
    tensors = good_tensors(spec)
    tensors["kv_indices"][3] = 1 << 20
    with pytest.raises(EmulatorFault, match="global memory access outside every buffer"):
        unchecked(**tensors, nodes=3)
