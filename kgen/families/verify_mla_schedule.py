"""How verify_mla sizes a grid for batches whose lengths only the device knows, and what it does with equal ones.

The device deals a batch (``verify_mla_schedule.cuh``): it chooses how long a split may be, so that all blocks end
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCHEDULE_WORDS = 12  # uint32 of an item in a schedule, in 16-byte parts
SCHEDULE_WARPS = 4  # of a block that makes a schedule, an item each
MIN_SPLIT_ROWS = 32  # a shorter split costs more in the combine than it saves
SPLIT_ROOM = 3  # short items that may go beside the blocks that run at once, for each of these
LANES = 32  # each tries one length


@dataclass(frozen=True)
class Grid:
    """``slots`` blocks run at once. ``blocks`` are launched, and of these ``partials`` may have a part of a result."""

    slots: int
    min_split_tiles: int
    blocks: int
    partials: int


def grid_for(*, slots: int, row_tiles: int, key_tiles: int, tile_n: int) -> Grid:
    """For at most ``row_tiles`` over all requests, each with at most ``key_tiles`` KV tiles of ``tile_n`` rows.

    The sum of row_tiles x ceil(key_tiles / length) is at most tiles / length + row_tiles, and no length is shorter than
    tiles / room. Requests that are split have more key tiles than the length: their row tiles are less than the room.
    """
    min_split_tiles = -(-MIN_SPLIT_ROWS // tile_n)
    room = _room(slots, row_tiles)
    blocks = min(room + row_tiles, row_tiles * -(-key_tiles // min_split_tiles))
    partials = 0 if blocks == row_tiles else min(blocks, room + min(room, row_tiles))
    return Grid(slots, min_split_tiles, blocks, partials)


def equal_splits(scalars: Mapping[str, int], row_tiles: int, key_tiles: int) -> int:
    """Splits of each of ``row_tiles`` that all have ``key_tiles`` KV tiles, as the device deals them."""
    slots, overhead = scalars["work_slots"], scalars["item_overhead_tiles"]
    share = -(-row_tiles * key_tiles // slots)
    shortest = max(-(-row_tiles * key_tiles // _room(slots, row_tiles)), scalars["min_split_tiles"])
    longest = max(min(key_tiles, 2 * share), shortest)

    def end(splits: int) -> int:
        item, rounds = max(-(-key_tiles // splits), shortest) + overhead, -(-row_tiles * splits // slots)
        return min(rounds * item, share + rounds * overhead + item)

    lengths = (longest - (longest - shortest) * lane // (LANES - 1) for lane in range(LANES))
    lengths = (max(-(-key_tiles // -(-key_tiles // length)), shortest) for length in lengths)
    return min((-(-key_tiles // length) for length in lengths), key=end)


def _room(slots: int, row_tiles: int) -> int:
    return slots + SPLIT_ROOM * min(row_tiles, slots)
