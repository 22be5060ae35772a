"""How long a call takes on a chip that is not there: a roofline with waves and latencies (docs/model.md).

The formula, where its constants come from, and how far it is from measurements are in docs/model.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kgen.family import LaunchDemand
from kgen.targets import Target

Bound = Literal["dram", "mma", "shared", "gather", "latency"]

SYNC_CLK = 173.0
"""What one barrier of a step exposes. Fitted (docs/model.md)."""
SHARED_EXPOSED = 0.44
"""Share of a block's shared-memory time that its own mma do not hide. Fitted."""
STREAM_BYTES_PER_CLK = 22.5
"""Rate at which one SM moves what a block reads or writes once, through L2. Fitted (docs/model.md)."""
CONVERTED_PER_CLK = 12.5
"""Elements of narrow rows that a warp makes wider in a clock, between loading and multiplying them. Fitted."""


@dataclass(frozen=True)
class Footprint:
    """What one kernel takes of an SM: threads a block, blocks that one SM holds, spilled bytes a thread."""

    threads: int
    resident_blocks: int
    spill_bytes: int


@dataclass(frozen=True)
class LaunchTime:
    """One launch: its time, and what each unit alone would need, all in microseconds.

    ``latency_us`` is what barriers, memory latency and the launch itself expose.
    """

    entry: str
    time_us: float
    dram_us: float
    mma_us: float
    shared_us: float
    gather_us: float
    latency_us: float


@dataclass(frozen=True)
class Prediction:
    """One call: its time in microseconds, its launches in order, and what takes most of it."""

    time_us: float
    launches: tuple[LaunchTime, ...]
    bound: Bound


@dataclass(frozen=True)
class _Step:
    """Clocks that one step of one block needs of each unit of an SM, and that its barriers expose."""

    mma: float
    shared: float
    gather: float
    convert: float
    sync: float
    stages: int

    def period(self, sharing: int) -> float:
        """Clocks from one step of a block to its next, with ``sharing`` blocks on the SM.

        A block alone computes what it has read, in one order, while the rows of its other stages arrive; with more
        blocks the gaps fill up until one unit is busy all the time.
        """
        compute = self.mma + self.convert + SHARED_EXPOSED * self.shared + self.sync
        alone = max(compute, self.gather, (compute + self.gather) / self.stages)
        return max(alone, sharing * max(self.mma, self.shared, self.gather))


def predict(target: Target, demands: Sequence[LaunchDemand], footprints: Mapping[str, Footprint]) -> Prediction:
    """The time of one call: its launches one after the other.

    ``footprints`` has an entry for every kernel that ``demands`` names. Raises ValueError for a kernel of which an SM
    holds no block.
    """
    launches = tuple(_launch_time(target, demand, footprints[demand.entry]) for demand in demands)
    parts: dict[Bound, float] = {
        "dram": sum(launch.dram_us for launch in launches),
        "mma": sum(launch.mma_us for launch in launches),
        "shared": sum(launch.shared_us for launch in launches),
        "gather": sum(launch.gather_us for launch in launches),
        "latency": sum(launch.latency_us for launch in launches),
    }
    return Prediction(
        time_us=sum(launch.time_us for launch in launches),
        launches=launches,
        bound=max(parts, key=lambda name: parts[name]),
    )


def floor_us(target: Target, *, flop: float, bytes_moved: float) -> float:
    """The roofline floor in microseconds: no less than the bytes at DRAM rate, nor than the operations at mma rate."""
    mma_flop_per_us = target.mma_bf16_flop_per_clk * target.clock_mhz * target.sms
    return max(bytes_moved / (target.dram_gb_s * 1e3), flop / mma_flop_per_us)


def _launch_time(target: Target, demand: LaunchDemand, footprint: Footprint) -> LaunchTime:
    if footprint.resident_blocks < 1:
        raise ValueError(f"{demand.entry}: an SM holds no block of it")
    step = _step(target, demand, footprint)
    sharings = _sharings(demand.blocks, target.sms, footprint.resident_blocks)
    clk = sum(_wave_clk(demand, step, sharing) for sharing in sharings)
    dram_us = demand.dram_bytes / (target.dram_gb_s * 1e3)
    busy_us = target.dram_latency_us + max(clk / target.clock_mhz, dram_us)
    steps_us = demand.steps * sum(sharings) / target.clock_mhz
    exposed_us = demand.steps * len(sharings) * step.sync / target.clock_mhz
    return LaunchTime(
        entry=demand.entry,
        time_us=target.launch_us + busy_us,
        dram_us=dram_us,
        mma_us=steps_us * step.mma,
        shared_us=steps_us * step.shared,
        gather_us=steps_us * step.gather,
        latency_us=target.launch_us + target.dram_latency_us + exposed_us,
    )


def _step(target: Target, demand: LaunchDemand, footprint: Footprint) -> _Step:
    spilled = footprint.threads * footprint.spill_bytes  # local memory is L1, which shares the shared-memory path
    return _Step(
        mma=demand.step_mma_flop / target.mma_bf16_flop_per_clk,
        shared=(demand.step_shared_bytes + spilled) / target.shared_bytes_per_clk,
        gather=demand.step_gather_bytes / target.gather_bytes_per_clk,
        convert=demand.step_converted / CONVERTED_PER_CLK,
        sync=demand.step_syncs * SYNC_CLK,
        stages=demand.stages,
    )


def _wave_clk(demand: LaunchDemand, step: _Step, sharing: int) -> float:
    """Clocks of one wave: its longest block, on an SM that holds ``sharing`` of them."""
    return demand.steps * step.period(sharing) + sharing * demand.block_bytes / STREAM_BYTES_PER_CLK


def _sharings(blocks: int, sms: int, resident_blocks: int) -> list[int]:
    """How many blocks the fullest SM holds in each wave; the last wave spreads what is left over all SMs."""
    full, left = divmod(blocks, sms * resident_blocks)
    return [resident_blocks] * full + ([-(-left // sms)] if left else [])
