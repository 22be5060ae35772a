"""Tier 0: slots that lie together from the start, so that there is less to move."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from kgen.defrag.runs import Array, runs_of
from kgen.errors import InputError


class SlotAllocator:
    """Free slots as sorted runs of pages; what is freed joins its neighbours at once.

    Stands in for SGLang's token allocators: `alloc`, `free`, `available_size`, `clear`, with slots (int64) instead of
    tensors. ``slots`` counts the reserved first page; sizes and counts are in slots, and whole pages are handed out.
    """

    def __init__(self, slots: int, page_size: int = 1) -> None:
        if page_size < 1 or slots < 2 * page_size or slots % page_size:
            seen = f"{slots} slots in pages of {page_size}"
            raise InputError("slots", "must be whole pages, one of them reserved and one more", seen=seen)
        self.slots, self.page_size = slots, page_size
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Everything is free but the reserved page."""
        self._starts, self._ends = [1], [self.slots // self.page_size]

    def available_size(self) -> int:
        """Free slots."""
        return (sum(self._ends) - sum(self._starts)) * self.page_size

    def alloc(self, count: int, after: int | None = None) -> Array | None:
        """``count`` slots (a multiple of the page size), or None where there are not so many.

        They continue slot ``after`` as far as the slots behind it are free. The rest comes from the shortest run that
        holds it, else from the longest runs: as few runs as can be, and long ones are kept for those who need them.
        """
        if count < 0 or count % self.page_size:
            raise InputError("count", f"must be a multiple of the page size {self.page_size}", seen=str(count))
        if count > self.available_size():
            return None
        wanted, taken = count // self.page_size, []
        if after is not None and wanted:
            taken.append(self._take_at((after + 1) // self.page_size, wanted))
            wanted -= taken[-1].size
        while wanted:
            lengths = np.subtract(self._ends, self._starts)
            fitting = np.flatnonzero(lengths >= wanted)
            at = int(fitting[np.argmin(lengths[fitting])]) if fitting.size else int(np.argmax(lengths))
            taken.append(self._take_at(self._starts[at], wanted))
            wanted -= taken[-1].size
        pages = np.concatenate(taken) if taken else np.zeros(0, np.int64)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def reserve(self, slots: Array) -> None:
        """Take these free slots' pages, whole. Raises InputError for one that is not free."""
        pages = np.unique(slots // self.page_size)
        for page in pages.tolist():
            at = bisect_right(self._starts, page) - 1
            if at < 0 or self._ends[at] <= page:
                raise InputError("slots", "cannot be reserved: not free", seen=f"slot {page * self.page_size}")
        for page in pages.tolist():
            self._take_at(page, 1)

    def free(self, slots: Array) -> None:
        """Give the pages of these slots back, whole. Raises InputError, before anything changes, if one is free."""
        pages = np.unique(slots // self.page_size)
        flags = np.zeros(self.slots // self.page_size, dtype=bool)
        if pages.size and (pages[0] < 1 or pages[-1] >= flags.size):
            raise InputError("slots", "cannot be freed: reserved or outside the pool", seen=f"page {pages[0]}")
        flags[pages] = True
        starts, lengths = runs_of(flags)
        runs = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
        for start, end in runs:
            at = bisect_left(self._ends, start + 1)
            if at < len(self._starts) and self._starts[at] < end:
                raise InputError("slots", "cannot be freed: free already", seen=f"page {max(start, self._starts[at])}")
        for start, end in runs:
            self._join(start, end)

    def is_free(self) -> Array:
        """Which slots are free, bool [slots]."""
        pages = np.zeros(self.slots // self.page_size, dtype=bool)
        for start, end in zip(self._starts, self._ends, strict=True):
            pages[start:end] = True
        return pages.repeat(self.page_size)

    def _take_at(self, page: int, most: int) -> Array:
        """Up to ``most`` free pages from ``page`` on, none if it is not free."""
        at = bisect_right(self._starts, page) - 1
        if at < 0 or self._ends[at] <= page:
            return np.zeros(0, np.int64)
        start, end = self._starts[at], self._ends[at]
        last = min(end, page + most)
        left = [(a, b) for a, b in ((start, page), (last, end)) if a < b]
        self._starts[at : at + 1], self._ends[at : at + 1] = [a for a, _ in left], [b for _, b in left]
        return np.arange(page, last)

    def _join(self, start: int, end: int) -> None:
        at = bisect_left(self._starts, start)
        first = at - 1 if at and self._ends[at - 1] == start else at
        last = at + 1 if at < len(self._starts) and self._starts[at] == end else at
        start = self._starts[first] if first < at else start
        end = self._ends[at] if last > at else end
        self._starts[first:last], self._ends[first:last] = [start], [end]
