"""``kgen bench``: a pack's kernels, timed on this machine's GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, progress, write_json, write_table
from kgen.cli.options import (
    DEFAULT_SPEC,
    AtFlag,
    BatchFlag,
    LayoutsFlag,
    NodesFlag,
    PrefixFlag,
    SpecFlag,
    first_gpu,
    load,
    point,
    shipped_pack,
)

if TYPE_CHECKING:
    from kgen.bench import Row
    from kgen.spec import Spec


def bench(
    spec: SpecFlag = DEFAULT_SPEC,
    pack: Annotated[
        Path | None, typer.Option("--pack", metavar="DIR", help="Pack to time. Default: the one that kgen ships.")
    ] = None,
    layout: LayoutsFlag = None,
    batch: BatchFlag = None,
    nodes: NodesFlag = None,
    prefix: PrefixFlag = None,
    at: AtFlag = None,
    envelope: Annotated[
        str | None, typer.Option("--envelope", metavar="NAME", help="Target whose occupancy every launch keeps.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Time a pack's kernels on this machine's GPU.

    What the pack dispatches to is timed beside the default candidate, on the first GPU.
    Each kernel is proven against the float64 reference first; times are medians of graph replays with a cold L2. Axes
    that are not given run over the spec's workload. Without a GPU there is nothing to time: this exits 1 and says so.

    \b
    Examples:
      kgen bench --layout h8_p1 --batch 4 --nodes 16 --prefix 16384
      kgen bench --pack my_pack --envelope sm_120 --json

    One row a call goes to stdout; the tuning database is not touched.
    """
    from kgen.bench import device_target, time_calls
    from kgen.measure import DeviceEvaluator
    from kgen.runtime.pack_reader import load_pack

    loaded = load(spec)
    fixed = point(loaded.family.axes, {"batch": batch, "nodes": nodes, "prefix": prefix}, at or [])
    points = _points(loaded, fixed)
    names = [name for name in layout or loaded.layouts if loaded.layout(name)]
    frozen = load_pack(pack or shipped_pack(loaded.family.name))
    target = device_target(loaded, first_gpu()[0])
    limits = loaded.target(envelope) if envelope else None
    with DeviceEvaluator(target, limits) as evaluator, progress("bench") as advance:
        rows = []
        for row in time_calls(loaded, frozen, evaluator, target, product(names, points)):
            rows.append(row)
            advance(len(rows), len(names) * len(points), row.layout)
        device = evaluator.fingerprint
    if json:
        write_json({"device": device, "pack": frozen.where, "rows": rows})
        return
    typer.echo(f"{frozen.where} on {device.name}, compute capability {device.compute_capability}")
    _print(rows, loaded.family.axes)


def _points(spec: Spec, fixed: Mapping[str, int]) -> list[Mapping[str, int]]:
    """The workload's points with the given axes held at the given values."""
    points = [dict(item.point) | dict(fixed) for item in spec.workload.points]
    return [item for number, item in enumerate(points) if item not in points[:number]]


def _print(rows: Sequence[Row], axes: Sequence[str]) -> None:
    columns = [
        "layout",
        *axes,
        "variant",
        "match",
        "time (us)",
        "min",
        "max",
        "default (us)",
        "x floor",
        "GB/s",
        "TFLOP/s",
    ]
    write_table(columns, [
        (row.layout, *(row.point[axis] for axis in axes), row.variant, row.match, f"{row.time_us:.1f}",
         f"{row.time_us_min:.1f}", f"{row.time_us_max:.1f}", f"{row.default_us:.1f}",
         f"{row.time_us / row.floor_us:.1f}", f"{row.gb_s:.0f}", f"{row.tflop_s:.0f}")
        for row in rows
    ])  # fmt: skip
