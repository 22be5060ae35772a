"""Which compilers are found, which are passed over, and what is said about them."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.build import toolchain as toolchain_module
from kgen.build.toolchain import Toolchain, find_host_compiler, find_toolchain, host_version, nvcc_candidates
from kgen.errors import ToolchainError

NEW = ("13.0.88", "sm_75 sm_90 sm_120 sm_121")
OLD = ("12.4.131", "sm_80 sm_90")


def fake_nvcc(folder: Path, version: str, codes: str, *, compiles: bool = True) -> Path:
    """An nvcc of that version: a shell script that answers what a real one is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    path.write_text(f"""#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release x, V{version}"; echo "Build cuda_x/compiler.123_0";;
  --list-gpu-code) printf '%s\\n' {codes};;
  *) cat > /dev/null; {"exit 0" if compiles else "echo 'sh: cicc: not found'; exit 127"};;
esac
""")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with g++ and no nvcc: a PATH of one folder, no CUDA variables, no wheels."""
    for name in ("KGEN_NVCC", "KGEN_CXX", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    host = shutil.which("g++")
    assert host is not None
    for name, target in (("g++", host), ("sh", "/bin/sh"), ("cat", "/bin/cat")):
        (binaries / name).symlink_to(target)
    monkeypatch.setenv("PATH", str(binaries))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.setattr(toolchain_module, "DEFAULT_CUDA", str(tmp_path / "usr-local-cuda"))
    return tmp_path


def test_a_real_nvcc_is_found_and_described() -> None:
    found = find_toolchain("sm_120")
    assert found.nvcc is not None
    assert found.builds("sm_120")
    assert found.builds("sm_90")
    assert found.builds("sm_121")
    assert found.builds("sm_120a")
    assert not found.builds("sm_12")
    assert str(found.nvcc) not in found.fingerprint
    assert str(found.host_compiler) not in found.fingerprint
    assert found.nvcc_version in found.fingerprint
    assert found.host_version in found.fingerprint


def test_no_nvcc(machine: Path) -> None:
    best = find_toolchain()
    assert (best.nvcc, best.nvcc_version, best.archs, best.origin) == (None, "", (), "")
    assert best.host_compiler == machine / "bin" / "g++"
    assert find_toolchain("emulator") == best
    with pytest.raises(ToolchainError, match=r"^nvcc: not found, needed for sm_120; pip install 'kgen\[nvcc\]', or"):
        find_toolchain("sm_120")


@pytest.mark.parametrize(
    ("place", "origin", "variable"),
    [
        ("bin", "PATH", ""),
        ("home/bin", "CUDA_HOME", "CUDA_HOME"),
        ("home/bin", "CUDA_PATH", "CUDA_PATH"),
        ("usr-local-cuda/bin", "/usr/local/cuda", ""),
        ("site-packages/nvidia/cu13/bin", "wheel", ""),
    ],
)
def test_places(machine: Path, monkeypatch: pytest.MonkeyPatch, place: str, origin: str, variable: str) -> None:
    path = fake_nvcc(machine / place, *NEW)
    if variable:
        monkeypatch.setenv(variable, str(machine / "home"))
    found = find_toolchain("sm_120")
    assert (found.nvcc, found.origin, found.nvcc_version) == (path, origin, "13.0.88 (compiler.123_0)")
    assert found.archs == ("sm_75", "sm_90", "sm_120", "sm_121")


def test_order_of_preference(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "home"))
    for place in ("site-packages/nvidia/cu13/bin", "usr-local-cuda/bin", "home/bin", "bin"):
        fake_nvcc(machine / place, *NEW)
    host = find_host_compiler()
    origins = [candidate.origin for candidate in nvcc_candidates(host, host_version(host))]
    assert origins == ["PATH", "CUDA_HOME", "/usr/local/cuda", "wheel"]


def test_too_old_nvcc_is_named_and_passed_over(machine: Path) -> None:
    old = fake_nvcc(machine / "bin", *OLD)
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("sm_120")
    assert f"nvcc 12.4.131 at {old} cannot build sm_120 (needs 12.9)" in str(caught.value)
    assert find_toolchain("sm_90").nvcc == old
    new = fake_nvcc(machine / "usr-local-cuda" / "bin", *NEW)
    assert find_toolchain("sm_120").nvcc == new
    assert find_toolchain("sm_90").nvcc == old


def test_an_nvcc_that_knows_the_chip_and_not_its_family_is_too_old(machine: Path) -> None:
    old = fake_nvcc(machine / "bin", "12.8.93", "sm_90 sm_120")
    with pytest.raises(ToolchainError, match=r"nvcc 12\.8\.93 at .* cannot build sm_120 \(needs 12\.9\)"):
        find_toolchain("sm_120")
    assert find_toolchain("sm_90").nvcc == old
    new = fake_nvcc(machine / "usr-local-cuda" / "bin", "12.9.41", "sm_90 sm_120")
    assert find_toolchain("sm_120").nvcc == new


def test_broken_nvcc_is_named_and_passed_over(machine: Path) -> None:
    broken = fake_nvcc(machine / "bin", *NEW, compiles=False)
    silent = machine / "usr-local-cuda" / "bin" / "nvcc"
    silent.parent.mkdir(parents=True)
    silent.write_text("not a program")
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("sm_120")
    assert f"nvcc 13.0.88 at {broken} does not compile (sh: cicc: not found)" in str(caught.value)
    assert f"nvcc at {silent} does not run" in str(caught.value)
    assert find_toolchain().nvcc is None
    wheel = fake_nvcc(machine / "site-packages" / "nvidia" / "cu13" / "bin", *NEW)
    assert find_toolchain("sm_120").nvcc == wheel


def test_named_nvcc_excludes_the_others(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(machine / "bin", *NEW)
    monkeypatch.setenv("KGEN_NVCC", str(machine / "nowhere" / "nvcc"))
    with pytest.raises(ToolchainError, match=r"nowhere/nvcc does not run .*No such file"):
        find_toolchain("sm_120")
    named = fake_nvcc(machine / "mine", *NEW)
    monkeypatch.setenv("KGEN_NVCC", str(named))
    assert (find_toolchain().nvcc, find_toolchain().origin) == (named, "KGEN_NVCC")


def test_same_nvcc_in_two_places_is_tried_once(machine: Path) -> None:
    fake_nvcc(machine / "usr-local-cuda" / "bin", *NEW)
    (machine / "bin" / "nvcc").symlink_to(machine / "usr-local-cuda" / "bin" / "nvcc")
    host = find_host_compiler()
    assert [candidate.origin for candidate in nvcc_candidates(host, host_version(host))] == ["PATH"]


def test_no_host_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ToolchainError, match=r"^C\+\+ compiler: not found, no g\+\+ or c\+\+ on the PATH; install g\+\+"
    ):
        find_toolchain("emulator")
    monkeypatch.setenv("KGEN_CXX", "no-such-g++")
    with pytest.raises(ToolchainError, match=r"^KGEN_CXX: no such compiler, 'no-such-g\+\+'; unset it"):
        find_toolchain("emulator")


def test_host_compiler_that_does_not_work(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_CXX", "cat")
    with pytest.raises(ToolchainError, match="bin/cat: does not work as a C\\+\\+ compiler"):
        find_toolchain("emulator")


def test_host_version() -> None:
    host = find_host_compiler()
    name, version = host_version(host).split()
    assert name in {"g++", "clang"}
    assert [part.isdigit() for part in version.split(".")] == [True] * 3


def test_fingerprint_tells_versions_apart() -> None:
    base = Toolchain(Path("/a/nvcc"), "13.0.88", ("sm_120",), Path("/a/g++"), "g++ 12.2.0", "PATH")
    moved = replace(base, nvcc=Path("/b/nvcc"), host_compiler=Path("/b/g++"), origin="wheel")
    assert base.fingerprint == moved.fingerprint == "nvcc 13.0.88; g++ 12.2.0"
    assert replace(base, nvcc_version="13.1.0").fingerprint != base.fingerprint
    assert replace(base, host_version="g++ 13.1.0").fingerprint != base.fingerprint
    assert base.host_fingerprint == f"g++ 12.2.0 {os.uname().machine}"


def test_compilers_found_by_relative_paths_are_used_from_any_folder(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(machine / "bin", *NEW)
    monkeypatch.chdir(machine)
    for variables in ({"PATH": "bin:/usr/bin"}, {"KGEN_NVCC": "bin/nvcc", "KGEN_CXX": "bin/g++"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = find_toolchain("sm_120")
        assert (found.nvcc, found.host_compiler) == (machine / "bin" / "nvcc", machine / "bin" / "g++")
