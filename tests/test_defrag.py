"""Plans over random pools: every reference reads the same bytes, nothing is lost or doubled, pins and budgets hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kgen.cli import main
from kgen.defrag import (
    Cost,
    Plan,
    PoolState,
    SlotAllocator,
    apply_plan,
    fragmentation,
    plan_contiguity,
    plan_tail_compaction,
)
from kgen.defrag.picture import FREE, PINNED, RESERVED, SHARED, slot_colours
from kgen.defrag.plan import make_plan
from kgen.defrag.runs import Array, count_runs
from kgen.errors import InputError

Planner = Callable[[PoolState, Cost], Plan]
PLANNERS: list[Planner] = [plan_tail_compaction, plan_contiguity]
NO_LIMIT = Cost(slot_bytes=1, budget_bytes=10**9, read_write_gb_s=1000.0)


def slots(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


@st.composite
def pools(draw: st.DrawFn) -> PoolState:
    """Requests with shared prefixes, scattered over a pool; lists without order; pins, also of unreferenced slots."""
    page = draw(st.sampled_from([1, 4]))
    pages = draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = (1 + rng.permutation(pages - 1)) * page if draw(st.booleans()) else np.arange(1, pages) * page
    requests: list[Array] = []
    at = 0
    while at < order.size and len(requests) < 6:
        own = draw(st.integers(0, min(8, order.size - at)))
        mine = (order[at : at + own, None] + np.arange(page)).reshape(-1)
        prefix = requests[-1][: draw(st.integers(0, requests[-1].size // page)) * page] if requests else mine[:0]
        cut = draw(st.integers(0, page - 1)) if mine.size else 0  # the last page of a request is seldom full
        requests.append(np.concatenate([prefix, mine[: mine.size - cut]]))
        at += own + draw(st.integers(0, 3))
    usable = st.integers(page, pages * page - 1)
    pinned = np.array(sorted(draw(st.sets(usable, max_size=3))), np.int64)
    others = [np.array(draw(st.lists(usable, max_size=5)), np.int64)]
    return PoolState(pages * page, page, requests, others, pinned)


costs = st.builds(Cost, slot_bytes=st.just(1152), budget_bytes=st.integers(1, 60_000), read_write_gb_s=st.just(3700.0))


class StoppedError(Exception):
    pass


@dataclass
class Server:
    """Bytes of a pool and everybody's references, as a serving process has them."""

    rows: Array
    requests: list[Array]
    others: list[Array]
    allocator: SlotAllocator
    steps_left: int = 10**9

    @classmethod
    def of(cls, state: PoolState) -> Server:
        allocator = SlotAllocator(state.slots, state.page_size)
        allocator.reserve(np.flatnonzero(state.is_used))
        rows = np.random.default_rng(0).integers(0, 2**62, state.slots)
        return cls(rows, [*state.requests], [*state.others], allocator)

    def read(self) -> list[list[int]]:
        return [self.rows[array].tolist() for array in (*self.requests, *self.others)]

    def step(self) -> None:
        if self.steps_left == 0:
            raise StoppedError
        self.steps_left -= 1

    def run(self, plan: Plan, *, again: bool = False) -> None:
        def copy(source: Array, target: Array) -> None:
            for place in range(source.size):  # not simultaneous, and stopped anywhere: the plan must not mind
                self.step()
                self.rows[target[place]] = self.rows[source[place]]

        def flip(references: list[Array]) -> Callable[[Array], None]:
            def rewrite(slot_map: Array) -> None:
                for index, array in enumerate(references):
                    self.step()
                    references[index] = slot_map[array].astype(np.int64)

            return rewrite

        flips = [flip(self.requests), flip(self.others)]
        if again:
            apply_plan(plan, copy=copy, flips=flips, release=self.allocator.free)
        else:
            apply_plan(plan, copy=copy, flips=flips, release=self.allocator.free, reserve=self.allocator.reserve)

    def is_free(self) -> Array:
        return self.allocator.is_free()


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=200, deadline=None)
@given(state=pools(), cost=costs)
def test_a_plan_keeps_what_everybody_reads(planner: Planner, state: PoolState, cost: Cost) -> None:
    server, plan = Server.of(state), planner(state, cost)
    before = server.read()
    server.run(plan)
    assert server.read() == before
    after = PoolState(state.slots, state.page_size, server.requests, server.others, state.pinned)
    assert after.is_used.sum() == state.is_used.sum(), "no slot is lost or doubled"
    assert (after.is_used[state.pinned]).all()
    page_used = after.is_used.reshape(-1, state.page_size).any(axis=1).repeat(state.page_size)
    page_used[: state.page_size] = True
    assert np.array_equal(server.is_free(), ~page_used)
    assert plan.after == fragmentation(after)


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=200, deadline=None)
@given(state=pools(), cost=costs)
def test_plans_are_disjoint_within_budget_and_respect_pins(planner: Planner, state: PoolState, cost: Cost) -> None:
    plan = planner(state, cost)
    touched = np.concatenate([plan.source, plan.target])
    assert np.unique(touched).size == touched.size
    assert plan.moved_bytes == plan.source.size * cost.slot_bytes <= cost.budget_bytes
    assert plan.expected_us == pytest.approx(2 * plan.moved_bytes / 3.7e6)
    assert (touched >= state.page_size).all(), "the first page is reserved"
    assert not np.isin(touched, state.pinned).any()
    assert np.array_equal(plan.source % state.page_size, plan.target % state.page_size)


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=100, deadline=None)
@given(state=pools(), steps=st.integers(0, 40))
def test_an_interrupted_plan_leaves_every_reference_valid(planner: Planner, state: PoolState, steps: int) -> None:
    server, plan = Server.of(state), planner(state, NO_LIMIT)
    before = server.read()
    server.steps_left = steps
    try:
        server.run(plan)
    except StoppedError:
        live = np.concatenate([*server.requests, *server.others, state.pinned])
        assert not server.is_free()[live].any(), "nobody's slot can be handed out"
        assert server.read() == before
        server.steps_left = 10**9
        server.run(plan, again=True)
    assert server.read() == before
    pages = np.unique(np.flatnonzero(state.is_used) // state.page_size).size
    free = state.slots - (1 + pages) * state.page_size
    assert server.allocator.available_size() == free, "what was stopped can be brought to its end"


@settings(max_examples=200, deadline=None)
@given(state=pools())
def test_tail_compaction_without_pins_ends_with_one_free_run(state: PoolState) -> None:
    state = PoolState(state.slots, state.page_size, state.requests, state.others)
    after = plan_tail_compaction(state, NO_LIMIT).after
    pages = np.unique(np.flatnonzero(state.is_used) // state.page_size).size
    assert after.end <= (pages + 1) * state.page_size
    assert after.largest_run >= (state.slots // state.page_size - 1 - pages) * state.page_size


@settings(max_examples=200, deadline=None)
@given(state=pools(), cost=costs)
def test_contiguity_never_makes_runs(state: PoolState, cost: Cost) -> None:
    plan = plan_contiguity(state, cost)
    assert plan.after.request_runs <= plan.before.request_runs
    assert plan.source.size == 0 or plan.after.request_runs < plan.before.request_runs


def test_a_scattered_request_becomes_one_run() -> None:
    state = PoolState(20, 1, [slots(3, 9, 5), slots(1, 2)])
    plan = plan_contiguity(state, NO_LIMIT)
    assert plan.source.tolist() == [3, 9, 5]
    assert plan.target.tolist() == [6, 7, 8], "the shortest run that holds it"
    assert plan.slot_map[[3, 9, 5, 1]].tolist() == [6, 7, 8, 1]
    assert (plan.before.request_runs, plan.after.request_runs) == (4, 2)


def test_the_tail_goes_into_the_lowest_holes() -> None:
    state = PoolState(12, 1, [slots(1, 3, 11), slots(1, 10)], pinned=slots(9))
    plan = plan_tail_compaction(state, Cost(100, 250, 1000.0))
    assert plan.source.tolist() == [10, 11], "in order, though the highest is chosen first"
    assert plan.target.tolist() == [2, 4]
    assert plan.moved_bytes == 200
    assert plan.moved_percent == 17, "2 of 12 slots, rounded up"
    assert str(plan).startswith("2 slots, 0.0 MB, 0 us (modelled); holes 2 -> 1, largest free run 5 -> 4")


def test_a_shared_slot_moves_once_and_every_reference_follows() -> None:
    state = PoolState(10, 1, [slots(9, 8), slots(9, 7)], [slots(9)])
    plan = plan_tail_compaction(state, NO_LIMIT)
    assert sorted(plan.source.tolist()) == [7, 8, 9]
    moved = state.remapped(plan.slot_map)
    assert moved.requests[0][0] == moved.requests[1][0] == moved.others[0][0] == plan.target[plan.source == 9][0]


def test_fragmentation_counts_by_hand() -> None:
    found = fragmentation(PoolState(16, 2, [slots(2, 3, 8), slots(2, 3), slots()], pinned=slots(13)))
    assert (found.used, found.free, found.requests, found.request_runs) == (4, 10, 2, 3)
    assert (found.holes, found.hole_slots, found.largest_run, found.end) == (2, 8, 4, 14)
    assert found.runs_per_request == 1.5


BAD_PLANS = [
    (slots(3, 3), slots(4, 5), "source: has a slot twice"),
    (slots(3, 2), slots(4, 4), "target: has a slot twice"),
    (slots(0), slots(4), "source: has a slot outside the pool or reserved, slot 0"),
    (slots(3), slots(12), "target: has a slot outside the pool or reserved, slot 12"),
    (slots(6), slots(4), "source is not in use, slot 6"),
    (slots(3), slots(2), "target is in use, slot 2"),
    (slots(7), slots(4), "source is pinned, slot 7"),
    (slots(2, 3), slots(4, 5), "moves more than the budget allows, 2 slots, the budget is for 1"),
]


@pytest.mark.parametrize(("source", "target", "reason"), BAD_PLANS)
def test_a_wrong_plan_is_refused_by_name(source: Array, target: Array, reason: str) -> None:
    state = PoolState(12, 1, [slots(2, 3)], pinned=slots(7))
    cost = Cost(100, 199 if "budget" in reason else 10**6, 1000.0)
    with pytest.raises(InputError, match=reason):
        make_plan(state, cost, source, target)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"requests": [slots(2), slots(0)]}, r"requests\[1\]: refers to no slot that can be used, slot 0 of 8"),
        ({"others": [slots(8)]}, r"others\[0\]: refers to no slot"),
        ({"pinned": slots(-1)}, "pinned: refers to no slot"),
        ({"page_size": 3}, "slots: must be whole pages"),
    ],
)
def test_a_reference_that_is_no_slot_is_named(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        PoolState(8, **arguments)  # type: ignore[arg-type]


def test_costs_are_positive() -> None:
    with pytest.raises(InputError, match="budget_bytes: must be positive, 0"):
        Cost(1152, 0, 3700.0)


@settings(max_examples=200, deadline=None)
@given(page=st.sampled_from([1, 4]), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_the_allocator_agrees_with_a_set(page: int, steps: list[tuple[bool, int]]) -> None:
    allocator, held = SlotAllocator(30 * page, page), list[Array]()
    free = set(range(page, 30 * page))
    for is_alloc, number in steps:
        if is_alloc:
            after = int(held[-1][-1]) if held and held[-1].size else None
            got = allocator.alloc(number * page, after)
            assert (got is None) == (number * page > len(free))
            if got is not None:
                assert got.size == number * page
                assert set(got.tolist()) <= free
                free -= set(got.tolist())
                held.append(got)
        elif held:
            given_back = held.pop(number % len(held))
            allocator.free(given_back)
            free |= set(given_back.tolist())
        assert allocator.available_size() == len(free)
        assert set(np.flatnonzero(allocator.is_free()).tolist()) == free


def test_allocations_continue_and_fill_the_shortest_run_that_fits() -> None:
    allocator = SlotAllocator(100)
    first = allocator.alloc(10)
    assert first is not None
    assert first.tolist() == list(range(1, 11))
    allocator.reserve(slots(20, 21, 40))
    grown = allocator.alloc(3, after=10)
    assert grown is not None
    assert grown.tolist() == [11, 12, 13]
    short = allocator.alloc(5)
    assert short is not None
    assert short.tolist() == [14, 15, 16, 17, 18]
    split = allocator.alloc(70, after=18)
    assert split is not None
    assert count_runs(split) == 3
    assert allocator.alloc(100) is None


def test_the_longest_runs_are_taken_until_one_holds_the_rest() -> None:
    allocator = SlotAllocator(20)
    allocator.reserve(slots(4, 6, 11, 14, 17, 19))  # leaves runs of 3, 1, 4, 2, 2 and 1
    got = allocator.alloc(8)
    assert got is not None
    assert got.tolist() == [7, 8, 9, 10, 1, 2, 3, 5], "4, 3, and then the first of 1"
    assert np.flatnonzero(allocator.is_free()).tolist() == [12, 13, 15, 16, 18]
    allocator.free(slots(5, 4, 6, 3))
    assert np.flatnonzero(allocator.is_free()).tolist() == [3, 4, 5, 6, 12, 13, 15, 16, 18]
    more = allocator.alloc(3)
    assert more is not None
    assert more.tolist() == [3, 4, 5]


def test_a_pool_of_single_holes_is_no_slower_by_the_slot() -> None:
    allocator = SlotAllocator(1 << 18)
    start = perf_counter()
    allocator.reserve(np.arange(2, 1 << 18, 2))
    got = allocator.alloc(1 << 16)
    assert got is not None
    assert np.array_equal(got, np.arange(1, 1 << 17, 2))
    allocator.free(got)
    assert allocator.available_size() == 1 << 17
    assert perf_counter() - start < 10, "some 0.2 s; 30 minutes where every hole is looked for anew"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda a: a.free(slots(4, 8)), "cannot be freed: free already, page 2"),
        (lambda a: a.free(slots(0)), "cannot be freed: reserved or outside"),
        (lambda a: a.free(slots(4, 99)), "cannot be freed: reserved or outside the pool, page 24"),
        (lambda a: a.reserve(slots(4)), "cannot be reserved: not free, slot 4"),
        (lambda a: a.alloc(6), "must be a multiple of the page size 4, 6"),
    ],
)
def test_the_allocator_refuses_by_name_and_changes_nothing(call: Callable[[SlotAllocator], None], reason: str) -> None:
    allocator = SlotAllocator(16, 4)
    assert allocator.alloc(4) is not None
    before = allocator.is_free()
    with pytest.raises(InputError, match=reason):
        call(allocator)
    assert np.array_equal(allocator.is_free(), before)


