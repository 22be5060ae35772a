"""The time model: against what was measured, and the behaviour that follows from its formula."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from typing import Any

import pytest

from kgen import model
from kgen.canonical import key_text
from kgen.db import TuningDatabase, import_text
from kgen.family import LaunchDemand, Point, families
from kgen.model import Footprint, floor_us, predict
from kgen.records import TrialRecord
from kgen.resources import ROOT, SPECS, TUNING_DB
from kgen.spec import load_spec

SPEC = load_spec(SPECS / "verify_mla.yaml")
SM_90, SM_120 = SPEC.targets["sm_90"], SPEC.targets["sm_120"]
DEMAND = LaunchDemand(
    "kernel", blocks=188, steps=100, stages=2, step_mma_flop=4.0e6, step_shared_bytes=2.0e5, step_gather_bytes=36864.0,
    step_syncs=2.0, block_bytes=1.0e5, dram_bytes=1.0e6,
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One time of the shipped trials, and what the model says of it."""

    place: tuple[str, str]  # layout and point
    measured_us: float
    modelled_us: float

    @property
    def residual(self) -> float:
        return math.log(self.modelled_us / self.measured_us)


def shipped_times() -> list[Timed]:
    """Every candidate and point that was timed on sm_90 inside sm_120's limits, estimates left out."""
    with TuningDatabase.open("sqlite://") as database:
        import_text(database, [TUNING_DB])
        trials = database.trials(family="verify_mla", target="sm_90", envelope="sm_120", status="ok")
    return [
        Timed((trial.layout_name, key_text(time.point)), time.time_us, modelled_us(trial, time.point))
        for trial in trials
        for time in trial.times
        if time.samples_us
    ]


def modelled_us(trial: TrialRecord, point: Point) -> float:
    family, resident = families()["verify_mla"], trial.blocks_per_sm or 0
    plan = family.plan(trial.candidate, trial.layout, point, sms=SM_90.sms, resident_blocks=resident)
    main, combine, _ = family.kernels(trial.candidate, trial.layout)
    footprints = {
        main.entry: Footprint(main.threads, resident, trial.spill_bytes or 0),
        combine.entry: Footprint(combine.threads, 2, 0),
    }
    return predict(SM_90, family.demand(trial.candidate, trial.layout, point, plan), footprints).time_us


@dataclass(frozen=True)
class Quality:
    """Root mean square of log residuals, and the mean loss of taking the best of the model's first choices."""

    rms: float
    first: float
    of_three: float


def quality() -> Quality:
    times = shipped_times()
    places: dict[tuple[str, str], list[Timed]] = defaultdict(list)
    for time in times:
        places[time.place].append(time)
    losses: dict[int, list[float]] = {1: [], 3: []}
    for found in places.values():
        ranked = sorted(found, key=lambda time: time.modelled_us)
        for count, logs in losses.items():
            logs.append(math.log(min(time.measured_us for time in ranked[:count]) / min(t.measured_us for t in found)))
    rms = math.sqrt(sum(time.residual**2 for time in times) / len(times))
    return Quality(rms, *(math.expm1(sum(logs) / len(logs)) for logs in losses.values()))


def one_us(resident: int = 1, spill_bytes: int = 0, **changes: Any) -> float:
    demand = replace(DEMAND, **changes)
    return predict(SM_120, [demand], {"kernel": Footprint(256, resident, spill_bytes)}).time_us


def test_it_is_near_what_was_measured_and_ranks_well() -> None:
    found = quality()
    assert found.rms < 0.12
    assert found.first < 0.09
    assert found.of_three < 0.03


def test_the_documented_quality_is_that_of_today() -> None:
    shares = [f"{share * 100:.1f} %" for share in astuple(quality())]
    row = f"| {len(shipped_times())} | {' | '.join(shares)} |"
    assert row in (ROOT / "docs" / "model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("constant", "value"), [("SYNC_CLK", 1200.0), ("STREAM_BYTES_PER_CLK", 4.0), ("SHARED_EXPOSED", 3.0)]
)
def test_a_wrong_constant_is_far_from_what_was_measured(
    constant: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, constant, value)
    assert quality().rms > 0.15


