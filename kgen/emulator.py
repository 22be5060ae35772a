"""Runs compiled kernels on the CPU and stops at the first fault.

The source that nvcc compiles is compiled by g++ or clang with ``EMULATOR_FLAGS``; ``<kgen/primitives.cuh>``
then takes its primitives from ``templates/include/kgen_emulator/``, whose ``primitives.hpp`` says what is
modelled and what is not. In short: every global and shared access is checked (bounds, alignment, read-only,
unwritten), a happens-before detector reports races on shared memory whatever order this run took, asynchronous
copies land late or at random, and divergent collectives and deadlocks are reported with who is where.

The emulator proves results and finds faults. It is never a source of timings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kgen.errors import EmulatorError, InputError

EMULATOR_FLAGS: Final[tuple[str, ...]] = (
    "-std=c++17",
    "-O1",  # -O2 runs no faster to speak of and compiles slower
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fsanitize=bounds",  # of arrays in registers; the emulator handles the report itself
    "-nodefaultlibs",  # so no sanitizer library is needed
    "-U_FORTIFY_SOURCE",  # its longjmp check takes a switch of stacks for an error
    "-DKGEN_EMULATOR",
    "-x",
    "c++",
)
"""Compiler flags, before the source; the includes need ``-I templates/include``."""

EMULATOR_LIBRARIES: Final[tuple[str, ...]] = ("-lstdc++", "-lm", "-lgcc_s", "-lc")
"""After the source: a static library is searched only for what is missing before it."""

FAULT_KINDS: Final[tuple[str, ...]] = (
    "out_of_bounds",
    "misaligned",
    "read_only_write",
    "unwritten_shared_read",
    "unwritten_global_read",
    "race",
    "missing_wait",
    "missing_fence",
    "divergent_collective",
    "deadlock",
    "mbarrier_misuse",
    "barrier_misuse",
    "step_limit",
    "launch_error",
)

CopyTiming = Literal["late", "random", "seeded"]

DEFAULT_MAX_STEPS: Final = 30_000_000
_LAUNCH_VERSION: Final = 1


class EmulatorFault(EmulatorError):  # noqa: N818 - a fault is what the kernel did, the error is ours
    """A kernel did something wrong. ``kind`` is one of ``FAULT_KINDS``; ``source_line`` is ``file:line``.

    ``block`` is (x, y, z); ``thread`` is the index in the block, or None when no single thread is at fault.
    """

    def __init__(
        self,
        kind: str,
        source_line: str,
        block: tuple[int, int, int],
        thread: int | None,
        wrong: str,
        *,
        seen: str,
        remedy: str,
    ) -> None:
        self.kind, self.source_line, self.block, self.thread = kind, source_line, block, thread
        super().__init__(source_line, wrong, seen=seen, remedy=remedy)


@dataclass(frozen=True)
class Buffer:
    """Memory that a kernel may touch: ``size_bytes`` at ``address``, and nothing around it.

    ``written``, where given, has one byte a byte of the buffer, non-zero once written: launches mark what they
    write and report reads of the rest. Pass the same object to later launches to carry it over.
    """

    name: str
    address: int
    size_bytes: int
    writable: bool
    written: bytearray | None = None


class _BufferSpan(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("writable", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("grid", ctypes.c_int32 * 3),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("params_bytes", ctypes.c_int32),
        ("buffer_count", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
        ("copy_timing", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 40),
        ("file", ctypes.c_char * 1024),
        ("line", ctypes.c_int32),
        ("block", ctypes.c_int32 * 3),
        ("thread", ctypes.c_int32),
        ("wrong", ctypes.c_char * 512),
        ("seen", ctypes.c_char * 8192),
        ("remedy", ctypes.c_char * 512),
    ]


class EmulatedModule:
    """The kernels of one shared object compiled with ``EMULATOR_FLAGS``.

    Launches hold no global state and release the GIL: several modules and several threads can launch at once.
    """

    def __init__(self, path: Path) -> None:
        """Raises ``EmulatorError`` when ``path`` cannot be loaded."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            wrong, remedy = "the compiled kernel cannot be loaded", "build it again on this machine"
            raise EmulatorError(str(path), wrong, seen=str(error), remedy=remedy) from error

    def launch(
        self,
        entry: str,
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: bytes,
        buffers: Sequence[Buffer],
        seed: int = 0,
        copies: CopyTiming = "seeded",
        max_steps: int = DEFAULT_MAX_STEPS,
    ) -> None:
        """Runs kernel ``entry`` to its end.

        ``grid`` is in blocks, ``threads`` a multiple of 32, ``shared_bytes`` the dynamic shared memory of a block,
        ``params`` the bytes of the kernel's parameter struct. ``seed`` decides the order of blocks and warps and,
        with ``copies="seeded"``, whether asynchronous copies land as late as possible (even seeds) or at random
        times (odd seeds). The same seed gives the same run.

        Raises ``EmulatorFault`` at the first fault, and ``InputError`` when the module has no such entry.
        """
        function = self._entry(entry)
        _check_written_maps(buffers)
        spans = (_BufferSpan * max(len(buffers), 1))(*(_span(buffer) for buffer in buffers))
        aligned = _aligned_copy(params)
        late = copies == "late" or (copies == "seeded" and seed % 2 == 0)
        launch = _Launch(
            version=_LAUNCH_VERSION,
            grid=(ctypes.c_int32 * 3)(*grid),
            threads=threads,
            shared_bytes=shared_bytes,
            params_bytes=len(params),
            buffer_count=len(buffers),
            params=ctypes.addressof(aligned),
            buffers=ctypes.addressof(spans),
            seed=seed,
            max_steps=max_steps,
            copy_timing=0 if late else 1,
        )
        report = _Report()
        status = function(ctypes.byref(launch), ctypes.byref(report))
        if status == 1:
            raise _fault(report)
        if status != 0:
            where, wrong = str(self.path), "compiled for another version of the emulator"
            raise EmulatorError(where, wrong, remedy="build it again with this kgen")

    def _entry(self, name: str) -> Callable[..., int]:
        try:
            return self._library[f"{name}_emulate"]
        except AttributeError as error:
            wrong = f"no kernel named '{name}'"
            raise InputError(str(self.path), wrong, remedy="name an entry of the source") from error


