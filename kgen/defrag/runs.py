"""Runs of consecutive numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def count_runs(numbers: Array) -> int:
    """How many runs of consecutive numbers a sequence is made of, in its order."""
    return int(np.count_nonzero(np.diff(numbers) != 1)) + 1 if numbers.size else 0


def runs_of(flags: Array) -> tuple[Array, Array]:
    """First index and length (int64) of every run of true flags, ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2] - edges[::2]
