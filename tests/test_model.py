"""The time model: against what was measured, and the behaviour that follows from its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kgen import model
from kgen.family import LaunchDemand, families
from kgen.model import Footprint, floor_us, predict
from kgen.resources import ROOT, SPECS
from kgen.spec import load_spec
from kgen.targets import Target

SPEC = load_spec(SPECS / "verify_mla.yaml")
SM_90, SM_120 = SPEC.targets["sm_90"], SPEC.targets["sm_120"]
M64 = dict(SPEC.default) | {"tile_m": 64, "tile_n": 32, "stages": 2, "warps": 8, "row_groups": 2, "k_split": 2}
M16 = dict(M64) | {"tile_m": 16, "tile_n": 16, "warps": 4, "row_groups": 1, "k_split": 4, "blocks_per_sm": 2}
LAYOUT = SPEC.layouts["h8_p1"]

MEASURED = [  # candidate, nodes, batch, keys, microseconds: a hand-written kernel of the same tiling on an H200
    (M64, 16, 16, 16384, 319.0),
    (M16, 1, 16, 16384, 89.0),
    (M16, 1, 1, 4096, 12.8),
    (M64, 16, 1, 16384, 36.0),
    (M64, 8, 16, 16384, 175.0),
    (M64, 8, 1, 16384, 27.0),
    (M64, 64, 4, 16384, 319.0),
    (M16, 1, 1, 65536, 39.0),
]
DEMAND = LaunchDemand(
    "kernel", blocks=188, steps=100, stages=2, step_mma_flop=4.0e6, step_shared_bytes=2.0e5, step_gather_bytes=36864.0,
    step_syncs=2.0, block_bytes=1.0e5, dram_bytes=1.0e6,
)  # fmt: skip


def modelled_us(target: Target, candidate: dict[str, int | str], nodes: int, batch: int, keys: int) -> float:
    family, resident = families()["verify_mla"], int(candidate["blocks_per_sm"])
    point = {"batch": batch, "nodes": nodes, "prefix": keys - nodes}
    plan = family.plan(candidate, LAYOUT, point, sms=target.sms, resident_blocks=resident)
    main, combine = family.kernels(candidate, LAYOUT)
    footprints = {main.entry: Footprint(main.threads, resident, 0), combine.entry: Footprint(combine.threads, 16, 0)}
    return predict(target, family.demand(candidate, LAYOUT, point, plan), footprints).time_us


def one_us(resident: int = 1, spill_bytes: int = 0, **changes: Any) -> float:
    demand = replace(DEMAND, **changes)
    return predict(SM_120, [demand], {"kernel": Footprint(256, resident, spill_bytes)}).time_us


def residuals() -> list[float]:
    return [
        math.log(modelled_us(SM_90, candidate, nodes, batch, keys) / measured)
        for candidate, nodes, batch, keys, measured in MEASURED
    ]


def test_it_is_near_what_was_measured() -> None:
    worst = max(abs(residual) for residual in residuals())
    rms = math.sqrt(sum(residual**2 for residual in residuals()) / len(MEASURED))
    assert rms < math.log(1.10)
    assert worst < math.log(1.25)


def test_the_documented_residuals_are_those_of_today() -> None:
    text = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    for (candidate, nodes, batch, keys, measured), residual in zip(MEASURED, residuals(), strict=True):
        tiling = "M16 N16, 2 blocks an SM" if candidate is M16 else "M64 N32"
        modelled = f"{measured * math.exp(residual):.1f} | {math.expm1(residual) * 100:+.0f} %"
        assert f"| 8, {nodes}, {batch}, {keys} | {tiling} | {measured:g} | {modelled} |" in text


@pytest.mark.parametrize(("constant", "value"), [("SYNC_CLK", 1200.0), ("STREAM_BYTES_PER_CLK", 6.0)])
def test_a_wrong_constant_is_far_from_what_was_measured(
    constant: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, constant, value)
    assert max(abs(residual) for residual in residuals()) > math.log(1.25)


def test_a_launch_by_hand() -> None:
    mma, shared, gather = 4.0e6 / 1024, 2.0e5 / 128, 36864 / 16
    clk = 100 * (max(mma + shared, gather) + 2 * model.SYNC_CLK) + 1.0e5 / model.STREAM_BYTES_PER_CLK
    assert one_us() == pytest.approx(2.5 + 0.8 + clk / 2617)


def test_the_last_wave_counts_whole() -> None:
    none, one, two = (one_us(blocks=blocks, dram_bytes=0.0) for blocks in (0, 188, 189))
    assert two - one == pytest.approx(one - none)
    assert one_us(blocks=2) == pytest.approx(one_us(blocks=188))


def test_two_resident_blocks_hide_each_others_latency_but_not_each_others_traffic() -> None:
    light: dict[str, Any] = {
        "blocks": 376,
        "step_mma_flop": 1.0e5,
        "step_shared_bytes": 1.0e4,
        "step_gather_bytes": 1.0e4,
    }
    assert one_us(resident=2, **light) < 0.6 * one_us(resident=1, **light)
    heavy: dict[str, Any] = {"blocks": 376, "step_gather_bytes": 1.0e6, "block_bytes": 0.0, "step_syncs": 0.0}
    assert one_us(resident=2, **heavy) == pytest.approx(one_us(resident=1, **heavy))


def test_no_launch_is_faster_than_its_bytes() -> None:
    assert one_us(dram_bytes=1.792e9) == pytest.approx(1000.0 + 0.8 + 2.5)


def test_spills_cost_shared_bandwidth() -> None:
    extra_clk = 100 * 256 * 64 / 128
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
