"""The worker's side on a GPU: inputs that leave the L2 cache cold, graphs of launches, and their timing."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kgen.device import ArgumentBuffer, Device, DeviceBuffer, Event, Graph, Stream
from kgen.device.envelope import LoadedKernels, load_kernels
from kgen.errors import DeviceError
from kgen.family import Family, Launch, Plan, find_family
from kgen.measure.inputs import PointInputs
from kgen.measure.job import Job, LoadedResources, key_of, target_from_json
from kgen.measure.timing import launches_per_replay
from kgen.model import floor_us
from kgen.targets import Target
from kgen.validate import Problems, validate
from kgen.validate.launchers import WORKSPACE_POISON, DeviceLauncher

CANARY_BYTES = 256 << 20
CANARY_REPLAYS = 21
MEMORY_SHARE = 0.6  # of the device memory that is free at the start, for inputs
IDLE_S = 0.02  # a device that did nothing for longer is warmed up before it is timed
WARMUP_S = 0.05


@dataclass
class _Armed:
    """A job's launches at one point, captured."""

    point_key: str
    graph: Graph
    launches: int
    workspace: Mapping[str, DeviceBuffer]

    def free(self) -> None:
        self.graph.destroy()
        for buffer in self.workspace.values():
            buffer.free()


@dataclass
class _Loaded:
    job: Job
    family: Family
    kernels: LoadedKernels
    armed: dict[str, _Armed]


