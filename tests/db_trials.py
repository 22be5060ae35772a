"""Trials for the tests of the tuning database."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kgen.records import DeviceFingerprint, PointTime, TrialRecord

H200 = DeviceFingerprint("9.0", 132, 232448, 62914560, 3201000, "NVIDIA H200", "580.65")
RTX = DeviceFingerprint("12.0", 188, 101376, 134217728, 14001000, "RTX PRO 6000", "580.65")
RTX_5090 = DeviceFingerprint("12.0", 170, 101376, 100663296, 14001000, "RTX 5090", "580.65")
LAYOUT = {"heads": 8, "latent": 512, "dtype": "bf16"}
POINT = {"batch": 4, "prefix": 4096}


def made_at(second: int) -> str:
    return f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000001+00:00"


def timed(time_us: float, low: float | None = None, high: float | None = None, **point: int) -> PointTime:
    """A time of one sample at POINT, or at the point given; without ``low`` and ``high`` there is no spread."""
    return PointTime(point or POINT, time_us, low or time_us, high or time_us, (time_us,))


def make_trial(*times: PointTime, m: int = 16, **fields: Any) -> TrialRecord:
    """A trial of candidate ``tile_m=m`` that was measured on its own architecture."""
    failed = fields.get("status", "ok") != "ok"
    values: dict[str, Any] = {
        "run_id": "run",
        "family": "verify_mla",
        "spec_sha256": "5" * 64,
        "layout_name": "kimi_tp8",
        "layout": LAYOUT,
        "target": "sm_120",
        "arch": "sm_120",
        "envelope": "sm_120",
        "candidate": {"tile_m": m, "gather": "bulk"},
        "source_name": f"verify_mla__m{m}",
        "source_sha256": f"{m:064d}",
        "toolchain": "nvcc 13.0.88",
        "flags": "-O3",
        "evaluator": "device",
        "evidence": "measured",
        "protocol_version": 1,
        "status": "ok",
        "reason": "planted" if failed else "",
        "registers": 128,
        "shared_bytes": 65536,
        "spill_bytes": 0,
        "blocks_per_sm": 1,
        "checked_on": "" if failed else "device",
        "device": RTX,
        "created_at": made_at(0),
        "kgen_version": "0.1.0",
        "times": () if failed else (times or (timed(10.0),)),
    }
    if fields.get("evidence") == "modelled":
        values |= {"evaluator": "model", "device": None, "checked_on": ""}
    return TrialRecord(**(values | fields))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
TIME = st.sampled_from([1.0, 1.005, 2.0, 3.0, 4.0]) | st.floats(0.5, 1e6)
ERROR = st.none() | st.floats(0, 1)


@st.composite
def point_times(draw: st.DrawFn, point: dict[str, int]) -> PointTime:
    samples = draw(st.lists(TIME, min_size=1, max_size=4))
    middle = sorted(samples)[len(samples) // 2]
    return PointTime(point, middle, min(samples), max(samples), tuple(samples), draw(ERROR))


@st.composite
def trials(draw: st.DrawFn) -> TrialRecord:
    """Any trial that may be kept, from a domain so small that trials meet in one group."""
    status = draw(st.sampled_from(["ok"] * 6 + ["wrong_result", "hang", "compile_error", "device_degraded"]))
    evidence = draw(st.sampled_from(["measured", "measured", "proxy", "modelled"]))
    prefixes = draw(st.lists(st.sampled_from([0, 4096]), max_size=2, unique=True)) if status == "ok" else []
    m = draw(st.sampled_from([16, 32, 64]))
    return make_trial(
        m=m,
        times=tuple(draw(point_times({"batch": 4, "prefix": prefix})) for prefix in prefixes),
        status=status,
        reason=draw(TEXT) + ("" if status == "ok" else "!"),
        evidence=evidence,
        device=draw(st.sampled_from([H200, RTX, RTX_5090])) if evidence != "modelled" else None,
        source_sha256=draw(st.sampled_from([f"{m:064d}", f"{m + 1:064d}"])),
        layout=draw(st.sampled_from([LAYOUT, {"heads": 16, "scale": 0.1}])),
        layout_name=draw(TEXT),
        target=draw(st.sampled_from(["sm_120", "sm_90"])),
        arch=draw(st.sampled_from(["sm_120", "sm_90"])),
        registers=draw(st.none() | st.sampled_from([64, 128])),
        shared_bytes=draw(st.none() | st.sampled_from([1024, 2048])),
        spill_bytes=draw(st.sampled_from([None, 0, 8])),
        relative_error=draw(ERROR),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        number=draw(st.integers(0, 9)),
        created_at=made_at(draw(st.integers(0, 7))),
        run_id=draw(st.sampled_from(["a", "b"])),
        protocol_version=draw(st.sampled_from([1, 2])),
    )
