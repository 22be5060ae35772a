"""Where the kernels of a pack run: a GPU through the CUDA driver, or the CPU through the emulator.

A backend loads variants while a call is prepared; after that `run` only launches.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kgen.errors import BuildError, PackError
from kgen.runtime.pack_reader import Pack
from kgen.runtime.regions import Region

if TYPE_CHECKING:
    from kgen.device import ArgumentBuffer, Function
    from kgen.emulator import EmulatedModule
    from kgen.family import Launch
    from kgen.render import Source
    from kgen.runtime.manifest import PackedSource

EMULATED_SMS = 8
"""SMs that launch plans for the emulator are made for: enough to split one request's keys, few enough to be quick."""


class Backend(Protocol):
    """Loads sources of a pack and launches their kernels with the parameter struct that is in ``arguments``."""

    sms: int
    arguments: Any

    def load(self, pack: Pack, sources: Sequence[str], arch: str) -> None:
        """Load these sources; everything slow happens here."""

    def resident_blocks(self, source: str) -> int:
        """Blocks of the source's main kernel that one SM holds."""

    def run(self, source: str, launches: Sequence[Launch], regions: Sequence[Region]) -> None:
        """Launch in order; ``regions`` are all that the kernels may touch."""


class CudaBackend:
    """Launches on torch's current stream of one GPU."""

    def __init__(self, ordinal: int, params_bytes: int) -> None:
        import torch

        from kgen.device import ArgumentBuffer, Device

        self._cuda = torch.cuda
        self._device = Device.open(ordinal)
        self._ordinal = ordinal
        self._buffer: ArgumentBuffer = ArgumentBuffer(params_bytes)
        self._functions: dict[tuple[str, str], Function] = {}
        self._blocks: dict[str, int] = {}
        self._thread = threading.local()
        self.sms = self._device.sms
        self.capability = self._device.compute_capability
        self.arguments = self._buffer.view

    def load(self, pack: Pack, sources: Sequence[str], arch: str) -> None:
        """Load the cubins of ``arch``.

        Raises DriverTooOldError if the driver is too old for them, PackError if a block takes more than the GPU has.
        """
        if arch not in pack.manifest.archs:
            raise PackError(pack.where, f"holds no cubins for {arch}", remedy="emit a pack, and load that")
        major, minor = pack.manifest.archs[arch].min_cuda
        for source in sources:
            packed = pack.manifest.sources[source]
            self._blocks[source] = packed.cubins[arch].blocks_per_sm
            self._require_shared(pack.where, packed, arch)
            module = self._device.load_module(pack.cubin(source, arch), minimum_cuda=(major, minor))
            for kernel in packed.kernels:
                function = module.function(kernel.entry)
                function.set_dynamic_shared(kernel.shared_bytes)
                self._functions[source, kernel.entry] = function

    def _require_shared(self, where: str, packed: PackedSource, arch: str) -> None:
        most = self._device.shared_bytes_per_block
        for kernel in packed.kernels:
            needed = kernel.shared_bytes + packed.cubins[arch].resources[kernel.entry].static_shared_bytes
            if needed > most:
                wrong = f"{kernel.entry} takes {needed} B of shared memory a block"
                raise PackError(where, wrong, seen=f"this GPU has {most} B", remedy="tune and emit a pack for this GPU")

    def resident_blocks(self, source: str) -> int:
        """Blocks of the main kernel that one SM holds, as recorded in the pack."""
        return self._blocks[source]

    def run(self, source: str, launches: Sequence[Launch], regions: Sequence[Region]) -> None:
        """Launch in order on torch's current stream of this GPU; nothing waits, nothing is allocated."""
        if self._cuda.current_device() != self._ordinal:
            with self._cuda.device(self._ordinal):
                self._launch(source, launches)
        else:
            self._launch(source, launches)

    def _launch(self, source: str, launches: Sequence[Launch]) -> None:
        if not hasattr(self._thread, "ready"):  # a thread that torch has not used yet has no current context
            self._device.make_current()
            self._thread.ready = True
        stream = self._cuda.current_stream(self._ordinal).cuda_stream
        for launch in launches:
            function = self._functions[source, launch.entry]
            function.launch(launch.grid, launch.threads, launch.shared_bytes, self._buffer, stream)


@dataclass(frozen=True)
class _Text:
    """A packed source as the build sees it (the attributes of `kgen.render.Source`)."""

    family: str
    name: str
    text: str
    mapped_text: str
    sha256: str
    entries: tuple[str, ...]


class EmulatorBackend:
    """Runs the packed sources on the CPU; they are compiled while a call is prepared and then kept in ``cache_dir``."""

    def __init__(self, cache_dir: Path, params_bytes: int) -> None:
        self._cache_dir = cache_dir
        self._modules: dict[str, EmulatedModule] = {}
        self.sms = EMULATED_SMS
        self.arguments = memoryview(bytearray(params_bytes))

    def load(self, pack: Pack, sources: Sequence[str], arch: str) -> None:
        """Compile and load. Raises ToolchainError without a C++ compiler, BuildError if a source does not compile."""
        from kgen.build import EMULATOR, build
        from kgen.build.toolchain import find_toolchain
        from kgen.emulator import EmulatedModule

        texts = [_text(pack, source) for source in sources]
        for result in build(
            [cast("Source", text) for text in texts],
            arch=EMULATOR,
            toolchain=find_toolchain(EMULATOR),
            cache_dir=self._cache_dir,
            jobs=2,
        ):
            if result.path is None:
                raise BuildError(result.source.name, "does not compile for the emulator", seen=result.reason)
            self._modules[result.source.name] = EmulatedModule(result.path)

    def resident_blocks(self, source: str) -> int:
        """One: blocks run one after the other."""
        return 1

    def run(self, source: str, launches: Sequence[Launch], regions: Sequence[Region]) -> None:
        """Launch in order, each to its end. Raises EmulatorFault if a kernel touches anything but ``regions``."""
        from kgen.emulator import Buffer

        buffers = [Buffer(item.name, item.address, item.size_bytes, item.writable) for item in regions]
        for launch in launches:
            self._modules[source].launch(
                launch.entry,
                grid=launch.grid,
                threads=launch.threads,
                shared_bytes=launch.shared_bytes,
                params=bytes(self.arguments),
                buffers=buffers,
            )


def _text(pack: Pack, source: str) -> _Text:
    packed, text = pack.manifest.sources[source], pack.source_text(source)
    entries = tuple(kernel.entry for kernel in packed.kernels)
    return _Text(pack.manifest.family, source, text, text, packed.sha256, entries)
