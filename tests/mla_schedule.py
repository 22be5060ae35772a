"""How verify_mla deals a batch to blocks, told again from its definition: by trying, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil, floor

from kgen.family import Candidate, Plan


@dataclass(frozen=True)
class Item:
    """What one block does: rows ``[first_row, last_row)`` of a request against its keys ``[first_key, last_key)``."""

    request: int
    split: int
    splits: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int

    def tiles(self, tile_n: int) -> int:
        """KV tiles that the block loops over."""
        return -(-(self.last_key - self.first_key) // tile_n)


def _total(row_tiles: Sequence[int], key_tiles: Sequence[int]) -> int:
    return sum(rows * keys for rows, keys in zip(row_tiles, key_tiles, strict=True))


def lengths_tried(scalars: Mapping[str, int], row_tiles: Sequence[int], key_tiles: Sequence[int]) -> list[int]:
    """The longest first: 32 from twice a block's mean share down to the least that leaves no item without a block."""
    slots, total = scalars["work_slots"], _total(row_tiles, key_tiles)
    share, longest_request = ceil(total / slots), max(key_tiles)
    room = slots + 3 * min(sum(row_tiles), slots)  # blocks beside those that every row tile may fill in part
    shortest = max(ceil(total / room), scalars["min_split_tiles"])
    longest = max(min(longest_request, 2 * share), shortest)
    even = [longest - floor((longest - shortest) * lane / 31) for lane in range(32)]
    # Of the longest request, all splits are as long.
    return [max(shortest, ceil(longest_request / ceil(longest_request / length))) for length in even]


def chosen_length(scalars: Mapping[str, int], row_tiles: Sequence[int], key_tiles: Sequence[int]) -> int:
    """Of those, the one for which the last block is sure to end first."""
    slots, overhead = scalars["work_slots"], scalars["item_overhead_tiles"]
    share = ceil(_total(row_tiles, key_tiles) / slots)

    def end(length: int) -> int:
        items = sum(rows * ceil(keys / length) for rows, keys in zip(row_tiles, key_tiles, strict=True))
        rounds, item = ceil(items / slots), length + overhead
        return min(rounds * item, share + rounds * overhead + item)

    return min(lengths_tried(scalars, row_tiles, key_tiles), key=end)


def dealt(
    scalars: Mapping[str, int], tile_m: int, tile_n: int, heads: int, prefixes: Sequence[int], nodes: Sequence[int]
) -> list[Item]:
    """The items of a batch, in the order of their blocks: those of requests that are split come first."""
    row_tiles = [len(range(0, count * heads, tile_m)) for count in nodes]
    keys = [prefix + count if count else 0 for prefix, count in zip(prefixes, nodes, strict=True)]
    key_tiles = [len(range(0, length, tile_n)) for length in keys]
    if not any(row_tiles):
        return []
    length = chosen_length(scalars, row_tiles, key_tiles)
    items = []
    for request, tiles in enumerate(key_tiles):
        splits = len(range(0, tiles, length))
        given = [0] * splits
        for tile in range(tiles):  # one each in turn: as even as can be, and the first get what is left over
            given[tile % splits] += 1
        for split in range(splits):
            first = sum(given[:split]) * tile_n
            last = min(first + given[split] * tile_n, keys[request])
            rows = nodes[request] * heads
            items += [
                Item(request, split, splits, row, min(row + tile_m, rows), first, last)
                for row in range(0, rows, tile_m)
            ]
    return sorted(items, key=lambda item: item.splits == 1)


def last_end(scalars: Mapping[str, int], tile_n: int, items: Sequence[Item]) -> float:
    """When the last block ends, in KV tiles, if each starts where one of the slots is free first."""
    slots = [0.0] * scalars["work_slots"]
    for item in items:
        heapreplace(slots, slots[0] + item.tiles(tile_n) + scalars["item_overhead_tiles"])
    return max(slots)


def dealt_by_plan(
    plan: Plan, candidate: Candidate, heads: int, prefixes: Sequence[int], nodes: Sequence[int]
) -> list[Item]:
    """The items of a batch under a plan of a flash candidate."""
    return dealt(plan.scalars, int(candidate["tile_m"]), int(candidate["tile_n"]), heads, prefixes, nodes)
