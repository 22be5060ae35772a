"""How verify_mla deals a batch to blocks, told again from its definition: by trying, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

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


def split_length(slots: int, min_split_tiles: int, row_tiles: int, tiles: int) -> int | None:
    """The shortest that splits can be so that, even if each request's last one is cut short, there are blocks for all.

    ``row_tiles`` and ``tiles`` are sums over the batch, of row tiles and of row tiles x KV tiles. None: no room to
    split anything.
    """
    room = slots - row_tiles  # every row tile may have one short split
    if room <= 0:
        return None
    return next(length for length in count(min_split_tiles) if length * room >= tiles)


def dealt(
    scalars: Mapping[str, int], tile_m: int, tile_n: int, heads: int, prefixes: Sequence[int], nodes: Sequence[int]
) -> list[Item]:
    """The items of a batch, in the order of the blocks that do them."""
    row_tiles = [len(range(0, count * heads, tile_m)) for count in nodes]
    keys = [prefix + count if count else 0 for prefix, count in zip(prefixes, nodes, strict=True)]
    key_tiles = [len(range(0, length, tile_n)) for length in keys]
    total = sum(rows * tiles for rows, tiles in zip(row_tiles, key_tiles, strict=True))
    length = split_length(scalars["work_slots"], scalars["min_split_tiles"], sum(row_tiles), total)
    items = []
    for request, tiles in enumerate(key_tiles):
        if row_tiles[request] == 0:
            continue
        splits = 1 if length is None else len(range(0, tiles, length))
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
    return items


def dealt_by_plan(
    plan: Plan, candidate: Candidate, heads: int, prefixes: Sequence[int], nodes: Sequence[int]
) -> list[Item]:
    """The items of a batch under a plan of a flash candidate."""
    return dealt(plan.scalars, int(candidate["tile_m"]), int(candidate["tile_n"]), heads, prefixes, nodes)