def _check_written_maps(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        if buffer.written is not None and len(buffer.written) != buffer.size_bytes:
            raise InputError(
                f"buffer '{buffer.name}'",
                "its written map does not have one byte a byte",
                seen=f"{len(buffer.written)} for {buffer.size_bytes} bytes",
            )


def _span(buffer: Buffer) -> _BufferSpan:
    written = None
    if buffer.written is not None and buffer.size_bytes > 0:
        written = ctypes.addressof((ctypes.c_uint8 * buffer.size_bytes).from_buffer(buffer.written))
    return _BufferSpan(
        name=buffer.name.encode(),
        address=buffer.address,
        size_bytes=buffer.size_bytes,
        written=written,
        writable=int(buffer.writable),
    )


def _aligned_copy(params: bytes) -> ctypes.Array[ctypes.c_uint64]:
    """The bytes at an 8-byte aligned address, which suits every member that a parameter struct may have."""
    words = (ctypes.c_uint64 * (len(params) // 8 + 1))()
    ctypes.memmove(words, params, len(params))
    return words


def _fault(report: _Report) -> EmulatorFault:
    x, y, z = report.block
    return EmulatorFault(
        report.kind.decode(),
        f"{report.file.decode(errors='replace')}:{report.line}",
        (x, y, z),
        None if report.thread < 0 else report.thread,
        report.wrong.decode(errors="replace"),
        seen=report.seen.decode(errors="replace"),
        remedy=report.remedy.decode(errors="replace"),
    )
