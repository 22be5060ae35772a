"""Calls into the CUDA driver through ``cuda.bindings``, and what their failures mean.

Importing this module needs neither a GPU nor the binding; the first call does.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from kgen.errors import DeviceError

STICKY_ERRORS = frozenset(
    {
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_UNKNOWN",
    }
)
"""Errors after which every later call of the process fails: only a new process helps."""

SMALLEST_DRIVER = {12: "525.60", 13: "580.65"}
"""The smallest Linux driver by a toolkit's major version (minor version compatibility, CUDA release notes)."""
_FIRST_FOR_CC12 = ((12, 9), "575.51")  # whose cubins are built as sm_120f

_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory (nvidia-smi lists who holds it) or ask for smaller capacities",
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "check the device ordinal and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_CONTEXT": "call Device.make_current() on the thread that launches",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another architecture: build it for this device",
    "CUDA_ERROR_INVALID_IMAGE": "the file is no cubin or a damaged one: build it again",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "install a newer NVIDIA driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart after a driver update: kernel module and library differ",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many threads, registers or shared bytes for one block of this device",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "this call is not allowed while a graph is captured",
    "CUDA_ERROR_NOT_FOUND": "the module has no entry of that name",
}
_STICKY_REMEDY = "the CUDA context is lost: start a new process, and run compute-sanitizer on the kernel"


class CudaError(DeviceError):
    """A driver call failed; ``name`` is the CUresult's name, e.g. ``CUDA_ERROR_ILLEGAL_ADDRESS``."""

    def __init__(self, call: str, name: str, remedy: str = "") -> None:
        self.name = name
        self.is_sticky = name in STICKY_ERRORS
        found = _STICKY_REMEDY if self.is_sticky else _REMEDIES.get(name, "")
        super().__init__(call, f"failed with {name}", remedy=remedy or found)


class DriverTooOldError(DeviceError):
    """The NVIDIA driver is older than a cubin needs."""


@cache
def driver() -> Any:
    """The binding's module, initialised; DeviceError where there is no binding, driver or device."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            "cuda-bindings", "cannot be imported", seen=str(error), remedy="pip install 'kgen[gpu]' or use the emulator"
        ) from error
    try:
        result = api.cuInit(0)[0]
    except RuntimeError as error:
        raise DeviceError(
            "CUDA driver", "not found", seen=str(error), remedy="install the NVIDIA driver, or use the emulator"
        ) from error
    if result:
        raise CudaError("cuInit", result.name)
    return api


def call(name: str, *arguments: Any) -> Any:
    """One driver function by name: its value (None, one, or a tuple); CudaError where it fails."""
    try:
        result, *values = getattr(driver(), name)(*arguments)
    except RuntimeError as error:
        raise DeviceError(name, "is not in this driver", seen=str(error), remedy="install a newer driver") from error
    if result:
        raise CudaError(name, result.name)
    return values[0] if len(values) == 1 else tuple(values) or None


def is_sticky(error: BaseException) -> bool:
    """Whether the process must be replaced after this error."""
    return isinstance(error, CudaError) and error.is_sticky


def cubin_needs(arch: str, nvcc_version: str) -> tuple[tuple[int, int], str]:
    """The CUDA version that a driver must support for a cubin of this nvcc, and the smallest such Linux driver.

    It is of the toolkit's major version, or newer (minor version compatibility), and knows the arch.
    """
    major = int(nvcc_version.split(".", maxsplit=1)[0])
    if arch.startswith("sm_12") and (major, 0) < _FIRST_FOR_CC12[0]:
        return _FIRST_FOR_CC12
    return (major, 0), SMALLEST_DRIVER[major]


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, e.g. (13, 0)."""
    number = int(call("cuDriverGetVersion"))
    return number // 1000, number % 1000 // 10


def device_count() -> int:
    """How many GPUs this process sees."""
    return int(call("cuDeviceGetCount"))
