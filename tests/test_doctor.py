"""The report on a machine: what is there, what is not, and that a sick machine never stops it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kgen import device, doctor
from kgen.build import toolchain
from kgen.build.toolchain import NvccCandidate, Toolchain
from kgen.device import cuda_driver
from kgen.doctor import Finding, examine
from kgen.errors import DeviceError
from kgen.records import DeviceFingerprint

NAMES = [
    "python",
    "C++ compiler",
    "nvcc",
    "ninja",
    "emulator",
    "CUDA driver",
    "GPU",
    "torch",
    "cuda-bindings",
    "sglang",
]
NEW = Toolchain(Path("/new/nvcc"), "13.0.88", ("sm_90", "sm_120", "sm_121"), Path("/g++"), "g++ 12.2.0", "PATH")
OLD = Toolchain(Path("/old/nvcc"), "12.4.131", ("sm_90",), Path("/g++"), "g++ 12.2.0", "PATH")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine() -> None:
    findings = examine()
    assert list(dict.fromkeys(finding.name for finding in findings)) == NAMES
    found = by_name(findings)
    for name in ("python", "C++ compiler", "ninja", "emulator", "nvcc"):
        assert found[name].status == "ok", found[name]
    assert found["nvcc"].found.endswith("builds sm_90, sm_120, sm_121")
    assert all(finding.remedy for finding in findings if finding.status != "ok")


def test_empty_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KGEN_CXX", "CXX", "KGEN_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    found = by_name(examine())
    assert list(found) == NAMES
    assert found["C++ compiler"].status == found["nvcc"].status == found["emulator"].status == "missing"
    assert "nothing compiles" in found["C++ compiler"].remedy
    assert "apt install g++" in found["C++ compiler"].remedy


def candidates(monkeypatch: pytest.MonkeyPatch, *found: NvccCandidate) -> list[Finding]:
    monkeypatch.setattr(doctor, "nvcc_candidates", lambda _host, _version: iter(found))
    return [finding for finding in doctor._compilers() if finding.name == "nvcc"]


def test_old_and_broken_nvcc_are_reported_and_the_next_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = NvccCandidate(Path("/b/nvcc"), "PATH", None, "nvcc 13.0.88 at /b/nvcc does not compile (cicc: not found)")
    old, new = (NvccCandidate(Path("/x"), "PATH", tools, "") for tools in (OLD, NEW))
    assert candidates(monkeypatch, broken, old, new) == [
        Finding("nvcc", "missing", broken.problem, "not used"),
        Finding(
            "nvcc",
            "warn",
            "nvcc 12.4.131 at /old/nvcc cannot build sm_120 (needs 12.9)",
            f"not used; {toolchain.GET_NVCC}",
        ),
        Finding("nvcc", "ok", "13.0.88, /new/nvcc (from PATH), builds sm_90, sm_120, sm_121"),
    ]
    assert candidates(monkeypatch, old)[-1].found == "none that builds sm_120"
    (none,) = candidates(monkeypatch)
    assert (none.status, none.found) == ("missing", "not found")
    assert none.remedy.startswith("no cubins: `kgen tune` and `kgen emit` cannot run")


def test_nvcc_without_one_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Toolchain(Path("/n"), "12.9.41", ("sm_90", "sm_120"), Path("/g++"), "g++ 12.2.0", "wheel")
    (finding,) = candidates(monkeypatch, NvccCandidate(Path("/n"), "wheel", tools, ""))
    assert finding.status == "warn"
    assert finding.remedy == f"no kernels for sm_121; {toolchain.GET_NVCC}"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[int, int]:
        raise DeviceError("CUDA driver", "not found", remedy="install the NVIDIA driver")

    monkeypatch.setattr(cuda_driver, "driver_version", fail)
    driver, gpu = doctor._driver_and_gpus()
    assert (driver.status, driver.found) == ("missing", "not found")
    assert driver.remedy.endswith("install the NVIDIA driver")
    assert (gpu.status, gpu.found) == ("missing", "none seen")
    assert "model evaluator and its results are labelled modelled" in gpu.remedy


@pytest.mark.parametrize(("capability", "status"), [("12.0", "ok"), ("12.1", "ok"), ("9.0", "warn")])
def test_gpu(monkeypatch: pytest.MonkeyPatch, capability: str, status: str) -> None:
    mark = DeviceFingerprint(capability, 188, 101376, 128 << 20, 1000, "Test GPU", "13.0")
    closed: list[int] = []

    def open_device(ordinal: int) -> Any:
        return SimpleNamespace(fingerprint=lambda: mark, close=lambda: closed.append(ordinal))

    monkeypatch.setattr(cuda_driver, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 2)
    monkeypatch.setattr(device.Device, "open", open_device)
    driver, *gpus = doctor._driver_and_gpus()
    assert driver == Finding("CUDA driver", "ok", "supports CUDA 13.0")
    assert [gpu.status for gpu in gpus] == [status] * 2
    expected = f"1: Test GPU, compute capability {capability}, 188 SMs, 101376 B shared per block, 128 MiB L2"
    assert gpus[1].found == expected
    assert ("proxy" in gpus[1].remedy) == (status == "warn")
    assert closed == [0, 1]


def test_missing_package_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    finding = doctor._package("torch", "no tensors", "pip install it")
    assert finding == Finding("torch", "missing", "not installed", "no tensors; pip install it")


def test_what_is_known_to_be_missing_is_nothing_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_CXX", "no-such-g++")
    emulator = by_name(examine())["emulator"]
    assert emulator.found == "KGEN_CXX: no such compiler, 'no-such-g++'"
    assert emulator.remedy == "unset it, or name a working g++"


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no idea")

    monkeypatch.setattr(doctor, "_ninja", broken)
    monkeypatch.setattr(doctor, "_emulator", lambda: Finding("emulator", "ok", "not looked at"))
    found = by_name(examine())
    assert found["ninja"].status == "missing"
    assert found["ninja"].found == "the check failed: RuntimeError: no idea"
    assert list(found) == NAMES
