"""What a plan is: moves into free slots, their cost, and the pool before and after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kgen.defrag.pool import Fragmentation, PoolState, fragmentation
from kgen.defrag.runs import Array
from kgen.errors import InputError


@dataclass(frozen=True)
class Cost:
    """What moving costs: ``slot_bytes`` of one slot in all layers, and the rate (read + write, GB/s) to expect.

    ``budget_bytes`` is the most that one plan may move, so that it fits between two decode steps.
    """

    slot_bytes: int
    budget_bytes: int
    read_write_gb_s: float

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "budget_bytes", "read_write_gb_s"):
            if getattr(self, name) <= 0:
                raise InputError(name, "must be positive", seen=str(getattr(self, name)))

    @property
    def most_slots(self) -> int:
        """Slots that the budget lets a plan move."""
        return self.budget_bytes // self.slot_bytes


@dataclass(frozen=True)
class Plan:
    """Moves of slots to free ones: ``source[i]`` goes to ``target[i]`` (int64), targets ascending.

    No slot appears twice, so the moves are disjoint and their order does not matter. ``expected_us`` is modelled: the
    bytes at the rate that was given, not timed.
    """

    slots: int
    source: Array
    target: Array
    moved_bytes: int
    expected_us: float
    before: Fragmentation
    after: Fragmentation

    @cached_property
    def slot_map(self) -> Array:
        """int32 [slots]: where each slot's row is after the moves; itself if it stays."""
        mapped = np.arange(self.slots, dtype=np.int32)
        mapped[self.source] = self.target
        return mapped

    @property
    def moved_percent(self) -> int:
        """Of all slots, rounded up: what ``slot_remap`` chooses its kernel by."""
        return -(-100 * self.source.size // self.slots)

    def __str__(self) -> str:
        before, after = self.before, self.after
        return (
            f"{self.source.size} slots, {self.moved_bytes / 1e6:.1f} MB, {self.expected_us:.0f} us (modelled); "
            f"holes {before.holes} -> {after.holes}, largest free run {before.largest_run} -> {after.largest_run}, "
            f"runs a request {before.runs_per_request:.2f} -> {after.runs_per_request:.2f}"
        )


def make_plan(state: PoolState, cost: Cost, source: Array, target: Array) -> Plan:
    """The plan of these moves (int64), which must be from movable slots to free ones, within the budget.

    Raises InputError where they are not: the check stands between a planner's mistake and somebody's cache.
    """
    order = np.argsort(target)
    source, target = source[order].astype(np.int64), target[order].astype(np.int64)
    _check(state, cost, source, target)
    moved_bytes = int(source.size) * cost.slot_bytes
    mapped = np.arange(state.slots)
    mapped[source] = target
    before = fragmentation(state)
    return Plan(
        slots=state.slots,
        source=source,
        target=target,
        moved_bytes=moved_bytes,
        expected_us=2 * moved_bytes / (cost.read_write_gb_s * 1e3),
        before=before,
        after=fragmentation(state.remapped(mapped)) if source.size else before,
    )


def _check(state: PoolState, cost: Cost, source: Array, target: Array) -> None:
    for name, slots in (("source", source), ("target", target)):
        outside = slots[(slots < state.page_size) | (slots >= state.slots)]
        if outside.size:
            raise InputError(name, "has a slot outside the pool or reserved", seen=f"slot {outside[0]}")
        if np.unique(slots).size != slots.size:
            raise InputError(name, "has a slot twice")
    wrong = {
        "source is not in use": source[~state.is_used[source]],
        "source is pinned": source[state.is_pinned[source]],
        "target is in use": target[state.is_used[target]],
    }
    for problem, slots in wrong.items():
        if slots.size:
            raise InputError("plan", problem, seen=f"slot {slots[0]}")
    if source.size > cost.most_slots:
        seen = f"{source.size} slots, the budget is for {cost.most_slots}"
        raise InputError("plan", "moves more than the budget allows", seen=seen)
