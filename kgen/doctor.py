"""What this machine has, what it lacks, and what each missing thing costs."""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from kgen.build.toolchain import (
    GET_HOST,
    GET_NVCC,
    Toolchain,
    cannot_build,
    find_host_compiler,
    find_toolchain,
    host_version,
    nvcc_candidates,
)
from kgen.device import cuda_driver
from kgen.errors import DeviceError, KgenError

WANTED_ARCHS = ("sm_90", "sm_120", "sm_121")
GET_GPU_EXTRA = "pip install 'kgen[gpu]'"

_NO_NVCC = "no cubins: `kgen tune` and `kgen emit` cannot run, `kgen check` still runs in the emulator"
_NO_GPU = "`kgen tune` uses the model evaluator and its results are labelled modelled; kernels run in the emulator"
_NO_HOST = "nothing compiles: neither cubins (nvcc needs it too) nor the emulator"
_NO_BINDINGS = "no kernel is timed or launched on a GPU, even where there is one"
_NO_TORCH = "kgen.runtime has no tensors to launch on; tune, check and emit do not need it"
_NO_SGLANG = "no server here to call the runtime from; all else works"

_NO_EMULATOR = "no kernel can be proven right on this machine without a GPU"
_REPORT = "whatever needs it may fail; please report this line"
_PROBE_LIMIT_S = 120.0
_PROBE_KERNEL = """\
#include <kgen/primitives.cuh>
struct Params { int* values; };
KGEN_KERNEL(probe, 32, 1, Params, params) {
  kgen::Global<int>{params.values}.store(kgen::thread_index(), kgen::thread_index());
}
"""

Status = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: ``found`` is what is there, ``remedy`` what its lack costs and what to do about it.

    ``ok`` works; ``warn`` is there but of limited use; ``missing`` is not there, or does not work.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything that kgen can use, in the order in which it is needed. Never raises."""
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("python", lambda: [_python()]),
        ("compilers", _compilers),
        ("ninja", lambda: [_ninja()]),
        ("emulator", lambda: [_emulator()]),
        ("CUDA driver", _driver_and_gpus),
        ("torch", lambda: [_package("torch", _NO_TORCH, GET_GPU_EXTRA)]),
        ("cuda-bindings", lambda: [_package("cuda-bindings", _NO_BINDINGS, GET_GPU_EXTRA)]),
        ("sglang", lambda: [_package("sglang", _NO_SGLANG, "install it where you serve")]),
    )
    return [finding for name, check in checks for finding in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a check, or one that says how it failed: a sick machine is what a doctor is for."""
    try:
        return check()
    except KgenError as error:
        seen = f", {error.seen}" if error.seen else ""
        return [Finding(name, "missing", f"{error.where}: {error.wrong}{seen}", error.remedy)]
    except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
        return [Finding(name, "missing", f"the check failed: {type(error).__name__}: {error}", _REPORT)]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}, {sys.executable}")


def _compilers() -> list[Finding]:
    """g++ and nvcc: an nvcc that is of no use is reported with the reason, and the next one is looked at."""
    try:
        host = find_host_compiler()
        version = host_version(host)
    except KgenError as error:
        missing_nvcc = Finding("nvcc", "missing", "not tried: it needs a C++ compiler", f"{_NO_NVCC}; {GET_HOST}")
        return [Finding("C++ compiler", "missing", str(error), f"{_NO_HOST}; {GET_HOST}"), missing_nvcc]
    findings = [Finding("C++ compiler", "ok", f"{version}, {host}")]
    chosen: Toolchain | None = None
    for candidate in nvcc_candidates(host, version):
        toolchain = candidate.toolchain
        if toolchain is None:
            findings.append(Finding("nvcc", "missing", candidate.problem, "not used"))
        elif not toolchain.builds("sm_120"):
            findings.append(Finding("nvcc", "warn", cannot_build(toolchain, "sm_120"), f"not used; {GET_NVCC}"))
        else:
            chosen = toolchain
            break
    if chosen is None:
        found = "none that builds sm_120" if findings[1:] else "not found"
        return [*findings, Finding("nvcc", "missing", found, f"{_NO_NVCC}; {GET_NVCC}")]
    return [*findings, _chosen_nvcc(chosen)]