def test_the_demo_moves_verifies_and_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "slots.png"
    words = ["defrag", "demo", "--device", "cpu", "--slots", "256", "--requests", "4", "--budget-kb", "40"]
    assert main([*words, "--out", str(picture), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    plans = found["plans"]
    assert len(plans) >= 3, "the budget makes several plans of it"
    assert all(plan["moved_bytes"] <= 40_000 for plan in plans)
    assert {plan["kind"] for plan in plans} == {"tail compaction", "contiguity"}
    assert plans[-1]["after"]["request_runs"] < 0.7 * plans[0]["before"]["request_runs"]
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
        assert drawn.size == (2 * 64 * 8 + 24, 256 // 64 * 8)


def test_the_demo_names_a_picture_that_cannot_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["defrag", "demo", "--device", "cpu", "--slots", "128", "--requests", "2"]
    assert main([*words, "--out", "/nowhere/at/all.png"]) == 2
    assert "error: /nowhere/at/all.png: cannot be written, No such file or directory" in capfd.readouterr().err


def test_the_demo_refuses_a_budget_that_moves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["defrag", "demo", "--device", "cpu", "--slots", "128", "--requests", "2", "--budget-kb", "1"]) == 2
    said = capfd.readouterr().err
    assert "error: budget: is for less than a slot in all layers, 1000 bytes for slots of 1152" in said


def test_colours_tell_who_has_a_slot() -> None:
    state = PoolState(8, 1, [slots(1, 2), slots(2, 3)], [slots(4)], slots(5))
    colours = slot_colours(state).tolist()
    assert colours[0] == list(RESERVED)
    assert colours[2] == colours[4] == list(SHARED)
    assert colours[5] == list(PINNED)
    assert colours[6] == colours[7] == list(FREE)
    assert colours[1] != colours[3]
