"""Which compilers there are: nvcc (environment, PATH, CUDA folders, pip wheels) and the host's C++ compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import ToolchainError

OLDEST_WITH_FAMILIES = (12, 9)
"""The first nvcc that knows ``sm_120f``, which is what is built from compute capability 10.0 on."""
GET_NVCC = "pip install 'kgen[nvcc]', or install CUDA 12.9 or newer and set KGEN_NVCC to its nvcc"
GET_HOST = "install g++ (Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set KGEN_CXX"
PROBE_SOURCE = 'extern "C" __global__ void probe(int* x) { *x = 1; }\n'
STDIN = "/dev/stdin"
DEFAULT_CUDA = "/usr/local/cuda"
_PROBE_LIMIT_S = 60
_VERSION_MACROS = "__clang_major__ __clang_minor__ __clang_patchlevel__ __GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__\n"

# A user's variables that would change what a compiler makes without changing a build's key.
_FOREIGN_VARIABLES = (
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
)


@dataclass(frozen=True)
class Toolchain:
    """The compilers of one machine. ``nvcc`` is None, and its fields empty, where none was asked for or none works.

    ``archs`` are the cubin architectures that nvcc lists (``sm_90``, ...); ``origin`` says where nvcc was found.
    """

    nvcc: Path | None
    nvcc_version: str
    archs: tuple[str, ...]
    host_compiler: Path
    host_version: str
    origin: str

    @property
    def host_fingerprint(self) -> str:
        """What an emulator build depends on: compiler, version and machine, no paths."""
        return f"{self.host_version} {platform.machine()}"

    @property
    def nvcc_fingerprint(self) -> str:
        """The version of nvcc, which makes a cubin's code; the host compiler only reads the headers before it."""
        return f"nvcc {self.nvcc_version}"

    @property
    def fingerprint(self) -> str:
        """Both compilers' versions, no paths: what a build is kept by."""
        return f"{self.nvcc_fingerprint}; {self.host_version}"

    def builds(self, arch: str) -> bool:
        """Whether nvcc makes cubins for ``arch``; ``sm_120a`` and ``sm_120f`` count as ``sm_120``."""
        release = tuple(map(int, re.findall(r"\d+", self.nvcc_version)[:2]))
        return arch.rstrip("af") in self.archs and (not has_family(arch) or release >= OLDEST_WITH_FAMILIES)

    def require(self, arch: str) -> None:
        """Raise ToolchainError, which says what to do, unless this toolchain builds for ``arch``."""
        if self.nvcc is None:
            raise ToolchainError("nvcc", "not found", seen=f"needed for {arch}", remedy=GET_NVCC)
        if not self.builds(arch):
            raise ToolchainError("nvcc", cannot_build(self, arch), remedy=GET_NVCC)


@dataclass(frozen=True)
class NvccCandidate:
    """One nvcc that was looked at: ``toolchain`` if it works, else ``problem``, one line for people."""

    path: Path
    origin: str
    toolchain: Toolchain | None
    problem: str


def find_toolchain(arch: str | None = None) -> Toolchain:
    """The toolchain for ``arch``: ``sm_*``, ``emulator`` (nvcc is not looked for), or None for the best there is.

    The first nvcc that works, and builds for ``arch``, is taken; $KGEN_NVCC excludes all others. Raises ToolchainError
    if there is no C++ compiler, or if ``arch`` is an ``sm_*`` and no nvcc builds for it; it names each one and why.
    """
    host = find_host_compiler()
    version = host_version(host)
    without_nvcc = Toolchain(None, "", (), host, version, "")
    if arch == "emulator":
        return without_nvcc
    problems = []
    for candidate in nvcc_candidates(host, version):
        toolchain = candidate.toolchain
        if toolchain is not None and (arch is None or toolchain.builds(arch)):
            return toolchain
        problems.append(cannot_build(toolchain, arch) if toolchain and arch else candidate.problem)
    if arch is None:
        return without_nvcc
    if not problems:
        without_nvcc.require(arch)
    raise ToolchainError("nvcc", "; ".join(problems), remedy=GET_NVCC)


