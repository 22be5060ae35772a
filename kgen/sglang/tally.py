"""Counts of what ran on kgen's kernels and of what was left to SGLang, by reason; each reason is logged once."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger("kgen.sglang")


class Tally:
    """``ran`` counts calls on kgen's kernels by kind, ``left`` those that SGLang did, by kind and reason.

    Under a CUDA graph Python runs at capture only, so ``attend`` counts captured layer calls there; ``verify`` counts
    forwards, replays too.
    """

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()

    def did(self, kind: str) -> None:
        """One call of ``kind`` that kgen served."""
        self.ran[kind] += 1

    def left_to_sglang(self, kind: str, reason: str) -> None:
        """One call of ``kind`` that SGLang's own code served, and why."""
        self.left[kind, reason] += 1
        if self.left[kind, reason] == 1:
            logger.warning("kgen leaves %s to SGLang: %s", kind, reason)
