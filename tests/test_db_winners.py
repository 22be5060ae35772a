"""The winner at each point: every part of the rule by example, and the whole of it against a plain re-telling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import pytest
from db_trials import H200, LAYOUT, POINT, RTX, RTX_5090, made_at, make_trial, timed, trials
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.canonical import key_text
from kgen.db import TuningDatabase, Winner, trial_sha256, winners
from kgen.errors import DatabaseError
from kgen.records import PointTime, TrialRecord


@pytest.fixture
def db() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


def won(db: TuningDatabase, *records: TrialRecord, target: str = "sm_120", **options: Any) -> Winner:
    db.add_all(records)
    [winner] = winners(db, family="verify_mla", target=target, **options)
    return winner


def tile_m(winner: Winner) -> int:
    return int(winner.candidate["tile_m"])


def test_the_fastest_wins_and_says_all_that_a_pack_needs(db: TuningDatabase) -> None:
    best = make_trial(timed(8.0, 7.9, 8.5), m=32, relative_error=1e-3, spill_bytes=8)
    others = [make_trial(timed(time_us), m=m, spill_bytes=8) for time_us, m in ((12.0, 16), (10.0, 64))]
    winner = won(db, others[0], best, others[1])
    assert winner == Winner(
        layout_name="kimi_tp8", layout=LAYOUT, point=POINT, candidate={"tile_m": 32, "gather": "bulk"},
        candidate_key='gather="bulk",tile_m=32', source_name="verify_mla__m32", source_sha256=best.source_sha256,
        evidence="measured", time_us=8.0, time_us_min=7.9, time_us_max=8.5, reference_us=None,
        registers=128, shared_bytes=65536,
        spill_bytes=8, blocks_per_sm=1, checked_on="device", relative_error=1e-3, device=RTX, arch="sm_120",
        toolchain="nvcc 13.0.88", protocol_version=1, trial_sha256=trial_sha256(best),
        runner_up_key='gather="bulk",tile_m=64', runner_up_time_us=10.0, tie=False,
    )  # fmt: skip


def test_one_winner_for_each_layout_and_point_in_order(db: TuningDatabase) -> None:
    times = timed(3.0, prefix=10), timed(1.0, prefix=2)
    db.add_all([make_trial(*times), make_trial(timed(1.0, prefix=2), layout={"heads": 16}, layout_name="v3")])
    found = winners(db, family="verify_mla", target="sm_120")
    assert [(w.layout, w.point["prefix"]) for w in found] == [(LAYOUT, 2), (LAYOUT, 10), ({"heads": 16}, 2)]
    assert [w.point["prefix"] for w in winners(db, family="verify_mla", target="sm_120", layout=LAYOUT)] == [2, 10]
    assert [w.layout for w in winners(db, family="verify_mla", target="sm_120", layout="v3")] == [{"heads": 16}]
    assert winners(db, family="other", target="sm_120") == winners(db, family="verify_mla", target="sm_90") == []


def test_better_evidence_wins_over_better_times(db: TuningDatabase) -> None:
    modelled = make_trial(timed(1.0), m=16, evidence="modelled")
    proxy = make_trial(timed(2.0), m=32, evidence="proxy", arch="sm_90", device=H200)
    assert (won(db, modelled).evidence, tile_m(won(db, modelled))) == ("modelled", 16)
    assert tile_m(won(db, proxy)) == 32
    assert tile_m(won(db, make_trial(timed(9.0), m=64))) == 64


def test_a_measurement_inside_the_envelope_is_a_proxy_for_its_target(db: TuningDatabase) -> None:
    inside = {"target": "sm_90", "arch": "sm_90", "envelope": "sm_120", "device": H200}
    winner = won(db, make_trial(timed(5.0), m=32, **inside))
    assert (tile_m(winner), winner.evidence, winner.arch) == (32, "proxy", "sm_90")
    assert won(db, target="sm_90").evidence == "measured"
    assert winners(db, family="verify_mla", target="sm_121") == []


@pytest.mark.parametrize("fields", [{"arch": "sm_120"}, {"evidence": "modelled"}, {"evidence": "proxy"}])
def test_other_trials_inside_the_envelope_say_nothing(db: TuningDatabase, fields: dict[str, Any]) -> None:
    inside: dict[str, Any] = {"target": "sm_90", "arch": "sm_90", "envelope": "sm_120"} | fields
    db.add_trial(make_trial(**inside))
    assert winners(db, family="verify_mla", target="sm_120") == []


def test_limits_are_never_mixed(db: TuningDatabase) -> None:
    alone = make_trial(timed(5.0), m=16, envelope="sm_90")
    assert tile_m(won(db, alone, make_trial(timed(9.0), m=32), make_trial(timed(8.0), m=64))) == 64


def test_an_estimate_is_no_time(db: TuningDatabase) -> None:
    estimate = PointTime(POINT, 5.0, 5.0, 5.0)
    assert tile_m(won(db, make_trial(estimate, m=16), make_trial(timed(9.0), m=32))) == 32


def test_devices_are_never_mixed(db: TuningDatabase) -> None:
    fast = make_trial(timed(1.0), m=64, device=RTX_5090)
    assert tile_m(won(db, fast, make_trial(timed(9.0), m=16), make_trial(timed(8.0), m=32))) == 32
    relabelled = replace(RTX, name="another name", driver_version="1")
    assert tile_m(won(db, make_trial(timed(7.0), m=128, device=relabelled))) == 128


def test_only_the_newest_protocol_counts(db: TuningDatabase) -> None:
    old = [make_trial(timed(1.0), m=m) for m in (16, 64)]
    assert tile_m(won(db, *old, make_trial(timed(9.0), m=32, protocol_version=2))) == 32


def test_the_latest_trial_of_a_candidate_counts(db: TuningDatabase) -> None:
    late = make_trial(timed(9.0), m=16, created_at=made_at(3600))
    winner = won(db, late, make_trial(timed(1.0), m=16, created_at=made_at(59)), make_trial(timed(5.0), m=32))
    assert (tile_m(winner), winner.runner_up_time_us) == (32, 9.0)


@pytest.mark.parametrize("status", ["wrong_result", "launch_error", "hang"])
def test_a_source_found_bad_later_cannot_win_until_it_is_found_good(db: TuningDatabase, status: str) -> None:
    good, bad = make_trial(timed(1.0), m=16), make_trial(m=16, status=status, created_at=made_at(1))
    assert tile_m(won(db, good, bad, make_trial(timed(9.0), m=32))) == 32
    assert tile_m(won(db, make_trial(timed(2.0), m=16, created_at=made_at(2)))) == 16


@pytest.mark.parametrize("fields", [{"status": "device_degraded"}, {"status": "hang", "source_sha256": "f" * 64}])
def test_what_does_not_speak_of_the_source_changes_nothing(db: TuningDatabase, fields: dict[str, Any]) -> None:
    other = make_trial(m=16, created_at=made_at(1), **fields)
    assert tile_m(won(db, make_trial(timed(1.0), m=16), other, make_trial(timed(9.0), m=32))) == 16


def test_only_given_sources_can_win(db: TuningDatabase) -> None:
    db.add_all([make_trial(timed(1.0), m=16), make_trial(timed(2.0), m=32)])
    assert tile_m(won(db, sources={make_trial(m=32).source_sha256})) == 32


LIGHT = {"shared_bytes": 1024}


@pytest.mark.parametrize(
    ("first", "second", "expected", "tie"),
    [
        # The second's fastest sample, against the first's median of 10.
        ({}, {**LIGHT, "times": (timed(10.2, 10.0, 11.0),)}, 32, True),
        ({}, {**LIGHT, "times": (timed(10.2, 10.1, 11.0),)}, 16, False),
        ({"times": (timed(10.0, 9.9, 10.3),)}, {**LIGHT, "times": (timed(10.2, 10.1, 11.0),)}, 16, False),
        ({}, {"times": (timed(10.2, 9.0, 11.0),)}, 16, True),
        ({}, {"times": (timed(10.2, 9.0, 11.0),), "registers": 64}, 32, True),
        ({}, {"times": (timed(10.2, 9.0, 11.0),), "registers": None}, 16, True),
        ({"evidence": "modelled"}, {**LIGHT, "evidence": "modelled", "times": (timed(10.1),)}, 32, True),
        ({"evidence": "modelled"}, {**LIGHT, "evidence": "modelled", "times": (timed(10.11),)}, 16, False),
    ],
)
def test_ties(db: TuningDatabase, first: dict[str, Any], second: dict[str, Any], expected: int, tie: bool) -> None:
    winner = won(db, make_trial(m=16, **({"times": (timed(10.0),)} | first)), make_trial(m=32, **second))
    assert (tile_m(winner), winner.tie) == (expected, tie)


@pytest.mark.parametrize(
    ("first", "second", "expected", "tie"),
    [
        (8, {"times": (timed(99.0),), "shared_bytes": 99999}, 32, False),
        (8, {"times": (timed(99.0),), "spill_bytes": None}, 32, False),  # nothing known of a spill
        (8, {"times": (timed(10.1),), "spill_bytes": 4}, 16, False),
        (8, {"times": (timed(10.2, 10.0, 11.0),), "spill_bytes": 16, **LIGHT}, 32, True),
        (0, {"times": (timed(1.0),), "spill_bytes": 1}, 16, False),
    ],
)
def test_what_spills_wins_only_among_what_spills(
    db: TuningDatabase, first: int, second: dict[str, Any], expected: int, tie: bool
) -> None:
    winner = won(db, make_trial(timed(10.0), m=16, spill_bytes=first), make_trial(m=32, **second))
    assert (tile_m(winner), winner.tie) == (expected, tie)


def test_a_spill_elsewhere_rules_nothing_out(db: TuningDatabase) -> None:
    """Only what may be compared counts: here every measured candidate spills, and a modelled one does not."""
    modelled = make_trial(timed(1.0), m=64, evidence="modelled")
    assert tile_m(won(db, modelled, make_trial(timed(9.0), m=16, spill_bytes=8))) == 16


def retold(records: list[TrialRecord], target: str) -> dict[str, tuple[str, float, str, bool]]:
    """The rule in plain loops: place -> candidate key, time, evidence, tie."""

    def made(record: TrialRecord) -> tuple[str, str, int, str]:
        return record.created_at, record.run_id, record.number, trial_sha256(record)

    seen = [r for r in records if r.target == target]
    seen += [
        replace(r, evidence="proxy")
        for r in records
        if r.target != target and r.envelope == target and r.arch != target and r.evidence == "measured"
    ]
    digest = {id(s): next(made(r) for r in records if replace(r, evidence=s.evidence) == s) for s in seen}

    def is_out(record: TrialRecord) -> bool:
        same = [
            r for r in seen
            if (r.layout, r.candidate, r.source_sha256) == (record.layout, record.candidate, record.source_sha256)
            and r.status in ("ok", "wrong_result", "launch_error", "hang")
        ]  # fmt: skip
        return max(same, key=lambda r: digest[id(r)]).status != "ok"

    ok = [r for r in seen if r.status == "ok" and not is_out(r)]
    places = {json.dumps([r.layout, t.point], sort_keys=True) for r in ok for t in r.times}
    result: dict[str, tuple[str, float, str, bool]] = {}
    for place in places:
        here = [
            (r, t) for r in ok for t in r.times
            if json.dumps([r.layout, t.point], sort_keys=True) == place and (t.samples_us or r.evidence == "modelled")
        ]  # fmt: skip
        if not here:
            continue
        for evidence in ("measured", "proxy", "modelled"):
            if any(r.evidence == evidence for r, _ in here):
                here = [(r, t) for r, t in here if r.evidence == evidence]
                break
        here = [(r, t) for r, t in here if r.protocol_version == max(r.protocol_version for r, _ in here)]
        devices = sorted(
            (fingerprint(r) for r, _ in here), key=lambda d: (-[fingerprint(r) for r, _ in here].count(d), d)
        )
        here = [(r, t) for r, t in here if fingerprint(r) == devices[0]]
        here = [
            (r, t) for r, t in here
            if digest[id(r)] == max(digest[id(o)] for o, _ in here if o.candidate == r.candidate)
        ]  # fmt: skip
        if not all(r.spill_bytes for r, _ in here):
            here = [(r, t) for r, t in here if not r.spill_bytes]
        least = min(t.time_us for _, t in here)
        fastest = min((cost(r), r, t) for r, t in here if t.time_us == least)  # keys differ, so records never compare
        slack = 1.01 if fastest[1].evidence == "modelled" else None
        tied = [
            (cost(r), r, t) for r, t in here
            if (t.time_us <= least * slack if slack else t.time_us_min <= least)
        ]  # fmt: skip
        _, record, time = min(tied)
        result[place] = (key_text(record.candidate), time.time_us, record.evidence, len(tied) > 1)
    return result


def fingerprint(record: TrialRecord) -> tuple[Any, ...]:
    device = record.device
    return (record.envelope, *(() if device is None else tuple(vars(device).values())[:5]))


def cost(record: TrialRecord) -> tuple[Any, ...]:
    many = 10**9
    shared = many if record.shared_bytes is None else record.shared_bytes
    registers = many if record.registers is None else record.registers
    return shared, registers, key_text(record.candidate)


def answered(records: list[TrialRecord], target: str) -> dict[str, tuple[str, float, str, bool]]:
    with TuningDatabase.open("sqlite://") as db:
        db.add_all(records)
        found = winners(db, family="verify_mla", target=target)
    return {
        json.dumps([w.layout, w.point], sort_keys=True): (w.candidate_key, w.time_us, w.evidence, w.tie) for w in found
    }


@given(st.lists(trials(), min_size=2, max_size=25), st.sampled_from(["sm_120", "sm_90"]), st.randoms())
@settings(deadline=None, max_examples=25)
def test_winners_are_as_retold_in_any_order_of_arrival(records: list[TrialRecord], target: str, random: Random) -> None:
    records = list({trial_sha256(record): record for record in records}.values())
    expected = retold(records, target)
    assert answered(records, target) == expected
    random.shuffle(records)
    assert answered(records, target) == expected


def test_the_retelling_notices_mixed_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        make_trial(timed(1.0), m=64, device=RTX_5090),
        make_trial(timed(9.0), m=16),
        make_trial(timed(8.0), m=32),
    ]
    assert answered(records, "sm_120") == retold(records, "sm_120")
    monkeypatch.setattr(import_module("kgen.db.winners"), "_comparable", lambda entries: entries)
    assert answered(records, "sm_120") != retold(records, "sm_120")


def test_a_time_of_an_unproven_kernel_never_gets_in(db: TuningDatabase) -> None:
    with pytest.raises(DatabaseError, match="not proven right"):
        won(db, make_trial(timed(1.0), checked_on=""))


def beside(time_us: float, reference_us: float, low: float | None = None) -> PointTime:
    return replace(timed(time_us, low or time_us), reference_us=reference_us)


def test_of_batches_timed_beside_one_reference_the_ratio_decides(db: TuningDatabase) -> None:
    """The device was slow in the second batch: 9 us beside a reference of 12 is better than 8 beside one of 10."""
    first = make_trial(beside(8.0, 10.0), m=16, reference="default")
    second = make_trial(beside(9.0, 12.0), m=32, reference="default")
    winner = won(db, first, second)
    assert (tile_m(winner), winner.time_us, winner.runner_up_time_us, winner.tie) == (32, 9.0, 8.0, False)
    assert winner.reference_us == 12.0


@pytest.mark.parametrize(("reference", "reference_us"), [("another", 12.0), ("", None)])
def test_beside_another_reference_or_none_the_time_decides(
    db: TuningDatabase, reference: str, reference_us: float | None
) -> None:
    second = make_trial(replace(timed(9.0), reference_us=reference_us), m=32, reference=reference)
    assert tile_m(won(db, make_trial(beside(8.0, 10.0), m=16, reference="default"), second)) == 16


@pytest.mark.parametrize(("low", "tie"), [(9.59, True), (9.61, False)])
def test_ties_are_of_ratios_too(db: TuningDatabase, low: float, tie: bool) -> None:
    """The fastest needs 0.8 of its reference; 9.6 us would be that of the other's."""
    first = make_trial(beside(8.0, 10.0), m=16, reference="default")
    second = make_trial(beside(9.7, 12.0, low), m=32, reference="default", **LIGHT)
    winner = won(db, first, second)
    assert (tile_m(winner), winner.tie) == (32 if tie else 16, tie)
