"""A pool's slots as a picture: who has which, before and after."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kgen.defrag.pool import PoolState
from kgen.defrag.runs import Array
from kgen.errors import InputError

COLUMNS, CELL, GAP = 64, 8, 24  # slots a row, pixels a slot, pixels between pools
FREE, RESERVED, SHARED, PINNED = (238, 238, 238), (170, 170, 170), (70, 70, 70), (200, 0, 0)
GOLDEN_ANGLE = 0.381966  # of a turn: neighbouring requests get colours that are far apart


def write_picture(path: Path, states: Sequence[PoolState]) -> None:
    """A PNG of the pools side by side, a cell a slot, in rows from the top left.

    A colour a request; dark where several requests share the slot, red where it is pinned, light where it is free.
    Raises InputError without Pillow, or where the file cannot be written.
    """
    try:
        from PIL import Image
    except ImportError:
        remedy = 'pip install "kgen[picture]"'
        raise InputError(str(path), "a picture needs Pillow, which is not installed", remedy=remedy) from None
    panels = [_panel(state) for state in states]
    gap = np.full((panels[0].shape[0], GAP, 3), 255, np.uint8)
    pieces = [piece for panel in panels for piece in (panel, gap)][:-1]
    try:
        Image.fromarray(np.concatenate(pieces, axis=1)).save(path, format="PNG")
    except OSError as error:
        raise InputError(str(path), "cannot be written", seen=error.strerror or str(error)) from None


def slot_colours(state: PoolState) -> Array:
    """One colour a slot, uint8 [slots, 3]."""
    colours = np.full((state.slots, 3), FREE, np.uint8)
    owners = np.zeros(state.slots, np.int64)
    for slots in state.others:
        colours[slots] = SHARED
    for index, slots in enumerate(state.requests):
        red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN_ANGLE % 1, 0.6, 0.9)
        colours[slots] = (round(255 * red), round(255 * green), round(255 * blue))
        owners[slots] += 1
    colours[owners > 1] = SHARED
    colours[state.pinned] = PINNED
    colours[: state.page_size] = RESERVED
    return colours


def _panel(state: PoolState) -> Array:
    colours = slot_colours(state)
    rows = -(-state.slots // COLUMNS)
    cells = np.full((rows * COLUMNS, 3), 255, np.uint8)
    cells[: state.slots] = colours
    pixels = cells.reshape(rows, COLUMNS, 3).repeat(CELL, axis=0).repeat(CELL, axis=1)
    pixels[CELL - 1 :: CELL] = 255
    pixels[:, CELL - 1 :: CELL] = 255
    return pixels
