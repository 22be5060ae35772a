"""The winners of a tuning run at a glance: a row for each kernel of a layout, not one for each workload point."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.db.winners import Winner
    from kgen.family import Point
    from kgen.spec import Spec
    from kgen.tune import TuneReport

LEGEND = """\
wins at: at how many points of the workload the kernel is the fastest; the axes show its heartland, the largest
block of points that it wins without exception; x default: how many times as fast as the spec's default candidate;
x floor: its time over the least that the target allows (docs/model.md), none for a proxy, which another chip timed"""

Row = tuple[str, ...]


def winner_table(spec: Spec, report: TuneReport) -> tuple[list[str], list[Row]]:
    """Column names and rows, by layout, the kernel that wins most points first; layouts with equal rows share them."""
    by_layout: dict[str, list[Winner]] = defaultdict(list)
    for winner in report.winners:
        by_layout[winner.layout_name].append(winner)
    sharing: dict[tuple[Row, ...], list[str]] = defaultdict(list)
    for name, winners in by_layout.items():
        sharing[tuple(_rows(spec, winners, report.floors_us[name], report.default_us[name]))].append(name)
    columns = ["layout", "kernel", "wins at", *spec.family.axes, "time (us)", "x default", "x floor"]
    return (
        [*columns, "evidence", "proven on"],
        [(", ".join(names), *row) for rows, names in sharing.items() for row in rows],
    )


def _rows(
    spec: Spec, winners: Sequence[Winner], floors_us: Sequence[float], default_us: Sequence[float]
) -> Iterator[Row]:
    """The rows of one layout, without its name."""
    groups: dict[tuple[str, str, str], list[Winner]] = defaultdict(list)
    for winner in winners:
        groups[spec.family.label(winner.candidate), winner.evidence, winner.checked_on].append(winner)
    points = [dict(item.point) for item in spec.workload.points]
    for (label, evidence, checked_on), won in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        places = [points.index(dict(winner.point)) for winner in won]
        times_us = [winner.time_us for winner in won]
        beside_us = [
            winner.reference_us or (default_us[place] if default_us else winner.time_us)
            for winner, place in zip(won, places, strict=True)
        ]
        block = largest_block(spec.workload.axes, [winner.point for winner in won])
        yield (
            label,
            f"{len(won)} of {len(points)}",
            *(_span(spec.workload.axes[axis], block[axis]) for axis in spec.family.axes),
            _between(min(times_us), max(times_us)),
            _mean_ratio(beside_us, times_us, ".2f"),
            "-" if evidence == "proxy" else _mean_ratio(times_us, [floors_us[place] for place in places], ".1f"),
            evidence,
            checked_on,
        )


def largest_block(axes: Mapping[str, Sequence[int]], points: Sequence[Point]) -> dict[str, tuple[int, ...]]:
    """The values by axis, without a gap, of the most points of which all are among ``points``; the first of equals."""
    among = {tuple(point[axis] for axis in axes) for point in points}
    best: tuple[tuple[int, ...], ...] = ()
    for block in product(*(list(_runs(values)) for values in axes.values())):
        larger = math.prod(map(len, block)) > math.prod(map(len, best)) or not best
        if larger and all(point in among for point in product(*block)):
            best = block
    return dict(zip(axes, best, strict=True))


def _runs(values: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """All runs of neighbours among the sorted values."""
    ordered = sorted(values)
    for first, last in combinations_with_replacement(range(len(ordered)), 2):
        yield tuple(ordered[first : last + 1])


def _span(axis: Sequence[int], run: Sequence[int]) -> str:
    if len(run) == len(axis) > 1:
        return "any"
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _between(least: float, most: float) -> str:
    low, high = f"{least:.1f}", f"{most:.1f}"
    return low if low == high else f"{low}-{high}"


def _mean_ratio(of: Sequence[float], to: Sequence[float], form: str) -> str:
    """The geometric mean of ratios."""
    return format(math.exp(sum(math.log(a / b) for a, b in zip(of, to, strict=True)) / len(of)), form)