def test_a_launch_by_hand() -> None:
    mma, shared, gather = 4.0e6 / 1024, 2.0e5 / 128, 36864 / 16
    compute = mma + model.SHARED_EXPOSED * shared + 2 * model.SYNC_CLK
    assert compute > gather
    clk = 100 * compute + 1.0e5 / model.STREAM_BYTES_PER_CLK
    assert one_us() == pytest.approx(SM_120.launch_us + SM_120.dram_latency_us + clk / 2617)


def test_one_stage_waits_for_its_rows_and_more_do_not() -> None:
    heavy: dict[str, Any] = {"step_gather_bytes": 6.0e4, "block_bytes": 0.0}
    one, two, three = (one_us(stages=stages, **heavy) for stages in (1, 2, 3))
    assert one - two == pytest.approx(100 * 6.0e4 / 16 / 2617)
    assert two == three


def test_the_last_wave_counts_whole() -> None:
    none, one, two = (one_us(blocks=blocks, dram_bytes=0.0) for blocks in (0, 188, 189))
    assert two - one == pytest.approx(one - none)
    assert one_us(blocks=2) == pytest.approx(one_us(blocks=188))


def test_two_resident_blocks_hide_each_others_latency_but_not_each_others_traffic() -> None:
    light: dict[str, Any] = {
        "blocks": 376,
        "step_mma_flop": 1.0e5,
        "step_shared_bytes": 1.0e4,
        "step_gather_bytes": 1.0e3,
        "block_bytes": 1.0e4,
    }
    assert one_us(resident=2, **light) < 0.6 * one_us(resident=1, **light)
    heavy: dict[str, Any] = {"blocks": 376, "step_gather_bytes": 1.0e6, "block_bytes": 0.0, "step_syncs": 0.0}
    assert one_us(resident=2, **heavy) == pytest.approx(one_us(resident=1, **heavy))


def test_no_launch_is_faster_than_its_bytes() -> None:
    fixed_us = SM_120.launch_us + SM_120.dram_latency_us
    assert one_us(dram_bytes=1.792e9) == pytest.approx(1000.0 + fixed_us)


def test_spills_cost_shared_bandwidth() -> None:
    extra_clk = 100 * model.SHARED_EXPOSED * 256 * 64 / 128
    assert one_us(spill_bytes=64) - one_us() == pytest.approx(extra_clk / 2617)


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"dram_bytes": 1.0e10}, "dram"),
        ({"step_mma_flop": 1.0e8}, "mma"),
        ({"step_shared_bytes": 1.0e8}, "shared"),
        ({"step_gather_bytes": 1.0e7}, "gather"),
        ({"step_syncs": 1.0e3}, "latency"),
        ({"steps": 0}, "latency"),
    ],
)
def test_the_bound_is_what_takes_most(changes: dict[str, Any], bound: str) -> None:
    demand = replace(DEMAND, **changes)
    assert predict(SM_120, [demand], {"kernel": Footprint(256, 1, 0)}).bound == bound


def test_launches_add_up() -> None:
    both = predict(SM_120, [DEMAND, DEMAND], {"kernel": Footprint(256, 1, 0)})
    assert both.time_us == pytest.approx(2 * one_us())
    assert [launch.entry for launch in both.launches] == ["kernel", "kernel"]


def test_a_kernel_that_no_sm_holds_has_no_time() -> None:
    with pytest.raises(ValueError, match="an SM holds no block"):
        one_us(resident=0)


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    assert floor_us(SM_120, flop=0.0, bytes_moved=1.792e9) == pytest.approx(1000.0)
    assert floor_us(SM_120, flop=503.8e9, bytes_moved=0.0) == pytest.approx(1000.0, rel=1e-3)
