"""Running a plan's launches on arrays, on the CPU or the GPU, between guard bands.

Every array gets its own region with bands of known bytes around it, so that a write outside an array is
seen even where the hardware allows it. Inputs are read back, so that a write into them is seen too.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kgen.device import ArgumentBuffer, CudaError, Device, Graph, Stream
from kgen.device.envelope import LoadedKernels
from kgen.emulator import Buffer, EmulatedModule
from kgen.family import Array, Family, Launch, Plan, slice_addresses

GUARD_BYTES = 1024  # before and after every array
ALIGNMENT = 256  # what cuMemAlloc promises
GUARD_BYTE = 0xA5
WORKSPACE_POISON = 0xFF  # NaN as float32, bf16 and fp16; -1 as an integer


@dataclass(frozen=True)
class Call:
    """One call of a family: arrays by name (None: left out), inouts among the inputs; scalars without the plan's."""

    inputs: Mapping[str, Array | None]
    outputs: Mapping[str, Array | None]
    scalars: Mapping[str, int | float]


@dataclass(frozen=True)
class Outcome:
    """What a call left behind: its outputs and inouts, inputs that changed, arrays written outside."""

    outputs: Mapping[str, Array]
    changed_inputs: tuple[str, ...]
    broken_guards: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """An array's place: ``base`` is where the front guard starts, ``address`` where the array does."""

    name: str
    base: int
    size_bytes: int
    writable: bool

    @property
    def address(self) -> int:
        """Where the array starts."""
        return self.base + GUARD_BYTES

    @staticmethod
    def span_bytes(size_bytes: int) -> int:
        """Bytes of the array with both guards."""
        return GUARD_BYTES + size_bytes + GUARD_BYTES


class Launcher(ABC):
    """Runs calls of a plan. ``checked_on`` is what a record says of the results."""

    checked_on: ClassVar[str]

    def run(self, family: Family, plan: Plan, calls: Sequence[Call]) -> list[Outcome]:
        """Run the same launches for each call in turn, in the same memory; where calls may share, each runs alone.

        The parameter struct is made once, from the first call, as in a captured graph: later calls change the
        arrays' contents only, so their scalars must be the first one's. The workspace is poisoned once, before
        the first call. CudaError or EmulatorError where a launch fails.
        """
        plan = plan.alone()
        with self._memory():
            regions = self._place(family, plan, calls)
            pointers = {parameter.name: 0 for parameter in family.params.parameters if parameter.kind == "pointer"}
            pointers |= {name: region.address for name, region in regions.items()}
            params = family.params.pack({**calls[0].scalars, **plan.scalars, **pointers})
            start = self._starter(plan, params, list(regions.values()), replayed=len(calls) > 1)
            return [self._run_one(call, regions, start) for call in calls]

    def _place(self, family: Family, plan: Plan, calls: Sequence[Call]) -> dict[str, Region]:
        sizes: dict[str, int] = {}
        for call in calls:
            for name, array in (*call.inputs.items(), *call.outputs.items()):
                if array is not None:
                    sizes[name] = max(sizes.get(name, 0), array.nbytes)
        regions = {}
        for name, size in (sizes | dict(plan.workspace_bytes)).items():
            region = self._region(name, size, writable=name not in family.inputs)
            if name in plan.workspace_bytes:
                self._write(region.address, np.full(size, WORKSPACE_POISON, np.uint8))
            regions[name] = region
        for table, name in family.pointer_tables.items():
            addresses = slice_addresses(regions[name].address, calls[0].inputs[name])
            regions[table] = self._region(table, addresses.nbytes, writable=False)
            self._write(regions[table].address, addresses)
        return regions

    def _region(self, name: str, size: int, *, writable: bool) -> Region:
        region = Region(name, self._allocate(Region.span_bytes(size)), size, writable)
        self._write(region.base, np.full(Region.span_bytes(size), GUARD_BYTE, np.uint8))
        return region

    def _run_one(self, call: Call, regions: Mapping[str, Region], start: Callable[[], None]) -> Outcome:
        inputs = {name: array for name, array in call.inputs.items() if array is not None}
        outputs = {name: array for name, array in call.outputs.items() if array is not None}
        for name, array in (inputs | outputs).items():
            self._write(regions[name].address, array)
        start()
        after = {name: self._read(regions[name].address, array) for name, array in (inputs | outputs).items()}
        return Outcome(
            outputs={name: after[name] for name in after if name in outputs or regions[name].writable},
            changed_inputs=tuple(
                name
                for name, array in inputs.items()
                if not regions[name].writable and array.tobytes() != after[name].tobytes()
            ),
            broken_guards=tuple(name for name, region in regions.items() if not self._guards_hold(region)),
        )

    def _guards_hold(self, region: Region) -> bool:
        band = np.empty(GUARD_BYTES, np.uint8)
        places = (region.base, region.address + region.size_bytes)
        return all(bool((self._read(place, band) == GUARD_BYTE).all()) for place in places)

    @abstractmethod
    def _memory(self) -> contextlib.AbstractContextManager[None]:
        """Frees at its end what `_allocate` and `_starter` took."""

    @abstractmethod
    def _allocate(self, size_bytes: int) -> int:
        """An address aligned to `ALIGNMENT`."""

    @abstractmethod
    def _write(self, address: int, array: Array) -> None:
        """Copy a host array to an address."""

    @abstractmethod
    def _read(self, address: int, like: Array) -> Array:
        """A host array of the shape and dtype of ``like`` with the bytes at an address."""

    @abstractmethod
    def _starter(self, plan: Plan, params: bytes, regions: Sequence[Region], *, replayed: bool) -> Callable[[], None]:
        """What runs the plan's launches once, to the end; ``replayed``: it will be called more than once."""


