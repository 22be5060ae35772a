"""``kgen bench``: a pack's kernels, timed on this machine's GPU."""

from __future__ import annotations

from collections import Counter
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
from kgen.errors import DeviceError

if TYPE_CHECKING:
    from kgen.bench import Row
    from kgen.bench.peers import PeerTime
    from kgen.spec import Spec
    from kgen.targets import Target


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
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also time the kernels of others that can be imported here.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a roofline plot here, as SVG.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Time a pack's kernels on this machine's GPU, and the kernels of others beside them.

    What the pack dispatches to is timed with the default candidate in the same rounds, on the first GPU.
    Each kernel is proven against the float64 reference first; times are medians of graph replays with a cold L2. A call
    finds what calls with the same lengths share made already, as a layer of a forward does. Axes that are not given run
    over the spec's workload. Without a GPU there is nothing to time: this exits 1 and says so.
    Peers (SGLang, FlashInfer) are timed afterwards by the same protocol and keep no envelope; one that is not
    installed, fails or computes something else is named, and has no number.

    \b
    Examples:
      kgen bench --layout h8_p1 --batch 4 --nodes 16 --prefix 16384
      kgen bench --pack my_pack --envelope sm_120 --no-peers --json
      kgen bench --layout h8_p1 --plot roofline.svg

    One row a call goes to stdout, the plot to --plot; the tuning database is not touched.
    """
    from kgen.bench import device_target, time_calls
    from kgen.bench.roofline import check_can_plot, write_roofline
    from kgen.measure import DeviceEvaluator
    from kgen.runtime.pack_reader import load_pack

    if plot is not None:
        check_can_plot(plot)
    loaded = load(spec)
    fixed = point(loaded.family.axes, {"batch": batch, "nodes": nodes, "prefix": prefix}, at or [])
    points = _points(loaded, fixed)
    names = [name for name in layout or loaded.layouts if loaded.layout(name)]
    frozen = load_pack(pack or shipped_pack(loaded.family.name))
    frozen.require_interface(loaded.family.interface)
    target = device_target(loaded, first_gpu()[0])
    limits = loaded.target(envelope) if envelope else None
    with DeviceEvaluator(target, limits) as evaluator, progress("bench") as advance:
        rows = []
        for row in time_calls(loaded, frozen, evaluator, target, product(names, points)):
            rows.append(row)
            advance(len(rows), len(names) * len(points), row.layout)
        device = evaluator.fingerprint
    found, absent = _time_peers(loaded, target, names, points) if peers else ([], {})
    if plot is not None:
        write_roofline(plot, rows, target, device.name)
    if json:
        write_json({"device": device, "pack": frozen.where, "rows": rows, "peers": found, "absent_peers": absent})
        return
    typer.echo(f"{frozen.where} on {device.name}, compute capability {device.compute_capability}")
    _print(rows, found, loaded.family.axes)
    _print_peers(found, absent)


def _time_peers(
    spec: Spec, target: Target, names: Sequence[str], points: Sequence[Mapping[str, int]]
) -> tuple[list[PeerTime], dict[str, str]]:
    """The times of the peers that are here, and why the others are not, by name."""
    from kgen.bench.mla_peers import PEERS
    from kgen.bench.peers import time_peers
    from kgen.bench.torch_timer import TorchTimer

    known = [peer for peer in PEERS if peer.family == spec.family.name]
    absent = {peer.name: why for peer in known if (why := peer.missing(target.compute_capability))}
    here = [peer for peer in known if peer.name not in absent]
    if not here:
        return [], absent
    try:
        timer = TorchTimer()
    except DeviceError as error:
        return [], absent | {peer.name: str(error) for peer in here}
    found: list[PeerTime] = []
    with progress("peers") as advance:
        for one in time_peers(spec, here, timer, target, product(names, points)):
            found.append(one)
            advance(len(found), len(here) * len(names) * len(points), f"{one.peer} {one.layout}")
    return found, absent


def _points(spec: Spec, fixed: Mapping[str, int]) -> list[Mapping[str, int]]:
    """The workload's points with the given axes held at the given values."""
    points = [dict(item.point) | dict(fixed) for item in spec.workload.points]
    return [item for number, item in enumerate(points) if item not in points[:number]]


def _print(rows: Sequence[Row], found: Sequence[PeerTime], axes: Sequence[str]) -> None:
    """One row a call; a peer's column is its time over kgen's."""
    times = {(item.peer, item.layout, *item.point.values()): item for item in found}
    peers = list(dict.fromkeys(item.peer for item in found))
    columns = [
        "layout", *axes, "variant", "match", "time (us)", "spread (us)", "GB/s", "TFLOP/s", "of floor", "x default",
        *(f"x {peer}" for peer in peers), "error",
    ]  # fmt: skip
    write_table(columns, [
        (row.layout, *(row.point[axis] for axis in axes), row.variant, row.match, f"{row.time_us:.1f}",
         f"{row.time_us_min:.1f}-{row.time_us_max:.1f}", f"{row.gb_s:.0f}", f"{row.tflop_s:.1f}",
         f"{row.floor_us / row.time_us:.2f}", f"{row.default_us / row.time_us:.2f}",
         *(_ratio(times[peer, row.layout, *row.point.values()], row) for peer in peers), f"{row.relative_error:.1e}")
        for row in rows
    ])  # fmt: skip


def _ratio(peer: PeerTime, row: Row) -> str:
    return "-" if peer.time_us is None else f"{peer.time_us / row.time_us:.2f}"


def _print_peers(found: Sequence[PeerTime], absent: Mapping[str, str]) -> None:
    typer.echo("")
    typer.echo("of floor: share of what the device's memory and mma rates allow; x NAME: NAME's time over kgen's")
    for name, why in absent.items():
        typer.echo(f"not compared with {name}: {why}")
    failures = Counter((item.peer, item.reason) for item in found if item.reason)
    for (name, reason), count in failures.items():
        typer.echo(f"no time of {name} at {count} calls: {reason}")
