"""``kgen bench``: a pack's kernels, timed on this machine's GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    from kgen.measure import DeviceEvaluator
    from kgen.measure_job import Job, JobResult
    from kgen.runtime.pack_reader import Pack
    from kgen.spec import Spec


@dataclass(frozen=True)
class Row:
    """One timed call. ``gb_s`` is the least traffic of the call over its time; times are medians in microseconds."""

    layout: str
    point: Mapping[str, int]
    variant: str
    match: str
    time_us: float
    time_us_min: float
    time_us_max: float
    default_us: float
    gb_s: float


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
    json: JsonFlag = False,
) -> None:
    """Time a pack's kernels on this machine's GPU.

    What the pack dispatches to is timed beside the default candidate, on the first GPU.
    Each kernel is proven against the float64 reference first; times are medians of graph replays with a cold L2. Axes
    that are not given run over the spec's workload. Without a GPU there is nothing to time: this exits 1 and says so.

    \b
    Examples:
      kgen bench --layout h8_p1 --batch 4 --nodes 16 --prefix 16384
      kgen bench --pack my_pack --json

    One row a call goes to stdout; the tuning database is not touched.
    """
    from kgen.runtime.pack_reader import load_pack

    loaded = load(spec)
    fixed = point(loaded.family.axes, {"batch": batch, "nodes": nodes, "prefix": prefix}, at or [])
    points = _points(loaded, fixed)
    names = [name for name in layout or loaded.layouts if loaded.layout(name)]
    frozen = load_pack(pack or shipped_pack(loaded.family.name))
    with _evaluator(loaded) as evaluator, progress("bench") as advance:
        rows = []
        for row in _time_all(loaded, frozen, evaluator, names, points):
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


def _evaluator(spec: Spec) -> DeviceEvaluator:
    from kgen.measure import DeviceEvaluator

    capability, _ = first_gpu()
    for target in spec.targets.values():
        if target.compute_capability == capability:
            return DeviceEvaluator(target)
    known = ", ".join(target.nvcc_arch for target in spec.targets.values())
    seen = f"sm_{capability[0]}{capability[1]}; {spec.label} has {known}"
    raise DeviceError("GPU", "the spec has no target for it", seen=seen, remedy="add a target file (CONTRIBUTING.md)")


def _time_all(
    spec: Spec, pack: Pack, evaluator: DeviceEvaluator, names: Sequence[str], points: Sequence[Mapping[str, int]]
) -> Iterator[Row]:
    from kgen.runtime.dispatch import Dispatcher

    device = evaluator.fingerprint
    major, _, minor = device.compute_capability.partition(".")
    dispatcher = Dispatcher(pack.manifest.targets, pack.manifest.dispatch, pack.where)
    target = dispatcher.target((int(major), int(minor)), device.sms)
    for name in names:
        table = dispatcher.table(target, name)
        for item in points:
            match = table.lookup(item)
            labels = list(dict.fromkeys([match.variant, table.packed.default]))
            jobs = [_job(spec, pack, table.arch, name, label) for label in labels]
            results = evaluator.time_candidates(jobs, item)
            for result in results:
                _require_ok(result)
            yield _row(spec, name, item, match.variant, match.how, results)


def _job(spec: Spec, pack: Pack, arch: str, layout_name: str, label: str) -> Job:
    from kgen.measure_job import Job
    from kgen.runtime.manifest import cubin_path

    variant = pack.manifest.variants[label]
    return Job(
        name=f"{layout_name} {label}",
        family=spec.family.name,
        candidate=variant.candidate,
        layout=spec.layout(layout_name),
        cubin_path=str(Path(pack.where) / cubin_path(arch, variant.source)),
        cubin_sha256=pack.manifest.sources[variant.source].cubins[arch].sha256,
        tolerances=spec.tolerances,
    )


def _require_ok(result: JobResult) -> None:
    if result.status != "ok" or not result.times:
        raise DeviceError(result.job.name, f"not timed: {result.status}", seen=result.reason)


def _row(
    spec: Spec, layout_name: str, item: Mapping[str, int], variant: str, how: str, results: Sequence[JobResult]
) -> Row:
    time, default = results[0].times[0], results[-1].times[0]
    work = spec.family.work(spec.layout(layout_name), item)
    gb_s = work.bytes / time.time_us / 1e3
    return Row(layout_name, item, variant, how, time.time_us, time.time_us_min, time.time_us_max, default.time_us, gb_s)


def _print(rows: Sequence[Row], axes: Sequence[str]) -> None:
    columns = ["layout", *axes, "variant", "match", "time (us)", "min", "max", "default (us)", "GB/s"]
    write_table(columns, [
        (row.layout, *(row.point[axis] for axis in axes), row.variant, row.match, f"{row.time_us:.1f}",
         f"{row.time_us_min:.1f}", f"{row.time_us_max:.1f}", f"{row.default_us:.1f}", f"{row.gb_s:.0f}")
        for row in rows
    ])  # fmt: skip
