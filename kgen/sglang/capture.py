"""The shapes that a server verifies, as JSON lines: what `kgen tune --workload` weights by. No device is waited for."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

CAPTURE_VARIABLE = "KGEN_CAPTURE"
LINES_VARIABLE = "KGEN_CAPTURE_LINES"
DEFAULT_LINES = 100_000
PENDING = 64
"""Copies from the device that may be under way; a forward that finds all of them taken is not recorded."""

logger = logging.getLogger("kgen.sglang")


class WorkloadCapture:
    """Appends one line a verify forward to ``path``, at most ``most_lines`` of them; off without a path."""

    def __init__(self, path: Path | None, layout: str, most_lines: int = DEFAULT_LINES) -> None:
        self._path, self._layout, self._left = path, layout, most_lines
        self._pending: deque[tuple[Any, Any, int]] = deque()

    @classmethod
    def from_environment(cls, layout: str) -> WorkloadCapture:
        """As $KGEN_CAPTURE and $KGEN_CAPTURE_LINES say, on rank 0 only."""
        import torch

        named = os.environ.get(CAPTURE_VARIABLE)
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        lines = int(os.environ.get(LINES_VARIABLE) or DEFAULT_LINES)
        return cls(Path(named) if named and first else None, layout, lines)

    def note(self, forward_batch: Any, requests: int, nodes: int) -> None:
        """Record the first ``requests`` of a forward; the others are padding.

        Lengths that are on the GPU only are copied aside and written once they have arrived.
        """
        if self._path is None or self._left <= 0 or requests == 0:
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
        assert self._path is not None
        line = {
            "family": "verify_mla",
            "layout": self._layout,
            "batch": len(prefixes),
            "nodes": nodes,
            "prefixes": prefixes,
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("kgen stops capturing the workload: %s", error)
            self._left = 0
            return
        self._left -= 1


def _copied_aside(lengths: Any) -> tuple[Any, Any]:
    """A pinned copy that is under way on the current stream, and the event that says when it has arrived."""
    import torch

    copy = torch.empty(lengths.shape, dtype=lengths.dtype, pin_memory=True)
    copy.copy_(lengths, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event
