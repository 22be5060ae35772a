"""A pool that is fragmented as a server would, compacted with the real kernels, and read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kgen.defrag import Cost, Plan, PoolState, SlotAllocator, apply_plan, plan_contiguity, plan_tail_compaction
from kgen.defrag.runs import Array
from kgen.errors import InputError, ValidationError
from kgen.runtime import PointerTable, default_pack, prepare

MOVE_LAYOUT, ROW_BYTES = "mla_fp8_disjoint", 576
CHURN = 6  # times that a request leaves and another comes, for each that stays
MOST_PLANS = 1000


@dataclass(frozen=True)
class Settings:
    """What to fragment: a pool of ``slots`` in ``layers``, about ``share`` of it used by ``requests`` requests."""

    slots: int
    layers: int
    requests: int
    share: float
    budget_bytes: int
    read_write_gb_s: float
    seed: int


def fragmented(settings: Settings) -> PoolState:
    """Requests with a shared prefix that came, grew a slot at a time in turn and left; a few slots are pinned.

    Slots come from a list to which what is freed is appended, as in a server that does not sort it.
    """
    rng = np.random.default_rng(settings.seed)
    free = list(range(1, settings.slots))
    most = max(2, int(settings.slots * settings.share / settings.requests))
    prefix = [free.pop(0) for _ in range(most // 4)]
    alive: list[list[int]] = []
    for _ in range(settings.requests * CHURN):
        if len(alive) == settings.requests:
            free += alive.pop(int(rng.integers(len(alive))))
        alive.append([])
        for _ in range(most):
            growing = alive[int(rng.integers(len(alive)))]
            if len(growing) < most and free:
                growing.append(free.pop(0))
    shared = [np.array(prefix + own, np.int64) for own in alive]
    requests = [*shared[:2], *(np.array(own, np.int64) for own in alive[2:])]
    pinned = np.array([own[-1] for own in alive[:3] if own], np.int64)
    return PoolState(settings.slots, 1, requests, [np.array(prefix, np.int64)], pinned)


class DemoServer:
    """A pool, its maps as a server keeps them, and the prepared kernels. ``device`` is ``cpu`` or ``cuda``."""

    def __init__(self, state: PoolState, settings: Settings, device: str, cache_dir: Path) -> None:
        import torch

        self._torch, self._device, self._pinned = torch, device, state.pinned
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (settings.layers, state.slots, ROW_BYTES)
        rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        self.pool = list(rows.unbind())
        self._table = PointerTable(self.pool)
        lengths = [array.size for array in state.requests]
        tokens = np.zeros((len(lengths), max(lengths)), np.int32)
        for row, array in zip(tokens, state.requests, strict=True):
            row[: array.size] = array
        self._tokens, self._lengths = self._tensor(tokens), self._tensor(np.array(lengths, np.int32))
        self._listed = self._tensor(np.concatenate(state.others))
        self.allocator = SlotAllocator(state.slots)
        self.allocator.reserve(np.flatnonzero(state.is_used))
        most = settings.budget_bytes // (ROW_BYTES * settings.layers)
        self._move = prepare(
            default_pack("kv_defrag"),
            family="kv_defrag",
            layout=MOVE_LAYOUT,
            capacity={"layers": settings.layers, "rows": min(most, state.slots)},
            device=device,
            checked=True,
            cache_dir=cache_dir,
        )
        self._rewrite = prepare(
            default_pack("slot_remap"),
            family="slot_remap",
            layout="int32",
            capacity={
                "requests": len(lengths),
                "context": max(lengths),
                "entries": max(1, self._listed.numel()),
                "moved_percent": 100,
            },
            device=device,
            checked=True,
            cache_dir=cache_dir,
        )

    def _tensor(self, array: Array) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def state(self) -> PoolState:
        """Who refers to what now, from the maps."""
        tokens, lengths = self._tokens.cpu().numpy(), self._lengths.tolist()
        requests = [row[:length].astype(np.int64) for row, length in zip(tokens, lengths, strict=True)]
        return PoolState(self.allocator.slots, 1, requests, [self._listed.cpu().numpy()], self._pinned)

    def read(self) -> list[Array]:
        """What each request and list finds through its map: uint8 [layers, length, row bytes]."""
        state = self.state()
        rows = self._torch.stack(self.pool).cpu().numpy()
        return [rows[:, array] for array in (*state.requests, *state.others)]

    def run(self, plan: Plan) -> None:
        """Carry out one plan with the kernels."""

        def copy(source: Array, target: Array) -> None:
            self._move(layer_ptrs=self._table, src_slots=self._tensor(source), dst_slots=self._tensor(target))

        def flip(slot_map: Array) -> None:
            self._rewrite(
                slot_map=self._tensor(slot_map),
                lengths=self._lengths,
                req_to_token=self._tokens,
                slot_list=self._listed if self._listed.numel() else None,
                hint={"moved_percent": plan.moved_percent},
            )

        apply_plan(plan, reserve=self.allocator.reserve, copy=copy, flips=[flip], release=self.allocator.free)


def run_demo(
    settings: Settings, device: str, cache_dir: Path, on_plan: Callable[[str, Plan], None]
) -> tuple[PoolState, PoolState]:
    """Fragment, compact the tail, make requests contiguous, in plans of the budget; the states before and after.

    ``on_plan`` hears of every plan by kind. Raises InputError for a budget that no slot fits in, ValidationError if any
    request then reads other bytes.
    """
    cost = Cost(ROW_BYTES * settings.layers, settings.budget_bytes, settings.read_write_gb_s)
    if cost.most_slots == 0:
        seen = f"{cost.budget_bytes} bytes for slots of {cost.slot_bytes}"
        raise InputError("budget", "is for less than a slot in all layers", seen=seen)
    before = fragmented(settings)
    server = DemoServer(before, settings, device, cache_dir)
    wanted = server.read()
    for kind, planner in (("tail compaction", plan_tail_compaction), ("contiguity", plan_contiguity)):
        for _ in range(MOST_PLANS):
            plan = planner(server.state(), cost)
            if plan.source.size == 0:
                break
            server.run(plan)
            on_plan(kind, plan)
    if not all(map(np.array_equal, server.read(), wanted)):
        raise ValidationError("demo", "a request reads other bytes than before")
    return before, server.state()
