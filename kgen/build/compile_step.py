"""One compile: the command of every ninja edge that :mod:`kgen.build` writes.

Run as ``python -I -S compile_step.py JOB.json``; it imports the standard library only, so that it starts fast.
An entry becomes trusted at one instant, the rename of ``result.json``. Whatever is killed before that leaves only
``attempt.*`` folders, which the next compile of the entry removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

RESULT_SCHEMA = 1
SOURCE_FILE, RESULT_FILE, LOCK_FILE, ATTEMPT_PREFIX = "source.cu", "result.json", "lock", "attempt."
EXIT_IO_ERROR = 3
DONE_MARK, IO_ERROR_MARK = "kgen-done", "kgen-io-error"
KILLED_MARKS = (
    "died due to signal",
    "Killed signal",
    "fatal error: Killed",
    "out of memory",
    "virtual memory exhausted",
)
"""What nvcc, gcc and cicc print when the machine, not the source, ended them: such a failure is not remembered."""


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trusted_result(entry: Path, key: str, run: str) -> dict[str, Any] | None:
    """The recorded result of an entry, or None when it must be compiled (again).

    A result is trusted if it parses, was made for ``key`` under this schema, and its artefact still has the recorded
    sha256. One that depends on the machine's load (``run`` is not empty: time limit, killed compiler) is trusted by
    the run that made it alone.
    """
    try:
        result: dict[str, Any] = json.loads((entry / RESULT_FILE).read_text(encoding="utf-8"))
        if result["schema"] != RESULT_SCHEMA or result["key"] != key or result["run"] not in ("", run):
            return None
        if result["status"] == "ok" and sha256_file(entry / str(result["artefact"])) != result["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result


def run_compiler(command: list[str], source: Path, tmp: Path, timeout_s: float) -> tuple[int | None, str]:
    """Run a compiler on ``source``; returns its exit status (None: over the time limit) and its output.

    The source goes in through a pipe: nvcc hashes the path of a source *file* into the names of internal symbols,
    which would make the cubin depend on where the cache is.
    """
    env = {**os.environ, "TMPDIR": str(tmp)}
    process = subprocess.Popen(
        command,
        cwd=tmp,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def kill_compiler() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def stop(signum: int, _frame: FrameType | None) -> None:
        kill_compiler()
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    try:
        output, _ = process.communicate(source.read_bytes(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_compiler()
        output, _ = process.communicate()
        return None, output.decode(errors="replace")
    return process.returncode, output.decode(errors="replace")


def compile_entry(job: dict[str, Any], entry: Path, attempt: Path) -> dict[str, Any]:
    """Compile the entry's source inside ``attempt`` and move the artefact into place; returns the result to record."""
    artefact = str(job["artefact"])
    output = attempt / artefact
    command = [str(output) if word == "{out}" else word for word in job["command"]]
    started = time.monotonic()
    status, log = run_compiler(command, entry / SOURCE_FILE, attempt, float(job["timeout_s"]))
    seconds = time.monotonic() - started
    if status not in (None, 0) and os.strerror(errno.ENOSPC) in log:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    killed = status is not None and (status < 0 or (status > 0 and any(mark in log for mark in KILLED_MARKS)))
    result = {
        "schema": RESULT_SCHEMA,
        "key": job["key"],
        "run": job["run"] if status is None or killed else "",
        "status": _status(status, killed),
        "artefact": artefact,
        "sha256": "",
        "seconds": round(seconds, 3),
        "log": log,
    }
    if status == 0:
        result["sha256"] = sha256_file(output)
        output.replace(entry / artefact)
    return result


def _status(exit_status: int | None, killed: bool) -> str:
    if exit_status is None:
        return "compile_timeout"
    if killed:
        return "compile_killed"
    return "ok" if exit_status == 0 else "compile_error"


def build_entry(job: dict[str, Any]) -> None:
    """Make the entry of ``job`` trusted, unless another process did so while this one waited for the lock."""
    entry = Path(job["entry"])
    with (entry / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if trusted_result(entry, job["key"], job["run"]) is not None:
            return
        for left_over in entry.glob(ATTEMPT_PREFIX + "*"):
            shutil.rmtree(left_over, ignore_errors=True)
        attempt = Path(tempfile.mkdtemp(prefix=ATTEMPT_PREFIX, dir=entry))
        try:
            (attempt / SOURCE_FILE).write_text(job["source"], encoding="utf-8")
            (attempt / SOURCE_FILE).replace(entry / SOURCE_FILE)
            result = compile_entry(job, entry, attempt)
            (attempt / RESULT_FILE).write_text(json.dumps(result, indent=1), encoding="utf-8")
            (attempt / RESULT_FILE).replace(entry / RESULT_FILE)
        finally:
            shutil.rmtree(attempt, ignore_errors=True)


def main(job_file: str) -> int:
    """Build the job in ``job_file``; a full or read-only disk ends the step with ``EXIT_IO_ERROR`` and a reason."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        build_entry(job)
    except OSError as error:
        print(f"{IO_ERROR_MARK} {error.strerror or error}", flush=True)
        return EXIT_IO_ERROR
    print(f"{DONE_MARK} {job['number']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