@dataclass
class EmulatorLauncher(Launcher):
    """Runs the emulator's build of the kernels.

    Every call of a plan has the next seed: another order of threads, and copies that land late or early in turn.
    """

    module: EmulatedModule
    seed: int = 0
    checked_on: ClassVar[str] = "emulator"
    _blocks: list[Array] = field(default_factory=list, init=False, repr=False)

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._blocks.clear()

    def _allocate(self, size_bytes: int) -> int:
        block = np.empty(size_bytes + ALIGNMENT, np.uint8)
        self._blocks.append(block)
        return int(-(-block.ctypes.data // ALIGNMENT) * ALIGNMENT)

    def _write(self, address: int, array: Array) -> None:
        contiguous = np.ascontiguousarray(array)
        ctypes.memmove(address, contiguous.ctypes.data, contiguous.nbytes)

    def _read(self, address: int, like: Array) -> Array:
        array = np.empty(like.shape, like.dtype)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        return array

    def _starter(self, plan: Plan, params: bytes, regions: Sequence[Region], *, replayed: bool) -> Callable[[], None]:
        # No map of what was written: loads whose value is then not used are legal, and the poison shows the others.
        buffers = [Buffer(region.name, region.address, region.size_bytes, region.writable) for region in regions]

        def start() -> None:
            seed, self.seed = self.seed, self.seed + 1
            for launch in plan.launches:
                self.module.launch(
                    launch.entry,
                    grid=launch.grid,
                    threads=launch.threads,
                    shared_bytes=launch.shared_bytes,
                    params=params,
                    buffers=buffers,
                    seed=seed,
                )

        return start


@dataclass
class DeviceLauncher(Launcher):
    """Runs loaded kernels on the GPU: directly, or captured once in a graph where the plan is replayed."""

    device: Device
    kernels: LoadedKernels
    checked_on: ClassVar[str] = "device"
    _release: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(CudaError):  # after a sticky error nothing can be freed, and that error matters
                for release in reversed(self._release):
                    release()
            self._release.clear()

    def _allocate(self, size_bytes: int) -> int:
        buffer = self.device.allocate(size_bytes)
        self._release.append(buffer.free)
        return buffer.address

    def _write(self, address: int, array: Array) -> None:
        self.device.copy_to_device(address, array)

    def _read(self, address: int, like: Array) -> Array:
        array = np.empty(like.shape, like.dtype)
        self.device.copy_to_host(array, address)
        return array

    def _starter(self, plan: Plan, params: bytes, regions: Sequence[Region], *, replayed: bool) -> Callable[[], None]:
        stream, graph, arguments = Stream(), Graph(), ArgumentBuffer(len(params))
        self._release += [stream.destroy, graph.destroy]
        arguments.view[:] = params
        if replayed:
            with graph.capture(stream):
                self.put(plan.launches, arguments, stream)

        def start() -> None:
            if replayed:
                graph.launch(stream)
            else:
                self.put(plan.launches, arguments, stream)
            stream.synchronize()

        return start

    def put(self, launches: Sequence[Launch], arguments: ArgumentBuffer, stream: Stream) -> None:
        """Put launches into the stream."""
        for launch in launches:
            function = self.kernels.functions[launch.entry]
            shared_bytes = self.kernels.shared_bytes[launch.entry]
            function.launch(launch.grid, launch.threads, shared_bytes, arguments, stream)
