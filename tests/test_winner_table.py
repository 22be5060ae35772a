"""The table at the end of tuning: few rows, each true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from db_trials import RTX
from mla_packs import shipped_spec

from kgen.cli.winner_table import largest_block, winner_table
from kgen.db import Winner
from kgen.records import Evidence
from kgen.tune import TuneReport

SPEC = shipped_spec()
SPEC = replace(
    SPEC, workload=replace(SPEC.workload, axes={"batch": (1, 4), "nodes": (1, 8, 64), "prefix": (512, 4096)})
)
POINTS = [dict(item.point) for item in SPEC.workload.points]
OTHER = dict(SPEC.default) | {"tile_m": 16, "warps": 4, "row_groups": 1, "k_split": 4}


def winner(layout: str, point: dict[str, int], time_us: float, *, default: bool, **changes: Any) -> Winner:
    evidence: Evidence = "modelled"
    made = Winner(
        layout, SPEC.layout(layout), point, SPEC.default if default else OTHER, "", "", "", evidence, time_us, time_us,
        time_us, None, 1, 1, 0, 1, "emulator", None, None, "sm_120", "", 2, "", None, None, False,
    )  # fmt: skip
    return replace(made, **changes)


def report(*winners: Winner, default_us: float = 8.0) -> TuneReport:
    names = dict.fromkeys(item.layout_name for item in winners)
    return TuneReport(
        "sm_120", "sm_120", "model", "why", winners, {name: (2.0,) * len(POINTS) for name in names},
        {name: (default_us,) * len(POINTS) for name in names}, {}, 0, False, False, 1.0,
    )  # fmt: skip


def test_points_of_one_winner_are_one_row() -> None:
    """The default wins with 64 nodes, and once elsewhere."""
    won = [
        winner("h8_p1", point, 8.0 if point["nodes"] == 64 else 4.0, default=point["nodes"] == 64 or place == 0)
        for place, point in enumerate(POINTS)
    ]
    columns, rows = winner_table(SPEC, report(*won))
    assert columns == [
        "layout", "kernel", "wins at", "batch", "nodes", "prefix", "time (us)", "x default", "x floor", "evidence",
        "proven on",
    ]  # fmt: skip
    other, default = SPEC.family.label(OTHER), SPEC.family.label(SPEC.default)
    assert rows == [
        ("h8_p1", other, "7 of 12", "any", "1-8", "4096", "4.0", "2.00", "2.0", "modelled", "emulator"),
        ("h8_p1", default, "5 of 12", "any", "64", "any", "4.0-8.0", "1.15", "3.5", "modelled", "emulator"),
    ]


def test_layouts_that_agree_share_their_rows_and_others_do_not() -> None:
    won = [winner(name, point, 4.0, default=False) for name in ("h8_p1", "h8_p64", "h16_p1") for point in POINTS]
    won[-1] = replace(won[-1], time_us=5.0)
    _, rows = winner_table(SPEC, report(*won))
    assert [row[0] for row in rows] == ["h8_p1, h8_p64", "h16_p1"]


def test_a_timed_gain_is_over_the_default_of_the_same_rounds() -> None:
    won = [
        winner("h8_p1", point, 4.0, default=False, evidence="proxy", device=RTX, reference_us=6.0) for point in POINTS
    ]
    [row] = winner_table(SPEC, report(*won))[1]
    assert row[-4:] == ("1.50", "-", "proxy", "emulator")


def test_a_winner_of_no_whole_axis_shows_the_block_that_it_wins() -> None:
    axes = {"a": (1, 2, 3), "b": (10, 20)}
    points = [{"a": 1, "b": 10}, {"a": 3, "b": 10}, {"a": 2, "b": 20}, {"a": 3, "b": 20}]
    assert largest_block(axes, points) == {"a": (2, 3), "b": (20,)}
    assert largest_block(axes, points[:1]) == {"a": (1,), "b": (10,)}
