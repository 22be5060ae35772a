"""A snapshot of who refers to which slot of a KV pool, and how fragmented it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kgen.defrag.runs import Array, count_runs, runs_of
from kgen.errors import InputError


@dataclass(frozen=True)
class Fragmentation:
    """How scattered a pool is. ``used`` and ``free`` are slots beyond the reserved page; pinned ones are used.

    ``request_runs`` are the runs of consecutive slots that the requests are made of, all together; it equals the
    number of requests that have slots if each is contiguous. ``holes`` are runs of free slots below the last used one,
    ``largest_run`` the most free slots in a row anywhere, ``end`` one more than the last used slot.
    """

    used: int
    free: int
    requests: int
    request_runs: int
    holes: int
    hole_slots: int
    largest_run: int
    end: int

    @property
    def runs_per_request(self) -> float:
        """1 where every request is contiguous."""
        return self.request_runs / self.requests if self.requests else 1.0


@dataclass(frozen=True)
class PoolState:
    """References to the slots of a pool, as they are now.

    ``slots`` counts all slots, the reserved first page too. ``requests`` are the slots of each request by position;
    a slot may be in many of them (a shared prefix). ``others`` are references without an order: radix values, prefix
    indices. ``pinned`` slots are used and must not move (transfers in flight). Index arrays are int64. Raises
    InputError that names the reference which is no slot.
    """

    slots: int
    page_size: int = 1
    requests: Sequence[Array] = ()
    others: Sequence[Array] = ()
    pinned: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.slots < 2 * self.page_size or self.slots % self.page_size:
            seen = f"{self.slots} slots in pages of {self.page_size}"
            raise InputError("slots", "must be whole pages, one of them reserved and one more", seen=seen)
        named = [(f"requests[{i}]", array) for i, array in enumerate(self.requests)]
        named += [(f"others[{i}]", array) for i, array in enumerate(self.others)]
        for name, array in (*named, ("pinned", self.pinned)):
            outside = array[(array < self.page_size) | (array >= self.slots)]
            if outside.size:
                seen = f"slot {outside[0]} of {self.slots}, of which the first {self.page_size} are reserved"
                raise InputError(name, "refers to no slot that can be used", seen=seen)

    @cached_property
    def is_used(self) -> Array:
        """Which slots are referenced or pinned, bool [slots]; reserved slots are not."""
        used = np.zeros(self.slots, dtype=bool)
        for array in (*self.requests, *self.others, self.pinned):
            used[array] = True
        return used

    @cached_property
    def is_pinned(self) -> Array:
        """Which slots are pinned, bool [slots]."""
        pinned = np.zeros(self.slots, dtype=bool)
        pinned[self.pinned] = True
        return pinned

    def remapped(self, slot_map: Array) -> PoolState:
        """The state after every reference followed ``slot_map`` (int [slots])."""
        return PoolState(
            self.slots,
            self.page_size,
            [slot_map[array] for array in self.requests],
            [slot_map[array] for array in self.others],
            self.pinned,
        )


def fragmentation(state: PoolState) -> Fragmentation:
    """How scattered the pool is; one pass over all references."""
    used, reserved = state.is_used, state.page_size
    free = ~used
    free[:reserved] = False
    end = int(np.flatnonzero(used)[-1]) + 1 if used.any() else reserved
    starts, lengths = runs_of(free)
    inside = starts < end
    return Fragmentation(
        used=int(used.sum()),
        free=int(free.sum()),
        requests=sum(array.size > 0 for array in state.requests),
        request_runs=sum(count_runs(array) for array in state.requests),
        holes=int(inside.sum()),
        hole_slots=int(lengths[inside].sum()),
        largest_run=int(lengths.max(initial=0)),
        end=end,
    )
