"""One JSON text for one value: what is hashed, compared, and kept under version control."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any


def plain(value: Any, where: str = "value") -> Any:
    """``value`` in JSON's own types: dataclasses and mappings become dicts, tuples lists, numpy scalars numbers.

    A negative zero becomes zero (as in RFC 8785), so that equal values have equal text. Raises ValueError that
    names the place for a number that is not finite, a key that is not a string, text that is not Unicode, and
    any other type.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name), f"{where}.{item.name}") for item in fields(value)}
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ValueError(f"{where}: a key that is not text, {odd[0]!r}")
        return {_plain_scalar(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return _plain_scalar(value, where)


def _plain_scalar(value: Any, where: str) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" or character == "\0" for character in value):
            raise ValueError(f"{where}: text with a NUL or an unpaired surrogate, {value!r}")
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ValueError(f"{where}: not a finite number, {float(value)}")
        return float(value) + 0.0
    raise ValueError(f"{where}: no JSON form, {type(value).__name__}")


def canonical_json(value: Any) -> bytes:
    """``value`` as UTF-8 JSON on one line: sorted keys, no spaces, floats by their shortest exact decimal.

    Equal values give equal bytes, and reading them back gives the values exactly. Raises ValueError as `plain` does.
    """
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def key_text(values: Mapping[str, Any]) -> str:
    """A mapping as ``name=value`` pairs, sorted by name, values in canonical JSON: ``stages=2,tile_m=64``."""
    return ",".join(f"{name}={canonical_json(values[name]).decode()}" for name in sorted(values))
