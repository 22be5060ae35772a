"""Kgen's counts among SGLang's metrics, which each process writes through prometheus-client and ``/metrics`` sums up.

prometheus-client decides when it is imported whether it is one process of several; SGLang sets that up after plug-ins
are loaded, so nothing here imports it before a backend is made.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from kgen.sglang.tally import KV_MOVE, VERIFY

MOST_REASONS = 50
"""Reasons that get a series of their own; later ones are counted as ``other``."""

logger = logging.getLogger("kgen.sglang")


class Metrics:
    """Three counters with the rank of this process; ``client`` is the module ``prometheus_client``."""

    def __init__(self, client: Any, rank: int) -> None:
        self._rank = str(rank)
        self._reasons: set[str] = set()
        self._forwards = client.Counter(
            "kgen_verify_forwards", "Verify forwards on kgen, by how the pack answered.", ("answer", "rank")
        )
        self._moves = client.Counter("kgen_kv_moves", "Moves of KV rows on kgen.", ("rank",))
        self._left = client.Counter(
            "kgen_left_to_sglang", "Calls that SGLang's own code served.", ("kind", "reason", "rank")
        )

    def did(self, kind: str, how: str) -> None:
        """Forwards by their answer, and moves; single layers are not exported."""
        if kind == VERIFY and how:
            self._forwards.labels(how, self._rank).inc()
        elif kind == KV_MOVE:
            self._moves.labels(self._rank).inc()

    def left_to_sglang(self, kind: str, reason: str) -> None:
        """A call that kgen did not serve."""
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(reason)
        self._left.labels(kind, reason if reason in self._reasons else "other", self._rank).inc()


def metrics_of_server() -> Metrics | None:
    """The counters of this process if its server has metrics (``--enable-metrics``)."""
    from sglang.srt.runtime_context import get_context, get_observability

    published = get_context().is_config_namespace_published("observability")
    return _metrics_of_process() if published and get_observability().enable_metrics else None


@cache
def _metrics_of_process() -> Metrics | None:
    """Made once; None without prometheus-client, which one line says."""
    import torch

    try:
        import prometheus_client
    except ImportError as error:
        logger.warning("kgen exports no metrics: %s", error)
        return None
    return Metrics(prometheus_client, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
