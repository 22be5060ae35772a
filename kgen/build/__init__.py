"""Sources to cubins (or emulator objects): parallel, content-addressed, atomic.

An entry is a folder ``<cache_dir>/<key[:2]>/<key>/`` that holds ``source.cu``, the artefact and ``result.json``; the
key covers the architecture, the flags, the toolchain and the source. compile_step.py says when an entry is trusted.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.build import compile_step
from kgen.build.ninja_run import run_jobs
from kgen.build.toolchain import STDIN, Toolchain, has_family
from kgen.errors import BuildError
from kgen.resources import INCLUDE

if TYPE_CHECKING:
    from kgen.render import Source

EMULATOR = "emulator"
COMPILE_LIMIT_S = 300.0
"""Longest compile of one source, unless somebody asks for another; a kernel takes a second or two."""
NVCC_FLAGS = ("-cubin", "-std=c++17", "-Xptxas", "-v", "-x", "cu")
_NOT_HANDED_ON = re.compile(r"^.*'setmaxnreg' ignored.*$", re.MULTILINE)
"""What ptxas only informs of: registers stay where they are, and warps that wait for some would wait for ever."""
_ERROR_LINE = re.compile(r"^.*\b(?:fatal )?error\b.*$|^.*undefined reference to.*$|^nvcc fatal.*$", re.MULTILINE)
_PTXAS_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class EntryResources:
    """What ptxas says that one kernel takes: registers and stack per thread, shared and spill bytes."""

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class BuildResult:
    """One source built for one arch. ``path`` is None and ``sha256`` empty unless ``status`` is ``ok``.

    The other statuses are ``compile_error``, which the source is to blame for, and those of a `stopped` compiler.
    ``resources`` is empty for the emulator. ``seconds`` is what the compile took, also when ``cached``.
    """

    source: Source
    arch: str
    status: str
    path: Path | None
    sha256: str
    resources: Mapping[str, EntryResources]
    log: str
    key: str
    seconds: float
    cached: bool

    @property
    def stopped(self) -> bool:
        """Whether the machine ended the compiler (time limit, out of memory): another time it may get through."""
        return self.status in ("compile_timeout", "compile_killed")

    @property
    def reason(self) -> str:
        """Why it failed, as one line for people; empty for ``ok``. The whole story is in ``log``."""
        if self.status == "ok":
            return ""
        if self.status == "compile_timeout":
            return f"compiler stopped after {self.seconds:.0f} s"
        if stuck := _NOT_HANDED_ON.search(self.log):
            return f"warps would wait for ever for registers that others keep: {stuck.group().strip()}"
        if self.status == "compile_killed":
            return f"the machine killed the compiler: {self._error_line}"
        return self._error_line

    @property
    def _error_line(self) -> str:
        found = _ERROR_LINE.search(self.log)
        lines = self.log.strip().splitlines() or ["the compiler failed without a message"]
        return found.group().strip() if found else lines[-1].strip()


@dataclass(frozen=True)
class _Recipe:
    """How to compile for one arch: the command (``{out}`` is the artefact), and what else the artefact depends on."""

    arch: str
    command: tuple[str, ...]
    artefact: str
    identity: tuple[str, ...]

    def key(self, source: Source) -> str:
        """The content address of ``source`` built by this recipe."""
        parts = [str(compile_step.RESULT_SCHEMA), self.arch, *self.identity, source.sha256]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class _Entry:
    """A source, its key and its folder in the cache."""

    source: Source
    key: str
    folder: Path


def build(
    sources: Sequence[Source],
    *,
    arch: str,
    toolchain: Toolchain,
    cache_dir: Path,
    jobs: int,
    timeout_s: float = COMPILE_LIMIT_S,
) -> list[BuildResult]:
    """What `build_each` gives, in the order of ``sources``; ``arch`` is ``sm_120``, ..., or ``emulator``."""
    done = build_each(sources, arch=arch, toolchain=toolchain, cache_dir=cache_dir, jobs=jobs, timeout_s=timeout_s)
    results = {result.source.sha256: result for result in done}
    return [results[source.sha256] for source in sources]


def build_each(
    sources: Sequence[Source],
    *,
    arch: str,
    toolchain: Toolchain,
    cache_dir: Path,
    jobs: int,
    timeout_s: float = COMPILE_LIMIT_S,
) -> Generator[BuildResult]:
    """Build every distinct source, ``jobs`` at a time; each result comes as soon as it is there, cached ones first.

    A failing or slow source is a result with its status, and the others go on. Sources that are in the cache are not
    compiled again, except one that ran out of ``timeout_s``. Raises ToolchainError if the toolchain cannot build for
    ``arch``, and BuildError if the cache cannot be written or the compiles cannot be run at all.
    """
    recipe = _recipe(arch, toolchain)
    run = uuid.uuid4().hex
    entries = {source.sha256: _entry(source, recipe, cache_dir.resolve()) for source in sources}
    missing = []
    for entry in entries.values():
        record = compile_step.trusted_result(entry.folder, entry.key, "")
        if record is None:
            missing.append(entry)
        else:
            yield _result(entry, arch, record, cached=True)
    if not missing:
        return
    jobs_of_run = [_job(entry, recipe, run, number, timeout_s) for number, entry in enumerate(missing)]
    with closing(run_jobs(jobs_of_run, cache_dir.resolve(), jobs)) as finished:
        for number in finished:
            entry = missing[number]
            record = compile_step.trusted_result(entry.folder, entry.key, run)
            if record is None:
                raise BuildError(str(entry.folder), "the result vanished while it was read")
            yield _result(entry, arch, record, cached=False)


def build_key(source: Source, *, arch: str, toolchain: Toolchain) -> str:
    """The content address under which :func:`build` keeps ``source``: 64 hex digits."""
    return _recipe(arch, toolchain).key(source)


def parse_resources(log: str) -> dict[str, EntryResources]:
    """Read the report of ``ptxas -v``: entry name -> resources."""
    found = {}
    for match in _PTXAS_ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["name"]] = EntryResources(
            registers=int(match["registers"]),
            static_shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=int(match["stack"]),
            spill_store_bytes=int(match["stores"]),
            spill_load_bytes=int(match["loads"]),
        )
    return found


def _recipe(arch: str, toolchain: Toolchain) -> _Recipe:
    host = str(toolchain.host_compiler)
    if arch == EMULATOR:
        from kgen.emulator import EMULATOR_FLAGS, EMULATOR_LIBRARIES

        command = (host, *EMULATOR_FLAGS, "-I", str(INCLUDE), "-o", "{out}", "-", *EMULATOR_LIBRARIES)
        identity = (*EMULATOR_FLAGS, *EMULATOR_LIBRARIES, toolchain.host_fingerprint, _emulator_headers_digest())
        return _Recipe(arch, command, "kernel.so", identity)
    toolchain.require(arch)
    command = (str(toolchain.nvcc), "-ccbin", host, f"-arch={_with_features(arch)}", *NVCC_FLAGS, "-o", "{out}", STDIN)
    return _Recipe(arch, command, "kernel.cubin", (_with_features(arch), *NVCC_FLAGS, toolchain.fingerprint))


def _with_features(arch: str) -> str:
    """``arch`` with what its family alone has, warps that hand registers on for one: ``sm_90a``, ``sm_120f``.

    Such cubins run on the same devices: there is no other 9.x, and ``f`` means a family's later ones too (PTX ISA 8.8).
    """
    if not arch[-1].isdigit():
        return arch
    return f"{arch}f" if has_family(arch) else "sm_90a" if arch == "sm_90" else arch


def _emulator_headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((INCLUDE / "kgen_emulator").rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(INCLUDE).as_posix()}\0{compile_step.sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _entry(source: Source, recipe: _Recipe, cache_dir: Path) -> _Entry:
    key = recipe.key(source)
    return _Entry(source, key, cache_dir / key[:2] / key)


def _job(entry: _Entry, recipe: _Recipe, run: str, number: int, timeout_s: float) -> dict[str, Any]:
    return {
        "number": number,
        "run": run,
        "key": entry.key,
        "entry": str(entry.folder),
        "source": entry.source.mapped_text,
        "command": recipe.command,
        "artefact": recipe.artefact,
        "timeout_s": timeout_s,
    }


def _result(entry: _Entry, arch: str, record: Mapping[str, Any], *, cached: bool) -> BuildResult:
    status = "compile_error" if _NOT_HANDED_ON.search(record["log"]) else record["status"]
    ok = status == "ok"
    return BuildResult(
        source=entry.source,
        arch=arch,
        status=status,
        path=entry.folder / record["artefact"] if ok else None,
        sha256=record["sha256"] if ok else "",
        resources=parse_resources(record["log"]) if ok else {},
        log=record["log"],
        key=entry.key,
        seconds=record["seconds"],
        cached=cached,
    )
