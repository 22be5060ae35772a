"""The shapes that a server verifies, as JSON lines: what `kgen tune --workload` weights by. No device is waited for."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

from kgen.errors import InputError
from kgen.sglang.environment import positive_number

CAPTURE_VARIABLE = "KGEN_CAPTURE"
LINES_VARIABLE = "KGEN_CAPTURE_LINES"
DEFAULT_LINES = 100_000
PENDING = 64
"""Copies from the device that may be under way; a forward that finds all of them taken is not recorded."""

FIRST_FIELD = b'{"family": '
"""How each line begins."""

logger = logging.getLogger("kgen.sglang")


class WorkloadCapture:
    """Appends one line a verify forward to ``path``, until it has ``most_lines``; off without a path.

    The file is opened once and every line is one unbuffered write, so a reader sees all of it or nothing, and a fork or
    a kill neither repeats nor loses one. What the file cannot take ends the capture with one warning; a file that is
    something else is left as it is.
    """

    def __init__(self, path: Path | None, layout: str, most_lines: int = DEFAULT_LINES) -> None:
        self._layout, self._left = layout, 0
        self._pending: deque[tuple[Any, Any, int]] = deque()
        if path is None:
            return
        try:
            self._left = most_lines - _whole_lines(path)
            self._file = path.open("ab", buffering=0)
        except (OSError, InputError) as error:
            self._stop(error)

    @classmethod
    def from_environment(cls, layout: str) -> WorkloadCapture:
        """As $KGEN_CAPTURE and $KGEN_CAPTURE_LINES say, on rank 0 only; a number that is none is warned of."""
        import torch

        named = os.environ.get(CAPTURE_VARIABLE)
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if not named or not first:
            return cls(None, layout)
        try:
            return cls(Path(named), layout, positive_number(LINES_VARIABLE, DEFAULT_LINES))
        except InputError as error:  # no reason for a server to do without kgen
            logger.warning("kgen captures no workload: %s", error)
            return cls(None, layout)

    def note(self, forward_batch: Any, requests: int, nodes: int) -> None:
        """Record the first ``requests`` of a forward; the others are padding.

        Lengths that are on the GPU only are copied aside and written once they have arrived.
        """
        if self._left <= 0 or requests == 0:
            return
        self._write_arrived()
        lengths = forward_batch.seq_lens_cpu
        if lengths is None and not forward_batch.seq_lens.is_cuda:
            lengths = forward_batch.seq_lens
        if lengths is not None:
            self._write(lengths[:requests].tolist(), nodes)
        elif len(self._pending) < PENDING:
            self._pending.append((*_copied_aside(forward_batch.seq_lens[:requests]), nodes))

    def _write_arrived(self) -> None:
        while self._pending and self._pending[0][1].query():
            lengths, _, nodes = self._pending.popleft()
            self._write(lengths.tolist(), nodes)

    def _write(self, prefixes: list[int], nodes: int) -> None:
        if self._left <= 0:
            return
        fields = {"family": "verify_mla", "layout": self._layout, "batch": len(prefixes), "nodes": nodes}
        line = json.dumps(fields | {"prefixes": prefixes}).encode() + b"\n"
        self._left -= 1
        try:
            written = self._file.write(line)
        except OSError as error:
            self._stop(error)
        else:
            if written != len(line):
                self._stop(os.strerror(errno.ENOSPC))

    def _stop(self, error: Exception | str) -> None:
        logger.warning("kgen stops capturing the workload: %s", error)
        self._left = 0
        self._pending.clear()


def _whole_lines(path: Path) -> int:
    """Lines that a capture already has; the rest of one that was cut off is taken away.

    Raises InputError where something else is there: a pipe would hold up the server, a file would lose its last line.
    """
    if not path.exists():
        return 0
    if not path.is_file():
        raise InputError(str(path), "is no regular file")
    data = path.read_bytes()
    if not data.startswith(FIRST_FIELD[: len(data)]):
        raise InputError(str(path), "is there already, and is no capture", remedy="name another file")
    if not data.endswith(b"\n") and data:
        os.truncate(path, data.rfind(b"\n") + 1)
    return data.count(b"\n")


def _copied_aside(lengths: Any) -> tuple[Any, Any]:
    """A pinned copy that is under way on the current stream, and the event that says when it has arrived."""
    import torch

    copy = torch.empty(lengths.shape, dtype=lengths.dtype, pin_memory=True)
    copy.copy_(lengths, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event
