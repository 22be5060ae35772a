"""The shapes that a server meets: from what it captured, or from its arguments; and a spec weighted by them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from kgen.errors import InputError
from kgen.spec import Spec

DOUBLINGS = 31
"""Powers of two that an axis of whole int32 numbers can hold."""


@dataclass(frozen=True)
class Shape:
    """A workload point of a head layout."""

    layout: str
    point: tuple[tuple[str, int], ...]

    def as_point(self) -> dict[str, int]:
        """Axis to value."""
        return dict(self.point)


def read_capture(path: Path, family: str) -> Counter[Shape]:
    """How often each shape of a family occurs in a capture; a request batch counts by its mean prefix.

    Raises InputError that names the line which is no record, or the file if it has none of the family.
    """
    shapes: Counter[Shape] = Counter()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):  # a server is writing it, or was stopped
                    break
                record = _record(line, f"{path}:{number}")
                if record["family"] == family:
                    shapes[_shape(record, f"{path}:{number}")] += 1
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), "cannot be read", seen=str(error)) from None
    if not shapes:
        raise InputError(str(path), f"holds no shapes of {family}", remedy="docs/sglang.md says how to capture some")
    return shapes


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("family"), str):
            return record
    except (ValueError, RecursionError):  # no JSON; numbers or brackets beyond what Python reads
        pass
    raise InputError(where, "is no record of a captured shape", seen=repr(line.strip()[:60]))


def _shape(record: Mapping[str, Any], where: str) -> Shape:
    layout, batch, nodes, prefixes = (record.get(name) for name in ("layout", "batch", "nodes", "prefixes"))
    numbers: list[Any] = [batch, nodes, *prefixes] if isinstance(prefixes, list) and prefixes else [None]
    whole = all(type(value) is int and 0 <= value < 1 << DOUBLINGS for value in numbers)
    if not isinstance(layout, str) or not layout.isprintable() or not whole:
        raise InputError(where, "lacks a layout, batch, nodes or prefixes", seen=str(dict(record))[:80])
    batch, nodes, *prefixes = numbers
    mean = round(sum(prefixes) / len(prefixes))
    return Shape(layout, (("batch", batch), ("nodes", nodes), ("prefix", mean)))


def reachable_shapes(layout: str, *, most_batch: int, nodes: int, most_prefix: int) -> Iterator[Shape]:
    """The shapes of a server's arguments: every batch and prefix that is a power of two, and the largest ones."""
    for batch in _doublings(most_batch):
        for prefix in _doublings(most_prefix):
            yield Shape(layout, (("batch", batch), ("nodes", nodes), ("prefix", prefix)))


def _doublings(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(DOUBLINGS) if 1 << power <= most)})


def weighted_by(spec: Spec, shapes: Mapping[Shape, int]) -> Spec:
    """``spec`` whose workload weighs each point by how often traffic was nearest to it, on a log2 scale of each axis.

    Every point keeps the weight of one occurrence, so that rare shapes are not given up. Layouts that the spec lacks
    are ignored; InputError if that leaves nothing.
    """
    known = {shape: count for shape, count in shapes.items() if shape.layout in spec.layouts}
    if not known:
        seen = ", ".join(sorted({shape.layout for shape in shapes}))
        raise InputError("--workload", f"names no head layout of {spec.label}", seen=seen)
    axes = spec.workload.axes
    counts = dict.fromkeys(product(*axes.values()), 1.0)
    for shape, count in known.items():
        asked = shape.as_point()
        counts[tuple(_nearest(asked[axis], tuned) for axis, tuned in axes.items())] += count
    return replace(spec, workload=replace(spec.workload, of_points=counts))


def _nearest(value: int, tuned: tuple[int, ...]) -> int:
    return min(tuned, key=lambda item: (abs(math.log2(max(value, 1) / max(item, 1))), -item))
