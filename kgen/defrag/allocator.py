"""Tier 0: slots that lie together from the start, so that there is less to move."""

from __future__ import annotations

import numpy as np

from kgen.defrag.runs import Array
from kgen.errors import InputError


class SlotAllocator:
    """Free slots as sorted runs of pages; what is freed joins its neighbours at once.

    `alloc`, `free`, `available_size`, `clear` do what those of SGLang's token allocators do, with numpy arrays of slots
    (int64) instead of tensors; it also refuses what is free already. ``slots`` counts the reserved first page; sizes
    and counts are in slots, and whole pages are handed out. Every call takes time in proportion to the free runs.
    """

    def __init__(self, slots: int, page_size: int = 1) -> None:
        if page_size < 1 or slots < 2 * page_size or slots % page_size:
            seen = f"{slots} slots in pages of {page_size}"
            raise InputError("slots", "must be whole pages, one of them reserved and one more", seen=seen)
        self.slots, self.page_size = slots, page_size
        self.clear()

    def clear(self) -> None:
        """Everything is free but the reserved page."""
        self._starts, self._ends = np.array([1]), np.array([self.slots // self.page_size])

    def available_size(self) -> int:
        """Free slots."""
        return int((self._ends - self._starts).sum()) * self.page_size

    def alloc(self, count: int, after: int | None = None) -> Array | None:
        """``count`` slots (a multiple of the page size), or None where there are not so many.

        They continue slot ``after`` as far as the slots behind it are free. The rest comes from the shortest run that
        holds it, else from the longest runs: as few runs as can be, and long ones are kept for those who need them.
        """
        if count < 0 or count % self.page_size:
            raise InputError("count", f"must be a multiple of the page size {self.page_size}", seen=str(count))
        if count > self.available_size():
            return None
        wanted, taken = count // self.page_size, [np.zeros(0, np.int64)]
        if after is not None and wanted:
            taken.append(self._continue((after + 1) // self.page_size, wanted))
            wanted -= taken[-1].size
        if wanted:
            chosen = self._choose(wanted)
            starts, lengths = self._starts[chosen], self._ends[chosen] - self._starts[chosen]
            lengths[-1] = wanted - lengths[:-1].sum()
            self._remove(starts, starts + lengths)
            taken += map(np.arange, starts, starts + lengths)
        pages = np.concatenate(taken)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def reserve(self, slots: Array) -> None:
        """Take these free slots' pages, whole. Raises InputError, before anything changes, for one that is not free."""
        pages = np.unique(slots // self.page_size)
        at = np.searchsorted(self._starts, pages, side="right") - 1
        taken = pages[(at < 0) | (self._ends[at] <= pages)] if self._ends.size else pages
        if taken.size:
            raise InputError("slots", "cannot be reserved: not free", seen=f"slot {taken[0] * self.page_size}")
        self._remove(*_runs(pages))

    def free(self, slots: Array) -> None:
        """Give the pages of these slots back, whole. Raises InputError, before anything changes, if one is free."""
        pages = np.unique(slots // self.page_size)
        outside = pages[(pages < 1) | (pages >= self.slots // self.page_size)]
        if outside.size:
            raise InputError("slots", "cannot be freed: reserved or outside the pool", seen=f"page {outside[0]}")
        at = np.searchsorted(self._starts, pages, side="right") - 1
        twice = pages[(at >= 0) & (self._ends[at] > pages)] if self._ends.size else pages[:0]
        if twice.size:
            raise InputError("slots", "cannot be freed: free already", seen=f"page {twice[0]}")
        starts, ends = _runs(pages)
        starts, ends = np.sort(np.append(self._starts, starts)), np.sort(np.append(self._ends, ends))
        apart = starts[1:] != ends[:-1]
        self._starts = starts[np.append(True, apart)[: starts.size]]
        self._ends = ends[np.append(apart, True)[: ends.size]]

    def is_free(self) -> Array:
        """Which slots are free, bool [slots]."""
        edges = np.zeros(self.slots // self.page_size + 1, np.int8)
        edges[self._starts], edges[self._ends] = 1, -1
        return edges[:-1].cumsum(dtype=np.int8).astype(bool).repeat(self.page_size)

    def _choose(self, wanted: int) -> Array:
        """Indices of the runs that hold ``wanted`` pages; all are taken whole but the last."""
        lengths = self._ends - self._starts
        longest_first = np.argsort(-lengths, kind="stable")
        descending = lengths[longest_first]
        left = wanted - (np.cumsum(descending) - descending)  # when it is a run's turn
        whole = int(np.argmax(descending >= left))
        fitting = longest_first[whole:][descending[whole:] >= left[whole]]
        shortest = fitting[np.argmax(lengths[fitting] == lengths[fitting[-1]])]
        return np.append(longest_first[:whole], shortest)

    def _continue(self, page: int, most: int) -> Array:
        """Take up to ``most`` free pages from ``page`` on, none if it is not free."""
        at = int(np.searchsorted(self._starts, page, side="right")) - 1
        end = min(int(self._ends[at]), page + most) if at >= 0 else page
        if end <= page:
            return np.zeros(0, np.int64)
        self._remove(np.array([page]), np.array([end]))
        return np.arange(page, end)

    def _remove(self, starts: Array, ends: Array) -> None:
        """Runs within the free ones: each splits one in two, of which those without pages are dropped."""
        starts, ends = np.sort(np.append(self._starts, ends)), np.sort(np.append(self._ends, starts))
        self._starts, self._ends = starts[starts < ends], ends[starts < ends]


def _runs(pages: Array) -> tuple[Array, Array]:
    """First and behind the last page (int64) of each run of ascending pages."""
    first = np.diff(pages, prepend=pages[:1] - 2) != 1
    return pages[first], pages[np.append(first[1:], True)[: pages.size]] + 1
