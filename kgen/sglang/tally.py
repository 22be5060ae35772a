"""Counts of what ran on kgen's kernels and of what was left to SGLang, by reason; each reason is logged once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.sglang.metrics import Metrics

logger = logging.getLogger("kgen.sglang")

VERIFY = "verify"
KV_MOVE = "a KV move"


class Tally:
    """``ran`` counts calls on kgen's kernels by kind, ``left`` those that SGLang did, by kind and reason.

    Under a CUDA graph Python runs at capture only, so ``attention`` counts captured layer calls there; ``verify``
    counts forwards, replays too. ``metrics``, where there are any, get the same.
    """

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.metrics: Metrics | None = None

    def did(self, kind: str, how: str = "") -> None:
        """One call of ``kind`` that kgen served; ``how`` the pack answered is counted beside it."""
        self.ran[f"{kind} by {how}" if how else kind] += 1
        if self.metrics is not None:
            self.metrics.did(kind, how)

    def left_to_sglang(self, kind: str, reason: str) -> None:
        """One call of ``kind`` that SGLang's own code served, and why."""
        self.left[kind, reason] += 1
        if self.left[kind, reason] == 1:
            logger.warning("kgen leaves %s to SGLang: %s", kind, reason)
        if self.metrics is not None:
            self.metrics.left_to_sglang(kind, reason)


class Answers:
    """How the pack answered each verify forward, said by its first layer on kgen; a replay's was said at capture."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._of_graphs: dict[int, str] = {}
        self._graph, self._due = 0, False

    def begin(self, graph: int = 0) -> None:
        """A forward without a graph, or the capture of the graph of so many requests."""
        self._graph, self._due = graph, not graph

    def answered(self, how: str) -> None:
        """A layer's call was matched so."""
        if self._graph:
            self._of_graphs[self._graph] = how
        elif self._due:
            self._tally.did(VERIFY, how)
            self._due = False

    def replay(self, graph: int) -> None:
        """The graph of so many requests runs; the layers are not asked again."""
        self._graph, self._due = 0, False
        if graph in self._of_graphs:
            self._tally.did(VERIFY, self._of_graphs[graph])
