"""Where the rows of a KV pool should lie: allocation without fragments, what is fragmented, and plans to compact it.

numpy only. Rows are moved by the ``kv_defrag`` kernels and maps rewritten by ``slot_remap``; `apply_plan` calls them in
the order that keeps every reference valid.
"""

from __future__ import annotations

from kgen.defrag.allocator import SlotAllocator
from kgen.defrag.apply import apply_plan
from kgen.defrag.compaction import plan_contiguity, plan_tail_compaction
from kgen.defrag.plan import Cost, Plan
from kgen.defrag.pool import Fragmentation, PoolState, fragmentation

__all__ = [
    "Cost",
    "Fragmentation",
    "Plan",
    "PoolState",
    "SlotAllocator",
    "apply_plan",
    "fragmentation",
    "plan_contiguity",
    "plan_tail_compaction",
]
