"""e4m3 (OCP FP8: 4 exponent bits, 3 mantissa bits, no infinities) on the host, as uint8: numpy has no such type."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _finite_values() -> Array:
    """What the bits 0 to 126 mean, ascending: a subnormal counts in 2^-9, others are (1 + m / 8) 2^(e - 7)."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))


_VALUES = np.concatenate([_finite_values(), [np.nan], -_finite_values(), [np.nan]])
_LARGEST, _LEAST_NORMAL = np.array([448, 2**-6], np.float32).view(np.uint32)


def from_e4m3(array: Array) -> Array:
    """e4m3 bits (uint8) to float64, exactly."""
    values: Array = _VALUES[array]
    return values


def to_e4m3(array: Array) -> Array:
    """float32 to e4m3 bits (uint8), rounded to nearest even; what is larger becomes 448. NaN is not expected."""
    bits = array.astype(np.float32).view(np.uint32)
    magnitude = np.minimum(bits & 0x7FFFFFFF, _LARGEST)
    normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)  # the exponents' biases differ by 120
    subnormal = np.rint(magnitude.view(np.float32) * 512).astype(np.uint32)
    rounded: Array = np.where(magnitude < _LEAST_NORMAL, subnormal, normal) | bits >> 24 & 0x80
    return rounded.astype(np.uint8)
