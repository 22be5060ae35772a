"""Which variant runs a call: the tuned points of a pack (or of the database) as a table that answers fast.

A value is matched to the nearest tuned value of its axis on a log2 scale; halfway goes up, and values outside the tuned
range go to its end. If a value is more than `REACH` times away from the tuned point, the default variant runs instead.
The standard library only.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any, Literal

from kgen.errors import ForeignArchError, LayoutMissingError
from kgen.runtime.manifest import PackedBucket, PackedLayout, PackedTarget, Value

REACH = 4
"""A tuned point speaks for values up to this factor away from it, on every axis."""

MEMO_ENTRIES = 4096
"""Answers that a table remembers; it starts over when they are used up."""

How = Literal["exact", "bucket", "default"]
Values = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """The answer of a lookup. ``point`` is the tuned point and ``evidence`` its winner's; both empty for a default.

    ``reason`` is empty, or the axis that was out of reach, or ``untuned``.
    """

    variant: str
    how: How
    point: Mapping[str, int]
    evidence: str
    reason: str = ""


@dataclass(frozen=True)
class Considered:
    """A tuned point beside the one asked for: ``distance`` is the sum over the axes of |log2(asked / tuned)|."""

    point: Mapping[str, int]
    variant: str
    evidence: str
    time_us: float
    tie: tuple[str, ...]
    distance: float | None


@dataclass(frozen=True)
class AxisMatch:
    """One axis of a lookup; ``log2_distance`` is None if one of the values is 0 and the other is not."""

    axis: str
    asked: int
    tuned: int | None
    log2_distance: float | None
    in_reach: bool


@dataclass(frozen=True)
class Explanation:
    """All that a lookup knew: the tuned points nearest first, so the runner-up is the second of ``considered``."""

    target: str
    arch: str
    layout: str
    match: Match
    axes: tuple[AxisMatch, ...]
    considered: tuple[Considered, ...]
    default: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Cell:
    """The tuned point for one combination of nearest axis values, how far it reaches, and the ready answers."""

    point: Values
    low: Values
    high: Values
    exact: Match
    bucket: Match


class Table:
    """The dispatch table of one target and head layout."""

    def __init__(self, target: str, arch: str, layout_name: str, packed: PackedLayout) -> None:
        self.target, self.arch, self.layout_name, self.packed = target, arch, layout_name, packed
        self.axes: tuple[str, ...] = tuple(packed.axes)
        self._tallies: dict[tuple[str, str], list[int]] = {}
        self._memo: dict[Values, tuple[Match, list[int]]] = {}
        self._grid = tuple(packed.axes[axis] for axis in self.axes)
        self._thresholds = tuple(_thresholds(values) for values in self._grid)
        self._defaults = tuple(Match(packed.default, "default", {}, "", axis) for axis in self.axes)
        self._untuned = Match(packed.default, "default", {}, "", "untuned")
        self._cells = self._build_cells(packed.buckets)

    def match(self, values: Values) -> Match:
        """The variant for one value of each axis, in the order of ``axes``."""
        known = self._memo.get(values)
        if known is None:
            found = self._search(values)
            known = found, self._tallies.setdefault((found.how, found.reason), [0])
            if len(self._memo) >= MEMO_ENTRIES:
                self._memo.clear()
            self._memo[values] = known
        known[1][0] += 1
        return known[0]

    def lookup(self, point: Mapping[str, int]) -> Match:
        """`match` by axis name; KeyError names an axis that is missing."""
        return self.match(tuple([point[axis] for axis in self.axes]))

    @property
    def counts(self) -> dict[str, int]:
        """How many answers there were, by ``how``, and for a default by ``default:reason``."""
        counts: Counter[str] = Counter()
        for (how, reason), (count,) in self._tallies.items():
            counts[how] += count
            if reason:
                counts[f"{how}:{reason}"] += count
        return dict(counts)

    def reachable(self, capacity: Mapping[str, int]) -> tuple[str, ...]:
        """Every variant that some call within ``capacity`` (the largest value of each axis) can get; default first."""
        last = [bisect_right(limits, capacity[axis]) for limits, axis in zip(self._thresholds, self.axes, strict=True)]
        names = dict.fromkeys([self.packed.default])
        for index, cell in self._cells.items():
            if all(at <= end for at, end in zip(index, last, strict=True)):
                names[cell.bucket.variant] = None
        return tuple(names)

    def explain(self, point: Mapping[str, int]) -> Explanation:
        """The facts behind `lookup`; not counted, and not fast."""
        values = self._values(point)
        match = self._search(values)
        cell = self._cell_of(values)
        axes = []
        for index, axis in enumerate(self.axes):
            tuned = cell.point[index] if cell else None
            reach = cell is not None and cell.low[index] <= values[index] <= cell.high[index]
            apart = None if tuned is None else _finite(_log2_distance(values[index], tuned))
            axes.append(AxisMatch(axis, values[index], tuned, apart, reach))
        considered = sorted((self._consider(bucket, values) for bucket in self.packed.buckets), key=self._nearest_first)
        return Explanation(
            self.target, self.arch, self.layout_name, match, tuple(axes), tuple(considered), self.packed.default
        )

    def _cell_of(self, values: Values) -> _Cell | None:
        return self._cells.get(tuple(map(bisect_right, self._thresholds, values)))

    def _search(self, values: Values) -> Match:
        cell = self._cell_of(values)
        if cell is None:
            return self._untuned
        if cell.point == values:
            return cell.exact
        for index, value in enumerate(values):
            if not cell.low[index] <= value <= cell.high[index]:
                return self._defaults[index]
        return cell.bucket

    def _build_cells(self, buckets: Sequence[PackedBucket]) -> dict[Values, _Cell]:
        """A cell for every combination of axis values; one without a tuned point of its own takes the nearest."""
        tuned = {self._values(bucket.point): bucket for bucket in buckets}
        cells = {}
        if tuned:
            for index in product(*(range(len(values)) for values in self._grid)):
                asked = tuple(values[at] for values, at in zip(self._grid, index, strict=True))
                point = asked if asked in tuned else min(tuned, key=lambda p, asked=asked: _order(asked, p))  # type: ignore[misc]
                cells[index] = self._cell(point, tuned[point])
        return cells

    def _cell(self, values: Values, bucket: PackedBucket) -> _Cell:
        return _Cell(
            point=values,
            low=tuple(-(-value // REACH) for value in values),
            high=tuple(value * REACH for value in values),
            exact=Match(bucket.variant, "exact", bucket.point, bucket.evidence),
            bucket=Match(bucket.variant, "bucket", bucket.point, bucket.evidence),
        )

    def _values(self, point: Mapping[str, int]) -> Values:
        return tuple(point[axis] for axis in self.axes)

    def _consider(self, bucket: PackedBucket, asked: Values) -> Considered:
        distance = _finite(_distance(asked, self._values(bucket.point)))
        return Considered(bucket.point, bucket.variant, bucket.evidence, bucket.time_us, bucket.tie, distance)

    def _nearest_first(self, item: Considered) -> tuple[float, Values]:
        apart = math.inf if item.distance is None else item.distance
        return apart, tuple(-value for value in self._values(item.point))


class Dispatcher:
    """The tables of one pack, by target and head layout. ``misses`` counts refusals by name."""

    def __init__(
        self, targets: Mapping[str, PackedTarget], dispatch: Mapping[str, Mapping[str, PackedLayout]], where: str
    ) -> None:
        self._targets, self._dispatch, self._where = targets, dispatch, where
        self._tables: dict[tuple[str, str], Table] = {}
        self.misses: Counter[str] = Counter()

    def target(self, capability: tuple[int, int], sms: int = 0, named: str | None = None) -> str:
        """The target whose cubins a device runs: the one of the closest arch, then of the closest SM count.

        A cubin runs on its own and on higher minor versions of the same major one; those of ``sm_120a`` kind on their
        own only, those of ``sm_120f`` kind as plain ones. ``named`` is the only target to consider, where given.
        Raises ForeignArchError that lists what the pack has.
        """
        fitting = [
            name for name in self._dispatch if name == (named or name) and runs_on(self._targets[name].arch, capability)
        ]
        if not fitting:
            self.misses["foreign_arch"] += 1
            has = ", ".join(sorted({self._targets[name].arch for name in self._dispatch})) or "nothing"
            seen = f"the device is sm_{capability[0]}{capability[1]} and the pack has {has}"
            remedy = f"kgen emit --target for sm_{capability[0]}{capability[1]}"
            raise ForeignArchError(self._where, "no cubins for this device", seen=seen, remedy=remedy)

        def fit(name: str) -> tuple[int, int, str]:
            _, minor = arch_capability(self._targets[name].arch)
            return -minor, abs(self._targets[name].sms - sms) if sms else 0, name

        return min(fitting, key=fit)

    def table(self, target: str, layout: Mapping[str, Value] | str) -> Table:
        """The table of a target and a layout: its name, or fields that only it has.

        Raises LayoutMissingError that lists the layouts of the target, ForeignArchError if there is no such target.
        """
        if target not in self._dispatch:
            self.misses["foreign_arch"] += 1
            remedy = f"it has {', '.join(sorted(self._dispatch)) or 'none'}"
            raise ForeignArchError(self._where, "no such target", seen=repr(target), remedy=remedy)
        layouts = self._dispatch[target]
        if isinstance(layout, str):
            names = [name for name in layouts if name == layout]
        else:
            names = [name for name, table in layouts.items() if layout.items() <= table.layout.items()]
        if len(names) != 1:
            self.misses["layout_missing"] += 1
            wrong = f"no head layout {layout!r}" if not names else f"{layout!r} fits more than one head layout"
            held = "; ".join(f"{name}: {_fields(table.layout)}" for name, table in sorted(layouts.items()))
            raise LayoutMissingError(self._where, f"{wrong} for {target}", remedy=f"it has {held or 'none'}")
        key = target, names[0]
        if key not in self._tables:
            self._tables[key] = Table(target, self._targets[target].arch, names[0], layouts[names[0]])
        return self._tables[key]


def arch_capability(arch: str) -> tuple[int, int]:
    """Compute capability of ``sm_120``, ``sm_90a``: (12, 0), (9, 0)."""
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    assert found is not None, arch
    return int(found[1]), int(found[2])


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether cubins of ``arch`` load on a device (CUDA's binary compatibility rules)."""
    major, minor = arch_capability(arch)
    if arch.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def _fields(layout: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(layout.items()))


def _thresholds(values: Sequence[int]) -> tuple[int, ...]:
    """The least whole numbers that are nearer to each next tuned value: x >= sqrt(a b); all but 0 leave a tuned 0."""
    return tuple(max(1, math.isqrt(a * b - 1) + 1 if a else 1) for a, b in pairwise(values))


def _log2_distance(one: int, other: int) -> float:
    if one == other:
        return 0.0
    return abs(math.log2(one / other)) if one and other else math.inf


def _distance(asked: Values, tuned: Values) -> float:
    return sum(_log2_distance(a, b) for a, b in zip(asked, tuned, strict=True))


def _order(asked: Values, tuned: Values) -> tuple[float, Values]:
    """Sort key: nearest first, the larger point of two equally near ones."""
    return round(_distance(asked, tuned), 9), tuple(-value for value in tuned)


def _finite(distance: float) -> float | None:
    return distance if math.isfinite(distance) else None
