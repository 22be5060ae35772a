"""Kernels of a loaded cubin, their arguments, and the streams that they are launched into."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kgen.device.cuda_driver import CudaError, call, driver


class Stream:
    """A stream that does not wait for the default stream; ``handle`` is its integer."""

    def __init__(self) -> None:
        self.handle = int(call("cuStreamCreate", int(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def synchronize(self) -> None:
        """Wait for all work of the stream; raises what that work failed with."""
        call("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        """Give the stream back once its work is done."""
        call("cuStreamDestroy", self.handle)


class ArgumentBuffer:
    """The bytes of a kernel's one struct argument and the void** array that launches need, made once.

    Write through ``view`` (for instance ``packer.pack_into(buffer.view, 0, ...)``); the driver copies the
    bytes during the launch call, so they may be changed right after it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._bytes = (ctypes.c_uint64 * -(-size_bytes // 8))()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._bytes))
        self.view = memoryview(self._bytes).cast("B")[:size_bytes]
        self.pointer = ctypes.addressof(self._pointers)


class Function:
    """One kernel of a loaded module."""

    def __init__(self, module: Module, entry: str, handle: Any) -> None:
        self.module, self.entry, self.handle = module, entry, handle
        self._launch: Callable[..., tuple[Any]] = driver().cuLaunchKernel

    def _attribute(self, name: str) -> int:
        api = driver()
        return int(
            call("cuFuncGetAttribute", getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), self.handle)
        )

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._attribute("NUM_REGS")

    @property
    def local_bytes(self) -> int:
        """Local memory per thread, in bytes: spills and stack."""
        return self._attribute("LOCAL_SIZE_BYTES")

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory per block that the source declares, in bytes."""
        return self._attribute("SHARED_SIZE_BYTES")

    def set_dynamic_shared(self, shared_bytes: int) -> None:
        """Opt in to ``shared_bytes`` of dynamic shared memory per block."""
        attribute = driver().CUfunction_attribute
        call("cuFuncSetAttribute", self.handle, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: Stream | int,
    ) -> None:
        """Put one launch into the stream; it allocates nothing and may be captured."""
        handle = stream if type(stream) is int else handle_of(stream)
        result = self._launch(
            self.handle, grid[0], grid[1], grid[2], threads, 1, 1, shared_bytes, handle, arguments.pointer, 0
        )[0]
        if result:
            raise CudaError(f"cuLaunchKernel of {self.entry}", result.name)


class Module:
    """A loaded cubin."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def function(self, entry: str) -> Function:
        """The kernel called ``entry``, loaded now, so that its first launch loads nothing (and may be captured)."""
        try:
            handle = call("cuModuleGetFunction", self._handle, entry.encode())
            call("cuFuncLoad", handle)
        except CudaError as error:
            raise CudaError(f"loading kernel {entry}", error.name) from error
        return Function(self, entry, handle)

    def unload(self) -> None:
        """Give the module back; its functions must not be used any more."""
        call("cuModuleUnload", self._handle)


def resident_blocks(function: Function, threads: int, shared_bytes: int) -> int:
    """How many blocks one SM holds at this block size and dynamic shared memory, says the driver."""
    return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function.handle, threads, shared_bytes))


def handle_of(stream: Stream | int) -> int:
    """A stream's integer handle, as other libraries give it."""
    return stream if isinstance(stream, int) else stream.handle
