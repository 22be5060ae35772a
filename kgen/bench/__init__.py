"""Timing a pack's kernels on a GPU: what it dispatches to, beside its default; then the kernels of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.errors import DeviceError
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult
from kgen.model import floor_us
from kgen.runtime.manifest import cubin_path

if TYPE_CHECKING:
    from kgen.family import Point
    from kgen.runtime.pack_reader import Pack
    from kgen.spec import Spec
    from kgen.targets import Target

BenchCall = tuple[str, "Point"]
"""A layout's name and a workload point."""


@dataclass(frozen=True)
class Row:
    """One timed call. Times are medians in microseconds, ``floor_us`` what the device's memory and mma rates allow.

    ``intensity`` is operations a byte, of the least that has to be moved.
    ``relative_error`` is of what the timed launches computed (relative L2, against the float64 reference).
    A call finds what calls with the same lengths share made already, as a layer of a forward does; ``alone_us`` is the
    median of calls that do without, where it was asked for.
    """

    layout: str
    point: Mapping[str, int]
    variant: str
    match: str
    time_us: float
    time_us_min: float
    time_us_max: float
    default_us: float
    floor_us: float
    gb_s: float
    tflop_s: float
    intensity: float
    relative_error: float
    registers: int
    shared_bytes: int
    blocks_per_sm: int
    alone_us: float | None = None


def device_target(spec: Spec, capability: tuple[int, int]) -> Target:
    """The spec's target of a device; DeviceError where it has none."""
    for target in spec.targets.values():
        if target.compute_capability == capability:
            return target
    known = ", ".join(target.nvcc_arch for target in spec.targets.values())
    seen = f"sm_{capability[0]}{capability[1]}; {spec.label} has {known}"
    raise DeviceError("GPU", "the spec has no target for it", seen=seen, remedy="add a target file (CONTRIBUTING.md)")


def time_calls(
    spec: Spec,
    pack: Pack,
    evaluator: DeviceEvaluator,
    target: Target,
    calls: Iterable[BenchCall],
    *,
    alone: bool = False,
) -> Iterator[Row]:
    """Prove and time every call on the evaluator's device, of which ``target`` has the rates.

    With ``alone``, in the same rounds also calls of the same variant that share nothing.
    Raises DeviceError where a kernel is wrong or does not run.
    """
    dispatcher = pack.dispatcher()
    named = dispatcher.target(target.compute_capability, evaluator.fingerprint.sms)
    for name, point in calls:
        table = dispatcher.table(named, name)
        match = table.lookup(point)
        labels = list(dict.fromkeys([match.variant, table.packed.default]))
        jobs = [_job(spec, pack, table.arch, name, label) for label in labels]
        lone = [replace(jobs[0], name=f"{jobs[0].name} alone", alone=True)] if alone else []
        results = evaluator.time_candidates(jobs + lone, point)
        for result in results:
            if result.status != "ok" or not result.times:
                raise DeviceError(result.job.name, f"not timed: {result.status}", seen=result.reason)
        row = _row(spec, target, name, point, match.how, results[: len(jobs)])
        yield replace(row, alone_us=results[-1].times[0].time_us) if alone else row


def _job(spec: Spec, pack: Pack, arch: str, layout_name: str, label: str) -> Job:
    variant = pack.manifest.variants[label]
    major, minor = pack.manifest.archs[arch].min_cuda
    return Job(
        name=f"{layout_name} {label}",
        family=spec.family.name,
        candidate=variant.candidate,
        layout=spec.layout(layout_name),
        cubin_path=str(Path(pack.where) / cubin_path(arch, variant.source)),
        cubin_sha256=pack.manifest.sources[variant.source].cubins[arch].sha256,
        tolerances=spec.tolerances,
        minimum_cuda=(major, minor),
    )


def _row(spec: Spec, target: Target, layout_name: str, point: Point, how: str, results: Sequence[JobResult]) -> Row:
    best, time, default = results[0], results[0].times[0], results[-1].times[0]
    work = spec.family.work(spec.layout(layout_name), point)
    resources = best.resources
    assert resources is not None, "what was timed was loaded"
    assert time.relative_error is not None, "what was timed was confirmed"
    return Row(
        layout=layout_name,
        point=dict(point),
        variant=best.job.name.split(" ", 1)[1],
        match=how,
        time_us=time.time_us,
        time_us_min=time.time_us_min,
        time_us_max=time.time_us_max,
        default_us=default.time_us,
        floor_us=floor_us(target, flop=work.flop, bytes_moved=work.bytes),
        gb_s=work.bytes / time.time_us / 1e3,
        tflop_s=work.flop / time.time_us / 1e6,
        intensity=work.flop / work.bytes,
        relative_error=time.relative_error,
        registers=resources.registers,
        shared_bytes=resources.shared_bytes,
        blocks_per_sm=resources.blocks_per_sm,
    )
