"""Tier 1: plans that copy rows. All of them move whole pages' used slots into free pages, so moves are disjoint."""

from __future__ import annotations

import numpy as np

from kgen.defrag.plan import Cost, Plan, make_plan
from kgen.defrag.pool import PoolState
from kgen.defrag.runs import Array, count_runs, runs_of


def plan_tail_compaction(state: PoolState, cost: Cost) -> Plan:
    """Pages with the highest numbers into the lowest free ones, until they meet or the budget is spent.

    Frees the end of the pool. A page moves whole or not at all, its slots keep their places in it, and pages keep their
    order, so that what lay together is torn apart by the holes only.
    """
    size = state.page_size
    used, movable, free = _pages(state)
    victims, holes = np.flatnonzero(movable)[::-1], np.flatnonzero(free)
    count = min(victims.size, holes.size)
    victims, holes = victims[:count], holes[:count]
    keep = holes < victims  # holes ascend and victims descend, so this is a prefix
    slots = np.cumsum(used[victims])
    keep &= slots <= cost.most_slots
    return make_plan(state, cost, *_moved(state, np.sort(victims[keep]) * size, holes[keep] * size))


def plan_contiguity(state: PoolState, cost: Cost) -> Plan:
    """Scattered requests, those with the most runs a slot first, each into one run of free pages.

    A request moves whole but for its pinned pages, or not at all: it stays if the budget or no free run has room for
    it, or if requests that share its slots would get as many runs as it loses. Its old slots are free only afterwards,
    so repeated plans go further.
    """
    size = state.page_size
    _, movable, free = _pages(state)
    starts, lengths = runs_of(free)
    budget, taken = cost.most_slots, np.zeros(state.slots // size, dtype=bool)
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    runs = [count_runs(array) for array in state.requests]
    for index in sorted(range(len(runs)), key=lambda i: (-runs[i] / max(1, state.requests[i].size), i)):
        pages = _first_seen(state.requests[index] // size)
        pages = pages[movable[pages]]
        if runs[index] < 2 or count_runs(pages) < 2 or taken[pages].any():
            continue
        run = _best_run(lengths, pages.size)
        if run is None:
            continue
        source, target = _moved(state, pages * size, (starts[run] + np.arange(pages.size)) * size)
        if source.size > budget or _runs_won(state, source, target) <= 0:
            continue
        budget -= source.size
        taken[pages] = True
        starts[run] += pages.size
        lengths[run] -= pages.size
        sources.append(source)
        targets.append(target)
    return make_plan(state, cost, np.concatenate(sources), np.concatenate(targets))


def _pages(state: PoolState) -> tuple[Array, Array, Array]:
    """By page: used slots, whether it is used and nothing in it is pinned, whether it is free."""
    by_page = (-1, state.page_size)
    used = state.is_used.reshape(by_page).sum(axis=1)
    pinned = state.is_pinned.reshape(by_page).any(axis=1)
    free = used == 0
    free[0] = False
    return used, (used > 0) & ~pinned, free


def _moved(state: PoolState, first_source: Array, first_target: Array) -> tuple[Array, Array]:
    """Sources and targets of the used slots of the pages that start at ``first_source``."""
    places = np.arange(state.page_size)
    source = (first_source[:, None] + places).reshape(-1)
    target = (first_target[:, None] + places).reshape(-1)
    used = state.is_used[source]
    return source[used], target[used]


def _first_seen(pages: Array) -> Array:
    """The pages of a request without repeats, in the order in which it uses them."""
    _, first = np.unique(pages, return_index=True)
    return pages[np.sort(first)]


def _best_run(lengths: Array, wanted: int) -> int | None:
    """Which of the free runs is the shortest that holds ``wanted`` pages; the first of equals."""
    fits = np.flatnonzero(lengths >= wanted)
    return int(fits[np.argmin(lengths[fits])]) if fits.size else None


def _runs_won(state: PoolState, source: Array, target: Array) -> int:
    """How many runs all requests together have less after these moves."""
    mapped = np.arange(state.slots)
    mapped[source] = target
    moved = np.zeros(state.slots, dtype=bool)
    moved[source] = True
    affected = [array for array in state.requests if moved[array].any()]
    return sum(count_runs(array) - count_runs(mapped[array]) for array in affected)
