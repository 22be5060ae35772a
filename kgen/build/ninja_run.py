"""Running the compile steps of one build in parallel, under ninja."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kgen.build import compile_step
from kgen.build.toolchain import compiler_environment
from kgen.errors import BuildError, ToolchainError

_RUN_PREFIX, _RUN_KEPT_S = "run.", 24 * 3600
_STOP_LIMIT_S = 10


def run_jobs(jobs_of_run: Sequence[Mapping[str, Any]], cache_dir: Path, jobs: int) -> Generator[int]:
    """Run one compile step per job, ``jobs`` at a time; yields a job's number as soon as its result is recorded."""
    output: list[str] = []
    done = 0
    with _run_folder(cache_dir) as folder:
        with _io_errors(cache_dir):
            _write_ninja_file(folder, jobs_of_run)
        with _ninja(folder, jobs) as process:
            assert process.stdout is not None
            for line in process.stdout:
                mark, _, rest = line.strip().partition(" ")
                if mark == compile_step.DONE_MARK:
                    done += 1
                    yield int(rest)
                elif mark == compile_step.IO_ERROR_MARK:
                    raise _cache_error(cache_dir, rest)
                else:
                    output.append(line)
    if done != len(jobs_of_run):
        raise BuildError("build", "ninja did not run every compile", seen="".join(output[-20:]).strip())


@contextmanager
def _io_errors(cache_dir: Path) -> Iterator[None]:
    """Turn an OSError into an error for people that names the cache."""
    try:
        yield
    except OSError as error:
        raise _cache_error(cache_dir, error.strerror or str(error)) from error


def _cache_error(cache_dir: Path, reason: str) -> BuildError:
    return BuildError(
        str(cache_dir),
        "the build cache cannot be written",
        seen=reason[:1].lower() + reason[1:],
        remedy="free space there or choose another folder",
    )


@contextmanager
def _run_folder(cache_dir: Path) -> Iterator[Path]:
    """A folder for one run of ninja; those that a killed run left more than a day ago are removed."""
    with _io_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        for folder in cache_dir.glob(_RUN_PREFIX + "*"):
            with suppress(FileNotFoundError):  # another process may be cleaning too
                if time.time() - folder.stat().st_mtime > _RUN_KEPT_S:
                    shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=cache_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_ninja_file(folder: Path, jobs_of_run: Sequence[Mapping[str, Any]]) -> None:
    step = shlex.join([sys.executable, "-I", "-S", compile_step.__file__]).replace("$", "$$")
    lines = ["rule step", f"  command = {step} $out.json", "  description = $out"]
    for job in jobs_of_run:
        Path(job["entry"]).mkdir(parents=True, exist_ok=True)
        (folder / f"{job['number']}.json").write_text(json.dumps(job), encoding="utf-8")
        lines.append(f"build {job['number']}: step")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def _ninja(folder: Path, jobs: int) -> Iterator[subprocess.Popen[str]]:
    """A running ninja, in a process group of its own; leaving early, for any reason, ends it and its compilers."""
    process = subprocess.Popen(
        [ninja_path(), "-k", "0", "-j", str(max(1, jobs))],
        cwd=folder,
        env=compiler_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # ninja passes it on to the compile steps and waits for them
            try:
                process.communicate(timeout=_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def ninja_path() -> str:
    """The ninja of the ``ninja`` package, else the one on the PATH."""
    try:
        import ninja

        bundled = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        bundled = None
    found = bundled or shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja", "not found", remedy="pip install ninja")
    return found