def find_host_compiler() -> Path:
    """The C++ compiler: $KGEN_CXX, $CXX, g++, c++. Raises ToolchainError if there is none."""
    named = os.environ.get("KGEN_CXX", "")
    if named and shutil.which(named) is None:
        raise ToolchainError("KGEN_CXX", "no such compiler", seen=repr(named), remedy="unset it, or name a working g++")
    for name in (named, os.environ.get("CXX", ""), "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found).absolute()  # compilers run in a folder of their own
    raise ToolchainError("C++ compiler", "not found", seen="no g++ or c++ on the PATH", remedy=GET_HOST)


def host_version(host: Path) -> str:
    """Name and version of a C++ compiler, e.g. ``g++ 12.2.0``, ``clang 17.0.6``. Raises ToolchainError if it fails."""
    answer = _run([str(host), "-E", "-P", "-x", "c++", "-"], _VERSION_MACROS).stdout.split()
    for name, parts in (("clang", answer[:3]), ("g++", answer[3:])):
        if len(answer) == 6 and all(part.isdigit() for part in parts):
            return f"{name} {'.'.join(parts)}"
    raise ToolchainError(str(host), "does not work as a C++ compiler", remedy=GET_HOST)


def compiler_environment() -> dict[str, str]:
    """The environment that compilers run in: the caller's, without what would change their output or its language."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
    return {**kept, "LC_ALL": "C", "NINJA_STATUS": ""}


def nvcc_candidates(host: Path, version: str) -> Iterator[NvccCandidate]:
    """Every nvcc of this machine in the order of preference, each tried on a one-line kernel when it is reached."""
    seen = set()
    for path, origin in _nvcc_paths():
        if path.resolve() not in seen:
            seen.add(path.resolve())
            yield _examine(path.absolute(), origin, host, version)


def cannot_build(toolchain: Toolchain, arch: str) -> str:
    """The sentence that says that a working nvcc is not good enough for ``arch``."""
    text = f"nvcc {toolchain.nvcc_version.split()[0]} at {toolchain.nvcc} cannot build {arch}"
    if has_family(arch):
        return f"{text} (needs {'.'.join(map(str, OLDEST_WITH_FAMILIES))})"
    return f"{text} (it lists {', '.join(toolchain.archs)})"


def has_family(arch: str) -> bool:
    """Whether nvcc can build for the family of ``arch``, as in ``sm_120f``: from compute capability 10.0 on."""
    return re.match(r"sm_\d{3}", arch) is not None


def _nvcc_paths() -> Iterator[tuple[Path, str]]:
    named = os.environ.get("KGEN_NVCC")
    if named:
        yield Path(named), "KGEN_NVCC"
        return
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path), "PATH"
    places = [(os.environ.get(name), name) for name in ("CUDA_HOME", "CUDA_PATH")] + [(DEFAULT_CUDA, "/usr/local/cuda")]
    for folder, origin in places:
        if folder and (path := Path(folder) / "bin" / "nvcc").is_file():
            yield path, origin
    for folder in sys.path:
        for path in sorted((Path(folder) / "nvidia").glob("cu*/bin/nvcc"), reverse=True):
            yield path, "wheel"


def _examine(path: Path, origin: str, host: Path, version: str) -> NvccCandidate:
    """Ask an nvcc for its version and archs, and let it compile one line: a wheel may lack its other parts."""
    banner = _run([str(path), "--version"])
    release = re.search(r"\bV(\d+\.\d+\.\d+)", banner.stdout)
    if release is None:
        return NvccCandidate(path, origin, None, f"nvcc at {path} does not run ({_first_line(banner)})")
    compiler = re.search(r"compiler\.\d+_\d+", banner.stdout)
    nvcc_version = release[1] + (f" ({compiler.group()})" if compiler else "")
    archs = tuple(re.findall(r"^sm_\w+$", _run([str(path), "--list-gpu-code"]).stdout, re.MULTILINE))
    toolchain = Toolchain(path, nvcc_version, archs, host, version, origin)
    with tempfile.TemporaryDirectory(prefix="kgen-probe.") as folder:
        arch = ["-arch=sm_120"] if toolchain.builds("sm_120") else []
        output = str(Path(folder) / "probe.cubin")
        done = _run([str(path), "-ccbin", str(host), "-cubin", "-x", "cu", *arch, "-o", output, STDIN], PROBE_SOURCE)
    if done.returncode:
        problem = f"nvcc {release[1]} at {path} does not compile ({_first_line(done)})"
        return NvccCandidate(path, origin, None, problem)
    return NvccCandidate(path, origin, toolchain, "")


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a compiler with ``text`` on its standard input; one that cannot be run has status 127 and says why."""
    try:
        return subprocess.run(
            command,
            input=text,
            env=compiler_environment(),
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=_PROBE_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _first_line(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter((done.stderr + done.stdout).strip().splitlines()), f"exit status {done.returncode}")
