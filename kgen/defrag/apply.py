"""Carrying out a plan so that a failure at any point leaves every reference valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kgen.defrag.plan import Plan
from kgen.defrag.runs import Array


def apply_plan(
    plan: Plan,
    *,
    copy: Callable[[Array, Array], None],
    flips: Sequence[Callable[[Array], None]],
    release: Callable[[Array], None],
    reserve: Callable[[Array], None] = lambda slots: None,
) -> None:
    """Reserve the targets, copy, flip the references, release the sources, in this order.

    ``reserve(target)`` takes the slots from the allocator, ``copy(source, target)`` moves the rows in all layers and
    waits for them, each of ``flips`` rewrites one kind of reference by ``slot_map`` (int32 [slots]), and
    ``release(source)`` gives the old slots back. Until then the old rows are untouched, so a reference that was not
    flipped yet still finds its bytes, and one that was flipped finds its copy: wherever an exception stops this, all
    references are valid, and only slots that nobody refers to are kept from the allocator.

    What an exception stopped is brought to its end by the same call without ``reserve``, before anybody allocates or
    frees slots of the plan: copies are of rows that nobody wrote, and a flip must leave numbers that it has rewritten
    alone when it is repeated, which `slot_map` does: targets map to themselves. A new plan must take such targets for
    pinned, since the allocator does not have them.
    """
    if plan.source.size == 0:
        return
    reserve(plan.target)
    copy(plan.source, plan.target)
    for flip in flips:
        flip(plan.slot_map)
    release(plan.source)
