"""e4m3 (OCP FP8: 4 exponent bits, 3 mantissa bits, no infinities) on the host, as uint8: numpy has no such type."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _finite_values() -> Array:
    """What the bits 0 to 126 mean, ascending: a subnormal counts in 2^-9, others are (1 + m / 8) 2^(e - 7)."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))


_FINITE = _finite_values()
_VALUES = np.concatenate([_FINITE, [np.nan], -_FINITE, [np.nan]])


def from_e4m3(array: Array) -> Array:
    """e4m3 bits (uint8) to float64, exactly."""
    return _VALUES[array]


def to_e4m3(array: Array) -> Array:
    """Floats to e4m3 bits (uint8), rounded to nearest even; what is larger becomes 448. NaN is not expected."""
    magnitude = np.abs(array).astype(np.float64)
    above = np.minimum(np.searchsorted(_FINITE, magnitude), 126)
    below = np.maximum(above - 1, 0)
    middle = (_FINITE[above] + _FINITE[below]) / 2
    upward = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return (np.where(upward, above, below) + np.where(np.signbit(array), 128, 0)).astype(np.uint8)
