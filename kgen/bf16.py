"""bf16 on the host, as uint16 bits: numpy has no such type."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 to bf16 bits (uint16), rounded to nearest even. NaN is not expected."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bf16 bits (uint16) to float64, exactly."""
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
