"""The memory that a call's kernels may touch."""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT_BYTES = 16


class Region(NamedTuple):
    """The bytes of one tensor: what a kernel may read, and write where ``writable``."""

    name: str
    address: int
    size_bytes: int
    writable: bool
