"""Dispatch: which tuned point speaks for a call, which target for a device, and what a miss is called."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import GRID, LAYOUT, invented_pack, table

from kgen.errors import ForeignArchError, LayoutMissingError
from kgen.runtime.dispatch import MEMO_ENTRIES, REACH, Dispatcher, Table, runs_on
from kgen.runtime.manifest import PackedLayout, PackedTarget

axis_values = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5, unique=True).map(lambda v: tuple(sorted(v)))
grids = st.fixed_dictionaries({"batch": axis_values, "nodes": axis_values, "prefix": axis_values})


def make(packed: PackedLayout | None = None) -> Table:
    return Table("sm_120", "sm_120", "h8_p1", packed or table())


@given(grids)
def test_every_tuned_point_is_exact_and_answers_its_winner(grid: dict[str, tuple[int, ...]]) -> None:
    packed = table(grid)
    made = make(packed)
    for bucket in packed.buckets:
        match = made.lookup(bucket.point)
        assert (match.how, match.variant, match.point) == ("exact", bucket.variant, bucket.point)


@given(grids, st.tuples(*[st.integers(0, 1 << 22)] * 3))
def test_each_axis_goes_to_the_nearest_tuned_value(grid: dict[str, tuple[int, ...]], asked: tuple[int, ...]) -> None:
    made = make(table(grid))
    tuned = [axis.tuned for axis in made.explain(dict(zip(grid, asked, strict=True))).axes]
    for value, found, values in zip(asked, tuned, grid.values(), strict=True):
        assert found == nearest(value, values)


def nearest(value: int, values: tuple[int, ...]) -> int:
    """The rule in whole numbers: a is at least as near as b, for a > b, if value^2 >= a b."""
    best = values[0]
    for other in values[1:]:
        if value and value * value >= best * other:
            best = other
    return best


@given(grids, st.tuples(*[st.integers(0, 1 << 22)] * 3), st.integers(0, 2))
def test_a_larger_value_never_gets_a_smaller_tuned_one(
    grid: dict[str, tuple[int, ...]], asked: tuple[int, ...], axis: int
) -> None:
    made = make(table(grid))
    larger = tuple(value * 2 + 1 if i == axis else value for i, value in enumerate(asked))
    before, after = (made.explain(dict(zip(grid, values, strict=True))).axes[axis].tuned for values in (asked, larger))
    assert before is not None
    assert after is not None
    assert before <= after


@pytest.mark.parametrize(
    ("asked", "how", "point", "reason"),
    [
        ((4, 8, 4096), "exact", (4, 8, 4096), ""),
        ((2, 8, 4096), "bucket", (4, 8, 4096), ""),  # halfway between 1 and 4 goes up
        ((5, 10, 5000), "bucket", (4, 8, 4096), ""),
        ((64, 256, 4 * 65536), "bucket", (16, 64, 65536), ""),  # at the end of its reach
        ((65, 64, 65536), "default", (), "batch"),
        ((16, 257, 65536), "default", (), "nodes"),
        ((16, 64, 1023), "default", (), "prefix"),
        ((16, 64, 1024), "bucket", (16, 64, 4096), ""),
        ((16, 64, 0), "default", (), "prefix"),
    ],
)
def test_reach(asked: tuple[int, ...], how: str, point: tuple[int, ...], reason: str) -> None:
    match = make().match(asked)
    assert (match.how, tuple(match.point.values()), match.reason) == (how, point, reason)
    if how == "default":
        assert (match.variant, match.evidence) == ("default", "")


def test_a_table_without_points_runs_the_default() -> None:
    match = make(table(dict.fromkeys(GRID, ()))).match((1, 1, 1))
    assert (match.variant, match.how, match.reason) == ("default", "default", "untuned")


def test_a_missing_point_is_spoken_for_by_its_nearest_neighbour() -> None:
    packed = table({"batch": (1, 2), "nodes": (1, 8), "prefix": (4096,)}, leave_out=[(2, 8, 4096)])
    made = make(packed)
    match = made.match((2, 8, 4096))
    assert (match.how, dict(match.point)) == ("bucket", {"batch": 1, "nodes": 8, "prefix": 4096})
    far = make(table({"batch": (1, 16), "nodes": (1, 32), "prefix": (4096,)}, leave_out=[(16, 32, 4096)]))
    assert far.match((16, 32, 4096)).how == "default"  # every neighbour is out of reach


def test_reachable_is_all_that_calls_within_the_capacity_get() -> None:
    made = make(table(winners=("fast", "wide", "oracle")))
    capacity = {"batch": 3, "nodes": 9, "prefix": 20000}
    seen = {
        made.match((batch, nodes, prefix)).variant
        for batch in range(4)
        for nodes in range(10)
        for prefix in (0, 1, 1024, 4096, 16383, 16384, 20000)
    }
    assert set(made.reachable(capacity)) == seen
    assert made.reachable({"batch": 1, "nodes": 1, "prefix": 1}) == ("default", "fast")


def test_answers_are_counted_by_name_and_remembered_within_bounds() -> None:
    made = make()
    for values in [(4, 8, 4096)] * 2 + [(5, 8, 4096), (1000, 8, 4096)]:
        made.match(values)
    assert made.counts == {"exact": 2, "bucket": 1, "default": 1, "default:batch": 1}
    made.explain({"batch": 4, "nodes": 8, "prefix": 4096})
    assert made.counts["exact"] == 2
    for prefix in range(4096, 4096 + 2 * MEMO_ENTRIES):
        made.match((4, 8, prefix))
    assert len(made._memo) <= MEMO_ENTRIES
    assert made.counts["bucket"] == 2 * MEMO_ENTRIES


def test_an_explanation_holds_the_runner_up_and_is_json() -> None:
    explanation = make().explain({"batch": 5, "nodes": 8, "prefix": 0})
    assert explanation.match.reason == "prefix"
    assert explanation.considered[0].distance is None  # nothing is near 0
    explanation = make().explain({"batch": 5, "nodes": 8, "prefix": 4096})
    first, second = explanation.considered[:2]
    assert first.point == explanation.match.point
    assert first.distance == pytest.approx(math.log2(5 / 4))
    assert second.point == {"batch": 16, "nodes": 8, "prefix": 4096}
    assert [axis.in_reach for axis in explanation.axes] == [True, True, True]
    assert len(explanation.considered) == 18
    assert json.loads(json.dumps(explanation.to_json()))["match"]["how"] == "bucket"


def test_reach_is_what_the_documentation_says() -> None:
    assert REACH == 4


def make_dispatcher() -> Dispatcher:
    manifest = invented_pack().manifest
    return Dispatcher(manifest.targets, manifest.dispatch, "my_pack")


def test_a_layout_is_found_by_name_or_by_fields_that_only_it_has() -> None:
    dispatcher = make_dispatcher()
    found = dispatcher.table("sm_120", "h16_p1")
    assert found.layout_name == "h16_p1"
    assert dispatcher.table("sm_120", {"heads": 16}) is found
    assert dispatcher.table("sm_120", {**LAYOUT, "heads": 16}) is found


@pytest.mark.parametrize("layout", ["h9_p1", {"heads": 9}, {**LAYOUT, "unheard_of": 1}])
def test_a_missing_layout_is_refused_with_those_there_are(layout: str | dict[str, int | str]) -> None:
    dispatcher = make_dispatcher()
    with pytest.raises(
        LayoutMissingError, match=r"my_pack: no head layout .* for sm_120; it has h16_p1: .*heads=16.*; h8_p1"
    ):
        dispatcher.table("sm_120", layout)
    assert dispatcher.misses == {"layout_missing": 1}


def test_fields_of_several_layouts_are_refused() -> None:
    with pytest.raises(LayoutMissingError, match="fits more than one head layout"):
        make_dispatcher().table("sm_120", {"latent": 512})


def test_a_foreign_device_is_refused_with_what_the_pack_has() -> None:
    dispatcher = make_dispatcher()
    with pytest.raises(ForeignArchError, match="the device is sm_100 and the pack has sm_120, sm_90; kgen emit"):
        dispatcher.target((10, 0))
    with pytest.raises(ForeignArchError, match="no such target, 'sm_100'"):
        dispatcher.table("sm_100", "h8_p1")
    with pytest.raises(ForeignArchError, match="the device is sm_90"):
        dispatcher.target((9, 0), named="sm_120")
    assert dispatcher.misses == {"foreign_arch": 3}


def test_a_device_gets_the_closest_arch_then_the_closest_chip() -> None:
    manifest = invented_pack().manifest
    targets = {
        "sm_120": PackedTarget("sm_120", 188, 101376),
        "rtx_5090": PackedTarget("sm_120", 170, 101376),
        "sm_121": PackedTarget("sm_121", 48, 101376),
    }
    dispatch = dict.fromkeys(targets, manifest.dispatch["sm_120"])
    dispatcher = Dispatcher(targets, dispatch, "my_pack")
    assert dispatcher.target((12, 0), 188) == "sm_120"
    assert dispatcher.target((12, 0), 171) == "rtx_5090"
    assert dispatcher.target((12, 1), 171) == "sm_121"
    del dispatch["sm_121"]
    assert Dispatcher(targets, dispatch, "my_pack").target((12, 1), 48) == "rtx_5090"


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_120", (12, 0), True),
        ("sm_120", (12, 1), True),
        ("sm_121", (12, 0), False),
        ("sm_90", (12, 0), False),
        ("sm_120a", (12, 1), False),
        ("sm_120a", (12, 0), True),
        ("sm_120f", (12, 1), True),
    ],
)
def test_binary_compatibility(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs


def test_the_checks_see_a_table_that_answers_wrong() -> None:
    packed = table()
    moved = replace(packed, buckets=(replace(packed.buckets[0], variant="oracle"), *packed.buckets[1:]))
    assert make(moved).lookup(packed.buckets[0].point).variant != packed.buckets[0].variant