class DeviceBackend:
    """Measures on one GPU; see `kgen.measure.worker.Backend` for the protocol."""

    device: Device
    stream: Stream
    _limits: Target

    def __init__(self) -> None:
        self._jobs: dict[str, _Loaded] = {}
        self._points: dict[str, PointInputs] = {}
        self._problems: dict[str, Problems] = {}
        self._canary_buffers: tuple[DeviceBuffer, DeviceBuffer] | None = None
        self._budget_bytes = 0
        self._busy_at = -float("inf")
        self._envelope: Target | None = None

    def open(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the device and make a stream; refuses a device of another architecture than the target."""
        self.device = Device.open(settings["ordinal"])
        self.stream = Stream()
        self._budget_bytes = int(self.device.free_bytes() * MEMORY_SHARE)
        self._limits = target_from_json(settings["target"])
        self._envelope = target_from_json(settings["envelope"]) if settings["envelope"] else None
        if self._limits.compute_capability != self.device.compute_capability:
            raise DeviceError(
                f"device {settings['ordinal']}",
                f"is not of target {self._limits.name}",
                seen=f"it is {self.device.arch}",
                remedy="name the target of this device",
            )
        return dataclasses.asdict(self.device.fingerprint())

    def load(self, job: Job) -> Mapping[str, int]:
        """Load a cubin whose bytes are those that were built."""
        try:
            cubin = Path(job.cubin_path).read_bytes()
        except OSError as error:
            raise DeviceError(job.cubin_path, "cannot be read", seen=str(error), remedy="build it again") from error
        found = hashlib.sha256(cubin).hexdigest()
        if found != job.cubin_sha256:
            raise DeviceError(job.cubin_path, "is not the cubin that was built", seen=found, remedy="build it again")
        family = find_family(job.family, f"job {job.name}")
        kernels = load_kernels(
            self.device,
            cubin,
            family.kernels(job.candidate, job.layout),
            envelope=self._envelope,
            limits=self._limits,
            minimum_cuda=job.minimum_cuda,
        )
        self._jobs[job.name] = _Loaded(job, family, kernels, {})
        main = family.kernels(job.candidate, job.layout)[0].entry
        function = kernels.functions[main]
        return dataclasses.asdict(
            LoadedResources(
                function.registers, kernels.shared_bytes[main], function.local_bytes, kernels.resident_blocks
            )
        )

    def check(self, name: str) -> Mapping[str, Any]:
        """Validate on the family's cases, replays with changed lengths included."""
        loaded = self._jobs[name]
        job = loaded.job
        key = key_of(job.family, dict(job.layout))
        problems = self._problems.setdefault(key, Problems(loaded.family, job.layout))
        verdict = validate(
            loaded.family,
            job.candidate,
            job.layout,
            job.tolerances,
            DeviceLauncher(self.device, loaded.kernels),
            target_sms=self.device.sms,
            resident_blocks=loaded.kernels.resident_blocks,
            problems=problems,
        )
        worst = verdict.worst
        finite = worst is not None and np.isfinite(worst.relative_l2)
        return {
            "ok": verdict.ok,
            "reason": verdict.reason,
            "relative_error": worst.relative_l2 if worst is not None and finite else None,
        }

    def prepare(self, family: str, layout: Mapping[str, Any], point: Mapping[str, int]) -> None:
        """Put a point's inputs on the device; they stay for later jobs while there is room."""
        key = key_of(family, dict(layout), dict(point))
        if key in self._points:
            self._points[key] = self._points.pop(key)  # now the most recently used
            return
        self._make_room()
        self._points[key] = PointInputs.make(
            self.device, self.stream, find_family(family, "request"), layout, point, self._budget_bytes
        )

    def _make_room(self) -> None:
        """Free the points that were used least recently until at most half of the budget is taken."""
        used = {armed.point_key for loaded in self._jobs.values() for armed in loaded.armed.values()}
        for key in [key for key in self._points if key not in used]:
            if 2 * sum(prepared.arena.size_bytes for prepared in self._points.values()) <= self._budget_bytes:
                return
            self._points.pop(key).free()

    def arm(self, name: str, point: Mapping[str, int]) -> None:
        """Capture the job's launches over all input sets, often enough for a graph worth timing.

        What calls with the same lengths share is made once, before and outside of the graph: a call is timed as a layer
        of a forward sees it, which finds it made. All input sets have the same lengths.
        """
        loaded = self._jobs[name]
        job, family = loaded.job, loaded.family
        key = key_of(job.family, dict(job.layout), dict(point))
        prepared = self._points[key]
        plan = family.plan(
            job.candidate,
            job.layout,
            family.capacity(prepared.case),
            sms=self.device.sms,
            resident_blocks=loaded.kernels.resident_blocks,
        )
        plan = plan.alone() if job.alone else plan
        workspace = {name: self.device.allocate(size) for name, size in plan.workspace_bytes.items()}
        for buffer in workspace.values():
            self.device.fill(buffer.address, WORKSPACE_POISON, buffer.size_bytes, self.stream)
        self._put_rotation(loaded, plan, plan.shared_launches, prepared, workspace, sets=1)
        self.stream.synchronize()
        floor_us, in_place = self._floor_us(loaded, point), bool(prepared.inouts)
        launches = launches_per_replay(prepared.sets, floor_us, in_place=in_place)
        graph = Graph()
        armed = _Armed(key, graph, launches, workspace)
        loaded.armed[key_of(dict(point))] = armed
        with graph.capture(self.stream):
            for _ in range(launches // prepared.sets):
                self._put_rotation(loaded, plan, plan.launches, prepared, workspace, sets=prepared.sets)

    def _floor_us(self, loaded: _Loaded, point: Mapping[str, int]) -> float:
        work = loaded.family.work(loaded.job.layout, point)
        return floor_us(self._limits, flop=work.flop, bytes_moved=work.bytes)

    def _put_rotation(
        self,
        loaded: _Loaded,
        plan: Plan,
        launches: Sequence[Launch],
        prepared: PointInputs,
        workspace: Mapping[str, DeviceBuffer],
        *,
        sets: int,
    ) -> None:
        """Launch once on each of the first ``sets`` input sets; the driver copies the arguments of a launch."""
        launcher = DeviceLauncher(self.device, loaded.kernels)
        params = loaded.family.params
        arguments = ArgumentBuffer(params.size_bytes)
        fixed: dict[str, int | float] = {item.name: 0 for item in params.parameters if item.kind == "pointer"}
        fixed |= {name: buffer.address for name, buffer in workspace.items()}
        for index in range(sets):
            values = {**fixed, **prepared.scalars, **plan.scalars, **prepared.pointers(index)}
            arguments.view[:] = params.pack(values)
            launcher.put(launches, arguments, self.stream)

    def sample(self, name: str, point: Mapping[str, int], replays: int) -> list[float]:
        """Microseconds a launch, in each of ``replays`` replays, on a warm device."""
        armed = self._jobs[name].armed[key_of(dict(point))]
        self._warm(armed.graph)
        return [time_us / armed.launches for time_us in self._timed(armed.graph, replays)]

    def _warm(self, graph: Graph) -> None:
        """Replay untimed for `WARMUP_S` where the device was idle, since its clocks may have dropped."""
        if time.monotonic() - self._busy_at <= IDLE_S:
            return
        end = time.monotonic() + WARMUP_S
        while True:
            graph.launch(self.stream)
            self.stream.synchronize()
            if time.monotonic() >= end:
                return

    def _timed(self, graph: Graph, replays: int) -> list[float]:
        start, end, times_us = Event(), Event(), []
        for _ in range(replays):
            start.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times_us.append(end.microseconds_since(start))
        start.destroy()
        end.destroy()
        self._busy_at = time.monotonic()
        return times_us

    def confirm(self, name: str, point: Mapping[str, int]) -> Mapping[str, Any]:
        """Replay the timed graph on poisoned outputs and renewed inouts; compare with the reference of one launch."""
        loaded = self._jobs[name]
        armed = loaded.armed[key_of(dict(point))]
        prepared = self._points[armed.point_key]
        prepared.poison(self.device)
        armed.graph.launch(self.stream)
        results = prepared.compare(self.device, loaded.job.tolerances)
        ok = results[-1].ok
        worst = max(result.relative_l2 for result in results)
        return {"ok": ok, "reason": results[-1].reason, "relative_error": worst if ok else None}

    def disarm(self, name: str, point: Mapping[str, int]) -> None:
        """Give the graph and workspace back."""
        self._jobs[name].armed.pop(key_of(dict(point))).free()

    def unload(self, name: str) -> None:
        """Give the module and whatever is still armed back."""
        loaded = self._jobs.pop(name)
        for armed in loaded.armed.values():
            armed.free()
        loaded.kernels.unload()

    def canary(self) -> float:
        """Median microseconds of a copy of 256 MB on the device, once its clocks are up."""
        if self._canary_buffers is None:
            self._canary_buffers = (self.device.allocate(CANARY_BYTES), self.device.allocate(CANARY_BYTES))
        destination, source = (buffer.address for buffer in self._canary_buffers)
        graph = Graph()
        with graph.capture(self.stream):
            self.device.copy_on_device(destination, source, CANARY_BYTES, self.stream)
        self._warm(graph)
        median = float(np.median(self._timed(graph, CANARY_REPLAYS)))
        graph.destroy()
        return median