def _chosen_nvcc(toolchain: Toolchain) -> Finding:
    where = f"{toolchain.nvcc_version}, {toolchain.nvcc} (from {toolchain.origin})"
    built = [arch for arch in WANTED_ARCHS if toolchain.builds(arch)]
    lacking = [arch for arch in WANTED_ARCHS if arch not in built]
    found = f"{where}, builds {', '.join(built)}"
    if not lacking:
        return Finding("nvcc", "ok", found)
    return Finding("nvcc", "warn", found, f"no kernels for {', '.join(lacking)}; {GET_NVCC}")


def _ninja() -> Finding:
    from kgen.build.ninja_run import ninja_path

    try:
        return Finding("ninja", "ok", ninja_path())
    except KgenError as error:
        return Finding("ninja", "missing", error.wrong, f"nothing is compiled; {error.remedy}")


def _emulator() -> Finding:
    """Compile a one-line kernel for the CPU and run it."""
    import numpy as np

    from kgen.build import EMULATOR, build
    from kgen.emulator import Buffer, EmulatedModule
    from kgen.render import Source

    text = _PROBE_KERNEL
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    source = Source(family="doctor", name="probe", text=text, mapped_text=text, sha256=sha256, entries=("probe",))
    values = np.zeros(32, dtype=np.int32)
    with tempfile.TemporaryDirectory(prefix="kgen-doctor.") as folder:
        toolchain = find_toolchain(EMULATOR)
        (result,) = build(
            [source], arch=EMULATOR, toolchain=toolchain, cache_dir=Path(folder), jobs=1, timeout_s=_PROBE_LIMIT_S
        )
        if result.path is None:
            return Finding("emulator", "missing", f"does not compile: {result.reason}", _NO_EMULATOR)
        EmulatedModule(result.path).launch(
            "probe",
            grid=(1, 1, 1),
            threads=32,
            shared_bytes=0,
            params=values.ctypes.data.to_bytes(8, sys.byteorder),
            buffers=[Buffer("values", values.ctypes.data, values.nbytes, writable=True)],
        )
    if not np.array_equal(values, np.arange(32)):
        return Finding("emulator", "missing", "a one-line kernel gave a wrong result", _NO_EMULATOR)
    return Finding("emulator", "ok", f"compiled a kernel in {result.seconds:.1f} s and ran it")


def _package(name: str, cost: str, remedy: str) -> Finding:
    """An installed distribution by its metadata alone: importing torch takes seconds."""
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", f"{cost}; {remedy}")


def _driver_and_gpus() -> list[Finding]:
    """The CUDA driver and every GPU that this process sees."""
    try:
        major, minor = cuda_driver.driver_version()
        count = cuda_driver.device_count()
    except DeviceError as error:
        why = error.wrong if error.where == "CUDA driver" else f"{error.where} {error.wrong}"
        remedy = f"; {error.remedy}" if error.remedy else ""
        return [
            Finding("CUDA driver", "missing", why, f"{_NO_BINDINGS}{remedy}"),
            Finding("GPU", "missing", "none seen", _NO_GPU),
        ]
    driver = Finding("CUDA driver", "ok", f"supports CUDA {major}.{minor}")
    if count == 0:
        return [driver, Finding("GPU", "missing", "none seen (CUDA_VISIBLE_DEVICES?)", _NO_GPU)]
    return [driver, *(_gpu(ordinal) for ordinal in range(count))]


def _gpu(ordinal: int) -> Finding:
    from kgen.device import Device

    device = Device.open(ordinal)
    try:
        mark = device.fingerprint()
    finally:
        device.close()
    found = (
        f"{ordinal}: {mark.name}, compute capability {mark.compute_capability}, {mark.sms} SMs, "
        f"{mark.shared_bytes_per_block} B shared per block, {mark.l2_bytes >> 20} MiB L2"
    )
    arch = "sm_" + mark.compute_capability.replace(".", "")
    if arch in {"sm_120", "sm_121"}:
        return Finding("GPU", "ok", found)
    return Finding("GPU", "warn", found, "times for sm_120 that are taken here are labelled proxy")
