"""e4m3 on the host, against torch."""

from __future__ import annotations

import numpy as np
import torch

from kgen.e4m3 import from_e4m3, to_e4m3


def test_every_value() -> None:
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(from_e4m3(bits), torch.from_numpy(bits).view(torch.float8_e4m3fn).double().numpy())


def test_rounding() -> None:
    finite = from_e4m3(np.arange(127, dtype=np.uint8))
    middles = (finite[1:] + finite[:-1]) / 2
    random = np.random.default_rng(0)
    drawn = random.standard_normal(5000) * 2.0 ** random.integers(-12, 9, 5000)
    values = np.concatenate([finite, middles, middles * 1.0001, middles * 0.9999, np.clip(drawn, -448, 448), [-0.0]])
    values = np.concatenate([values, -values])
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_e4m3(values), expected)


def test_what_is_larger_becomes_the_largest() -> None:
    assert from_e4m3(to_e4m3(np.array([449.0, 1e6, -np.inf]))).tolist() == [448, 448, -448]
