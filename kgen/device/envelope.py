"""Loading kernels so that another architecture's limits hold on the device at hand (evidence ``proxy``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.device import Device, Function, Module, resident_blocks
from kgen.errors import InputError, KgenError
from kgen.family import Kernel
from kgen.targets import Target

SHARED_GRANULE_BYTES = 128  # shared memory is given out in units of this size (cc 9.0 and 12.0)


def envelope_shared_bytes(envelope: Target, device: Target, threads: int, registers: int, shared_bytes: int) -> int:
    """Shared bytes a block must take on ``device`` so that no more blocks are resident than ``envelope`` would hold.

    ``shared_bytes`` is the block's static plus dynamic shared memory; the result is at least that.
    InputError where the block does not fit the envelope, or no padding can hold the device to it.
    """
    limit = envelope.resident_blocks(threads=threads, registers=registers, shared_bytes=shared_bytes)
    shape = f"{threads} threads, {registers} registers, {shared_bytes} shared bytes"
    if limit == 0:
        raise InputError(f"target {envelope.name}", "no block of this shape fits an SM", seen=shape)
    if device.resident_blocks(threads=threads, registers=registers, shared_bytes=shared_bytes) <= limit:
        return shared_bytes
    smallest = device.shared_bytes_per_sm // (limit + 1) + 1 - device.shared_bytes_reserved
    padded = -(-smallest // SHARED_GRANULE_BYTES) * SHARED_GRANULE_BYTES
    if padded > device.shared_bytes_per_block:
        raise InputError(f"target {device.name}", f"cannot be held to {limit} blocks per SM", seen=shape)
    return padded


@dataclass(frozen=True)
class LoadedKernels:
    """The entries of one cubin, ready to launch.

    ``shared_bytes`` is dynamic, by entry, with any padding; ``resident_blocks`` is of the first (main) kernel,
    per SM, as the driver counts it.
    """

    module: Module
    functions: Mapping[str, Function]
    shared_bytes: Mapping[str, int]
    resident_blocks: int

    def unload(self) -> None:
        """Give the module back."""
        self.module.unload()


def load_kernels(
    device: Device,
    cubin: bytes,
    kernels: Sequence[Kernel],
    *,
    envelope: Target | None = None,
    limits: Target | None = None,
    minimum_cuda: tuple[int, int] | None = None,
) -> LoadedKernels:
    """Load a cubin and opt in to its kernels' shared memory.

    With ``envelope``, every kernel is padded to that target's occupancy; ``limits`` are then the device's own.
    ``minimum_cuda`` is what the cubin needs of the driver. DeviceError where the device cannot hold a kernel.
    """
    module = device.load_module(cubin, minimum_cuda=minimum_cuda)
    try:
        functions = {kernel.entry: module.function(kernel.entry) for kernel in kernels}
        shared = {kernel.entry: kernel.shared_bytes for kernel in kernels}
        for kernel in kernels:
            function = functions[kernel.entry]
            if envelope is not None and limits is not None:
                static = function.static_shared_bytes
                total = static + kernel.shared_bytes
                padded = envelope_shared_bytes(envelope, limits, kernel.threads, function.registers, total)
                shared[kernel.entry] = padded - static
            function.set_dynamic_shared(shared[kernel.entry])
    except KgenError:
        module.unload()
        raise
    main = kernels[0]
    blocks = resident_blocks(functions[main.entry], main.threads, shared[main.entry])
    return LoadedKernels(module, functions, shared, blocks)
