"""One GPU: memory, streams, graphs. This package is all that touches the driver.

Device addresses and stream handles are plain integers, so that they mix with other libraries' (torch's
data_ptr and cuda_stream): a `Device` works in the primary context, which those libraries use too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from kgen.device.cuda_driver import (
    SMALLEST_DRIVER,
    CudaError,
    DriverTooOldError,
    call,
    device_count,
    driver,
    driver_version,
    is_sticky,
)
from kgen.device.kernels import ArgumentBuffer, Function, Module, Stream, handle_of, resident_blocks
from kgen.errors import DeviceError
from kgen.family import Array
from kgen.records import DeviceFingerprint

__all__ = [
    "ArgumentBuffer",
    "CudaError",
    "Device",
    "DeviceBuffer",
    "DriverTooOldError",
    "Event",
    "Function",
    "Graph",
    "Module",
    "Stream",
    "device_count",
    "driver_version",
    "is_sticky",
    "resident_blocks",
]


class DeviceBuffer:
    """Device memory of ``size_bytes`` at ``address`` (256-byte aligned), until `free`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = int(call("cuMemAlloc", max(size_bytes, 1)))

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.address:
            call("cuMemFree", self.address)
            self.address = 0


class Event:
    """A time stamp in a stream."""

    def __init__(self) -> None:
        self._handle = call("cuEventCreate", int(driver().CUevent_flags.CU_EVENT_DEFAULT))

    def record(self, stream: Stream | int) -> None:
        """Stamp the time once the stream's earlier work is done."""
        call("cuEventRecord", self._handle, handle_of(stream))

    def synchronize(self) -> None:
        """Wait until the stamp is taken."""
        call("cuEventSynchronize", self._handle)

    def microseconds_since(self, start: Event) -> float:
        """Time between two stamps that were taken, in microseconds (resolution about 0.5)."""
        return float(call("cuEventElapsedTime", start._handle, self._handle)) * 1000.0

    def destroy(self) -> None:
        """Give the event back."""
        call("cuEventDestroy", self._handle)


class Graph:
    """Launches captured once and replayed: ``with graph.capture(stream): ...`` then `launch`."""

    def __init__(self) -> None:
        self._executable: Any = None

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        """Record what the body puts into the stream instead of running it."""
        api = driver()
        call("cuStreamBeginCapture", stream.handle, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            yield
        except BaseException:
            graph = api.cuStreamEndCapture(stream.handle)[1]  # the body's error is the one to report
            if graph is not None:
                api.cuGraphDestroy(graph)
            raise
        graph = call("cuStreamEndCapture", stream.handle)
        try:
            self._executable = call("cuGraphInstantiate", graph, 0)
        finally:
            call("cuGraphDestroy", graph)

    def launch(self, stream: Stream | int) -> None:
        """Replay the captured work in a stream."""
        call("cuGraphLaunch", self._executable, handle_of(stream))

    def destroy(self) -> None:
        """Give the executable graph back; a second call does nothing."""
        if self._executable is not None:
            call("cuGraphExecDestroy", self._executable)
            self._executable = None


class Device:
    """One GPU, through its primary context. `open` makes it current on the calling thread."""

    def __init__(self, ordinal: int, handle: Any, context: Any) -> None:
        self.ordinal, self._handle, self._context = ordinal, handle, context

    @classmethod
    def open(cls, ordinal: int = 0) -> Device:
        """Retain the device's primary context and make it current."""
        count = device_count()
        if not 0 <= ordinal < count:
            raise DeviceError(
                "device", "no such ordinal", seen=f"{ordinal} of {count} devices", remedy="check CUDA_VISIBLE_DEVICES"
            )
        handle = call("cuDeviceGet", ordinal)
        device = cls(ordinal, handle, call("cuDevicePrimaryCtxRetain", handle))
        device.make_current()
        return device

    def close(self) -> None:
        """Release the primary context; what was loaded through this device is gone with its last holder."""
        call("cuDevicePrimaryCtxRelease", self._handle)

    def make_current(self) -> None:
        """Bind the context to the calling thread; every thread that uses the device needs this once."""
        call("cuCtxSetCurrent", self._context)

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, self._handle))

    @cached_property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def arch(self) -> str:
        """The architecture as nvcc names it, e.g. ``sm_90``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    @cached_property
    def sms(self) -> int:
        """Streaming multiprocessors."""
        return self._attribute("MULTIPROCESSOR_COUNT")

    @cached_property
    def shared_bytes_per_block(self) -> int:
        """The most shared memory that a block can have, opted in to."""
        return self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    @cached_property
    def l2_bytes(self) -> int:
        """Size of the L2 cache in bytes."""
        return self._attribute("L2_CACHE_SIZE")

    def fingerprint(self) -> DeviceFingerprint:
        """What must agree before two timings are compared."""
        name = bytes(call("cuDeviceGetName", 256, self._handle)).split(b"\0")[0].decode(errors="replace").strip()
        return DeviceFingerprint(
            compute_capability="{}.{}".format(*self.compute_capability),
            sms=self.sms,
            shared_bytes_per_block=self.shared_bytes_per_block,
            l2_bytes=self.l2_bytes,
            memory_clock_khz=self._attribute("MEMORY_CLOCK_RATE"),
            name=name,
            driver_version="{}.{}".format(*driver_version()),
        )

    def load_module(self, cubin: bytes, *, minimum_cuda: tuple[int, int] | None = None) -> Module:
        """Load a cubin; ``minimum_cuda`` is the CUDA version that it needs of the driver (its toolkit's major, 0)."""
        if minimum_cuda is not None and driver_version() < minimum_cuda:
            needs = "{}.{}".format(*minimum_cuda)
            smallest = SMALLEST_DRIVER.get(minimum_cuda[0], f"one for CUDA {needs}")
            raise DriverTooOldError(
                "NVIDIA driver",
                f"is too old for a cubin of CUDA {needs}",
                seen="it supports CUDA {}.{}".format(*driver_version()),
                remedy=f"the smallest driver that can load it is {smallest}",
            )
        try:
            return Module(call("cuModuleLoadData", bytes(cubin)))
        except CudaError as error:
            raise CudaError(f"loading a cubin on {self.arch}", error.name) from error

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Device memory with unknown content."""
        return DeviceBuffer(size_bytes)

    def free_bytes(self) -> int:
        """Device memory that nobody holds, in bytes."""
        return int(call("cuMemGetInfo")[0])

    def synchronize(self) -> None:
        """Wait for all work of the context; raises what that work failed with."""
        call("cuCtxSynchronize")

    def copy_to_device(self, address: int, array: Array) -> None:
        """Copy a host array to the device; done when this returns, for every stream."""
        if array.nbytes:
            contiguous = np.ascontiguousarray(array)
            call("cuMemcpyHtoD", address, contiguous.ctypes.data, contiguous.nbytes)
            self.synchronize()

    def copy_to_host(self, array: Array, address: int) -> None:
        """Wait for the device, then fill a contiguous host array from it."""
        self.synchronize()
        if array.nbytes:
            call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)

    def copy_on_device(self, destination: int, source: int, size_bytes: int, stream: Stream | int) -> None:
        """Put a device-to-device copy into the stream."""
        call("cuMemcpyDtoDAsync", destination, source, size_bytes, handle_of(stream))

    def fill(self, address: int, byte: int, size_bytes: int, stream: Stream | int) -> None:
        """Put a fill with one byte value into the stream."""
        if size_bytes:
            call("cuMemsetD8Async", address, byte, size_bytes, handle_of(stream))
