"""A worker process that can be killed at any moment, with a time limit on every request."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.errors import DeviceError, KgenError
from kgen.records import Status

WORKER_COMMAND = (sys.executable, "-m", "kgen.measure.worker")
GRACE_S = 5.0  # between the end of a worker's requests and its killing
STDERR_TAIL = 600


def _environment() -> dict[str, str]:
    """This process's environment, in which the worker imports the same kgen."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class WorkerError(KgenError):
    """A request failed in the worker; ``status`` says how (a trial's status), ``lost`` that the worker is gone."""

    def __init__(self, where: str, wrong: str, *, status: Status, lost: bool) -> None:
        self.status, self.lost = status, lost
        super().__init__(where, wrong)


class WorkerProcess:
    """One running worker. The command gets this process's id as its last argument."""

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._pending = b""
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C is for this process; a kill takes the worker's children too
                bufsize=0,
                env=_environment(),
            )
        except OSError as error:
            self._stderr.close()
            raise DeviceError("measuring worker", "cannot be started", seen=str(error)) from error

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def request(self, operation: str, timeout_s: float, **arguments: Any) -> Any:
        """The result of one request; WorkerError where it fails, takes longer or ends the worker."""
        assert self._process.stdin is not None
        line = json.dumps({"op": operation, **arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            reply = json.loads(self._read_line(timeout_s))
        except TimeoutError:
            self.kill()
            raise WorkerError(operation, f"not done after {timeout_s:g} s", status="hang", lost=True) from None
        except (OSError, EOFError) as error:
            self._wait()
            self.kill()
            wrong = f"the worker ended ({self._ending()})"
            raise WorkerError(operation, wrong, status="launch_error", lost=True) from error
        if "error" in reply:
            if reply["lost"]:
                self.kill()
            raise WorkerError(operation, reply["error"], status=reply["status"], lost=reply["lost"])
        return reply["result"]

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                received = os.read(self._process.stdout.fileno(), 1 << 16)
                if not received:
                    raise EOFError
                self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ending(self) -> str:
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()[-STDERR_TAIL:]
        return f"{how}: {said}" if said else how

    def close(self) -> None:
        """End the worker: by the end of its requests, or killed where that takes longer than `GRACE_S`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._wait()
        self.kill()
        self._process.stdout.close()
        self._stderr.close()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)

    def kill(self) -> None:
        """Kill the worker and its children, now; harmless where they are gone."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
