"""The process that holds the GPU: reads one JSON request a line, answers one JSON reply a line.

It is killed when it takes too long, so it keeps nothing that the other side needs. ``python -m kgen.measure.worker``
runs it on a GPU; the loop itself runs over any `Backend`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from kgen.device import is_sticky
from kgen.errors import InputError, KgenError
from kgen.measure.job import Job

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Backend(Protocol):
    """What can be asked of a worker. Times are in microseconds; replies are JSON objects or numbers.

    ``point`` is a workload point; a job is loaded before it is checked or armed, a point prepared and the job
    armed at it before it is sampled.
    """

    def open(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the device; its fingerprint."""

    def prepare(self, family: str, layout: Mapping[str, Any], point: Mapping[str, int]) -> None:
        """Make the inputs of a point, once for all jobs of a layout."""

    def load(self, job: Job) -> Mapping[str, int]:
        """Load a job's cubin; its resources."""

    def check(self, name: str) -> Mapping[str, Any]:
        """Validate a loaded job: ``ok``, ``reason``, ``relative_error``."""

    def arm(self, name: str, point: Mapping[str, int]) -> None:
        """Make a job ready to be timed at a point."""

    def sample(self, name: str, point: Mapping[str, int], replays: int) -> list[float]:
        """Time an armed job ``replays`` times."""

    def confirm(self, name: str, point: Mapping[str, int]) -> Mapping[str, Any]:
        """Check what the timed launches compute: ``ok``, ``reason``, ``relative_error``."""

    def disarm(self, name: str, point: Mapping[str, int]) -> None:
        """Give back what `arm` took."""

    def unload(self, name: str) -> None:
        """Give back what `load` took."""

    def canary(self) -> float:
        """The time of a fixed job."""


OPERATIONS = ("open", "prepare", "load", "check", "arm", "sample", "confirm", "disarm", "unload", "canary")


def answer(backend: Backend, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request. ``lost`` in the reply: the process is of no use any more."""
    operation = request.pop("op")
    if operation not in OPERATIONS:
        raise InputError("request", "unknown operation", seen=repr(operation), remedy=f"known: {', '.join(OPERATIONS)}")
    if "job" in request:
        request["job"] = Job.from_json(request["job"])
    try:
        return {"result": getattr(backend, operation)(**request)}
    except KgenError as error:
        status = "infeasible" if isinstance(error, InputError) else "launch_error"
        return {"error": str(error), "status": status, "lost": is_sticky(error)}


def serve(backend: Backend, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until their end, or until the process is lost."""
    for line in requests:
        reply = answer(backend, json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("lost"):
            return


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` is gone, so that a hung one is never left holding a GPU."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the request was made
        sys.exit(1)


def run(backend: Backend) -> None:
    """Serve on the standard streams; what libraries print to standard output goes to standard error instead."""
    die_with_parent(int(sys.argv[-1]))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(backend, sys.stdin, replies)


if __name__ == "__main__":
    from kgen.measure.gpu import DeviceBackend

    run(DeviceBackend())
