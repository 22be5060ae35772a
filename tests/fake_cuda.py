# ruff: noqa: N802 - functions have the driver's names
"""A CUDA driver in Python, shaped like ``cuda.bindings.driver``: device memory is host memory, kernels are functions.

It is as strict as the binding: argument counts, enums where the binding wants enums, buffers where it wants buffers.
A "cubin" is bytes that name entries, separated by spaces; `FakeCuda.kernels` holds what they do.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Callable
from typing import Any

RESULTS = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_IMAGE": 200,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": 701,
    "CUDA_ERROR_MISALIGNED_ADDRESS": 716,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
}
DEVICE_ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 4,
    "L2_CACHE_SIZE": 1 << 16,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MEMORY_CLOCK_RATE": 3201000,
}
FUNCTION_ATTRIBUTES = (
    "NUM_REGS",
    "LOCAL_SIZE_BYTES",
    "SHARED_SIZE_BYTES",
    "MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
)
DEFAULT_SHARED_BYTES = 49152

Kernel = Callable[[int], None]
"""What a launch of an entry does with the address of its parameter struct."""


def make_enum(name: str, members: dict[str, int]) -> Any:
    """An enum with the given members."""
    return enum.IntEnum(name, members)


class FakeCuda:
    """Hand an instance to ``sys.modules["cuda.bindings.driver"]``. ``fail`` makes a call return an error once."""

    def __init__(self, kernels: dict[str, Kernel], version: int = 13000, devices: int = 1) -> None:
        self.kernels, self.version, self.devices = kernels, version, devices
        self.CUresult = make_enum("CUresult", RESULTS)
        self.CUdevice_attribute = make_enum(
            "CUdevice_attribute", {f"CU_DEVICE_ATTRIBUTE_{name}": at for at, name in enumerate(DEVICE_ATTRIBUTES)}
        )
        self.CUfunction_attribute = make_enum(
            "CUfunction_attribute", {f"CU_FUNC_ATTRIBUTE_{name}": at for at, name in enumerate(FUNCTION_ATTRIBUTES)}
        )
        self.CUstreamCaptureMode = make_enum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1})
        self.CUstream_flags = make_enum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1})
        self.CUevent_flags = make_enum("CUevent_flags", {"CU_EVENT_DEFAULT": 0})
        self.fail: dict[str, str] = {}
        self.lost: str = ""
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[str, tuple[int, int, int], int, int]] = []
        self.dynamic_shared: dict[str, int] = {}
        self.registers = 64
        self.struct_bytes = 64
        self.current: Any = None
        self.capturing: list[Callable[[], None]] | None = None
        self.modules: set[tuple[str, ...]] = set()
        self.graphs = 0
        self.events = 0

    def _result(self, call: str) -> Any:
        name = self.lost or self.fail.pop(call, "CUDA_SUCCESS")
        return self.CUresult[name]

    def _do(self, call: str, work: Callable[[], None]) -> tuple[Any]:
        """Do stream work now, or record it while a graph is captured."""
        result = self._result(call)
        if not result:
            if self.capturing is not None:
                self.capturing.append(work)
            else:
                work()
        return (result,)

    def cuInit(self, flags: int) -> tuple[Any]:
        assert flags == 0
        return (self.CUresult.CUDA_SUCCESS if self.devices else self.CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return self._result("cuDriverGetVersion"), self.version

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return self._result("cuDeviceGetCount"), self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, Any]:
        return self._result("cuDeviceGet"), ("device", ordinal)

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, bytes]:
        assert device[0] == "device"
        return self._result("cuDeviceGetName"), b"NVIDIA Fake".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, int]:
        assert isinstance(attribute, self.CUdevice_attribute)
        assert device[0] == "device"
        return self._result("cuDeviceGetAttribute"), list(DEVICE_ATTRIBUTES.values())[int(attribute)]

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, Any]:
        return self._result("cuDevicePrimaryCtxRetain"), ("context", device[1])

    def cuDevicePrimaryCtxRelease(self, device: Any) -> tuple[Any]:
        assert device[0] == "device"
        return (self._result("cuDevicePrimaryCtxRelease"),)

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any]:
        self.current = context
        return (self._result("cuCtxSetCurrent"),)

    def cuCtxSynchronize(self) -> tuple[Any]:
        return (self._result("cuCtxSynchronize"),)

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        return self._result("cuMemGetInfo"), 1 << 24, 1 << 25

    def cuMemAlloc(self, size: int) -> tuple[Any, Any]:
        result = self._result("cuMemAlloc")
        assert size > 0, "the driver refuses to allocate nothing"
        if result:
            return result, None
        block = (ctypes.c_char * (size + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return result, address

    def cuMemFree(self, address: int) -> tuple[Any]:
        result = self._result("cuMemFree")
        if not result:
            del self.memory[address]
        return (result,)

    def cuMemcpyHtoD(self, destination: int, source: int, size: int) -> tuple[Any]:
        result = self._result("cuMemcpyHtoD")
        if not result:
            ctypes.memmove(destination, source, size)
        return (result,)

    def cuMemcpyDtoH(self, destination: int, source: int, size: int) -> tuple[Any]:
        result = self._result("cuMemcpyDtoH")
        if not result:
            ctypes.memmove(destination, source, size)
        return (result,)

    def cuMemcpyDtoDAsync(self, destination: int, source: int, size: int, stream: int) -> tuple[Any]:
        assert isinstance(stream, int)
        return self._do("cuMemcpyDtoDAsync", lambda: void(ctypes.memmove(destination, source, size)))

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: int) -> tuple[Any]:
        assert isinstance(stream, int)
        return self._do("cuMemsetD8Async", lambda: void(ctypes.memset(address, byte, size)))

    def cuStreamCreate(self, flags: int) -> tuple[Any, int]:
        assert flags == 1
        return self._result("cuStreamCreate"), 0x5000

    def cuStreamDestroy(self, stream: int) -> tuple[Any]:
        return (self._result("cuStreamDestroy"),)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        assert self.capturing is None, "not allowed while capturing"
        return (self._result("cuStreamSynchronize"),)

    def cuEventCreate(self, flags: int) -> tuple[Any, Any]:
        self.events += 1
        return self._result("cuEventCreate"), [0.0]

    def cuEventDestroy(self, event: Any) -> tuple[Any]:
        self.events -= 1
        return (self._result("cuEventDestroy"),)

    def cuEventRecord(self, event: Any, stream: int) -> tuple[Any]:
        event[0] = time.perf_counter()
        return (self._result("cuEventRecord"),)

    def cuEventSynchronize(self, event: Any) -> tuple[Any]:
        return (self._result("cuEventSynchronize"),)

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, float]:
        return self._result("cuEventElapsedTime"), (end[0] - start[0]) * 1000.0

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, Any]:
        assert isinstance(image, bytes)
        result = self._result("cuModuleLoadData")
        if result:
            return result, None
        module = tuple(image.decode().split())
        self.modules.add(module)
        return result, module

    def cuModuleUnload(self, module: Any) -> tuple[Any]:
        self.modules.remove(module)
        return (self._result("cuModuleUnload"),)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, Any]:
        assert isinstance(name, bytes)
        if name.decode() not in module:
            return self.CUresult.CUDA_ERROR_NOT_FOUND, None
        return self._result("cuModuleGetFunction"), name.decode()

    def cuFuncLoad(self, function: str) -> tuple[Any]:
        return (self._result("cuFuncLoad"),)

    def cuFuncGetAttribute(self, attribute: Any, function: str) -> tuple[Any, int]:
        assert isinstance(attribute, self.CUfunction_attribute)
        value = {"NUM_REGS": self.registers, "LOCAL_SIZE_BYTES": 8, "SHARED_SIZE_BYTES": 16}
        return self._result("cuFuncGetAttribute"), value[attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")]

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any]:
        assert isinstance(attribute, self.CUfunction_attribute)
        result = self._result("cuFuncSetAttribute")
        if attribute.name.endswith("MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            if value > DEVICE_ATTRIBUTES["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"]:
                return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
            self.dynamic_shared[function] = value
        return (result,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: str, threads: int, shared: int) -> tuple[Any, int]:
        assert isinstance(function, str)
        blocks = min(2048 // threads, 233472 // (shared + 16 + 1024))
        return self._result("cuOccupancyMaxActiveBlocksPerMultiprocessor"), blocks

    def cuLaunchKernel(
        self, function: str, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int, params: int, extra: int,
    ) -> tuple[Any]:  # fmt: skip
        assert isinstance(stream, int)
        assert isinstance(params, int)
        assert (by, bz, extra) == (1, 1, 0)
        if self.current is None:
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if shared > self.dynamic_shared.get(function, DEFAULT_SHARED_BYTES):
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.launches.append((function, (gx, gy, gz), bx, shared))
        pointer = ctypes.c_void_p.from_address(params).value
        assert pointer is not None
        copied = ctypes.create_string_buffer(self.struct_bytes)  # the driver copies the struct during the call
        ctypes.memmove(copied, pointer, self.struct_bytes)
        return self._do("cuLaunchKernel", lambda: self._run(function, copied))

    def _run(self, function: str, struct: Any) -> None:
        try:
            self.kernels[function](ctypes.addressof(struct))
        except MemoryError:  # what a kernel of a test raises for an illegal address
            self.lost = "CUDA_ERROR_ILLEGAL_ADDRESS"

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:
        assert isinstance(mode, self.CUstreamCaptureMode)
        assert self.capturing is None
        self.capturing = []
        return (self._result("cuStreamBeginCapture"),)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, Any]:
        captured, self.capturing = self.capturing, None
        self.graphs += 1
        return self._result("cuStreamEndCapture"), captured

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, Any]:
        assert flags == 0
        self.graphs += 1
        return self._result("cuGraphInstantiate"), graph

    def cuGraphLaunch(self, graph: Any, stream: int) -> tuple[Any]:
        assert isinstance(stream, int)
        result = self._result("cuGraphLaunch")
        if not result:
            for work in graph:
                work()
        return (result,)

    def cuGraphDestroy(self, graph: Any) -> tuple[Any]:
        self.graphs -= 1
        return (self._result("cuGraphDestroy"),)

    def cuGraphExecDestroy(self, graph: Any) -> tuple[Any]:
        self.graphs -= 1
        return (self._result("cuGraphExecDestroy"),)


def void(_: object) -> None:
    """Drop a value."""


def read_bytes(address: int, size: int) -> bytes:
    """Bytes at an address."""
    return ctypes.string_at(address, size)


def write_bytes(address: int, content: bytes) -> None:
    """Put bytes at an address."""
    ctypes.memmove(address, content, len(content))
