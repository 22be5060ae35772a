"""Rows of ``kgen bench``: which errors and times they hold, and what the timed jobs ask of the driver."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mla_packs import shipped_spec
from packs import invented_pack

from kgen.bench import Row, time_calls
from kgen.bench.peers import PeerTime
from kgen.bench.roofline import check_can_plot, write_roofline
from kgen.cli import bench
from kgen.errors import DeviceError, InputError
from kgen.family import Point
from kgen.measure import DeviceEvaluator
from kgen.measure.job import Job, JobResult, LoadedResources
from kgen.measure.timing import REPEATS, summarise
from kgen.records import DeviceFingerprint

CALLS: list[tuple[str, Point]] = [
    ("h8_p1", {"batch": 1, "nodes": 8, "prefix": 65536}),
    ("h16_p1", {"batch": 900, "nodes": 8, "prefix": 65536}),
]
PROOF_ERROR = 7e-3
ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


class Timed(DeviceEvaluator):
    """An evaluator without a device: jobs take 10, 20 us and are off by 1e-3, 2e-3 where they are timed."""

    def __init__(self, status: str = "ok") -> None:
        self.jobs: list[Job] = []
        self.status = status

    @property
    def fingerprint(self) -> DeviceFingerprint:
        return DeviceFingerprint("12.0", 188, 101376, 128 << 20, 14001000, "fake", "13.0")

    def time_candidates(
        self, jobs: Sequence[Job], point: Point, repeats: int = REPEATS, reference: str = ""
    ) -> list[JobResult]:
        self.jobs += jobs
        results = []
        for number, job in enumerate(jobs, 1):
            time = summarise(point, [10.0 * number], 1e-3 * number)
            resources = LoadedResources(200, 90_000, 0, 1)
            results.append(
                JobResult(job, "ok", times=(time,), relative_error=PROOF_ERROR, resources=resources)
                if self.status == "ok"
                else JobResult(job, "wrong_result", "out at a point: off")
            )
        return results


def test_a_row_holds_the_error_of_its_timed_launches() -> None:
    spec = shipped_spec()
    rows = list(time_calls(spec, invented_pack(), Timed(), spec.targets["sm_120"], CALLS))
    assert [(row.layout, row.variant, row.match) for row in rows] == [
        ("h8_p1", "wide", "exact"),
        ("h16_p1", "default", "default"),
    ]
    assert [(row.time_us, row.default_us, row.relative_error) for row in rows] == [
        (10.0, 20.0, 1e-3),
        (10.0, 10.0, 1e-3),
    ]


def test_jobs_say_which_driver_the_packed_cubins_need() -> None:
    spec, pack, evaluator = shipped_spec(), invented_pack(), Timed()
    archs = {**pack.manifest.archs, "sm_120": replace(pack.manifest.archs["sm_120"], min_cuda=(12, 8))}
    pack = replace(pack, manifest=replace(pack.manifest, archs=archs))
    list(time_calls(spec, pack, evaluator, spec.targets["sm_120"], CALLS[:1]))
    assert [(job.name, job.minimum_cuda) for job in evaluator.jobs] == [
        ("h8_p1 wide", (12, 8)),
        ("h8_p1 default", (12, 8)),
    ]


def test_calls_that_share_nothing_are_timed_beside_where_asked() -> None:
    spec, evaluator = shipped_spec(), Timed()
    rows = list(time_calls(spec, invented_pack(), evaluator, spec.targets["sm_120"], CALLS, alone=True))
    assert [(job.name, job.alone) for job in evaluator.jobs] == [
        ("h8_p1 wide", False), ("h8_p1 default", False), ("h8_p1 wide alone", True),
        ("h16_p1 default", False), ("h16_p1 default alone", True),
    ]  # fmt: skip
    assert [(row.variant, row.time_us, row.default_us, row.alone_us) for row in rows] == [
        ("wide", 10.0, 20.0, 30.0),
        ("default", 10.0, 10.0, 20.0),
    ]


def test_a_wrong_kernel_is_no_row() -> None:
    spec = shipped_spec()
    with pytest.raises(DeviceError, match="h8_p1 wide: not timed: wrong_result, out at a point: off"):
        list(time_calls(spec, invented_pack(), Timed("wrong"), spec.targets["sm_120"], CALLS))


def rows() -> list[Row]:
    spec = shipped_spec()
    return list(time_calls(spec, invented_pack(), Timed(), spec.targets["sm_120"], CALLS))


def test_the_roofline_is_the_same_svg_for_the_same_rows(tmp_path: Path) -> None:
    target = shipped_spec().targets["sm_120"]
    for name in ("a.svg", "b.svg"):
        write_roofline(tmp_path / name, rows(), target, "a <device>")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("h8_p1", "h16_p1", "limit", "a &lt;device&gt;: 1.79 TB/s, 504 TFLOP/s", "intensity (FLOP / byte)"):
        assert words in text, words
    with pytest.raises(InputError, match=r"^--plot: .* cannot be written, Is a directory$"):
        write_roofline(tmp_path, rows(), target, "")


def test_the_docs_roofline_is_of_the_stored_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, drawn = ROOT / "benchmarks/results/verify_mla_h200.json", tmp_path / "roofline.svg"
    script = ROOT / "benchmarks/verify_mla_peers.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--from-json", str(stored), "--plot", str(drawn)])
    runpy.run_path(str(script), run_name="__main__")
    shipped = ROOT / "docs/verify_mla_roofline_h200.svg"
    assert shipped.stat().st_size < 100_000
    assert marks(shipped) == marks(drawn)
    assert len(marks(drawn)) == len(json.loads(stored.read_text(encoding="utf-8"))["results"])


def marks(path: Path) -> list[tuple[float, float]]:
    """Where the plotted calls are: hundredths of the width and height that they take up, whatever the fonts."""
    groups = [group for group in ElementTree.parse(path).iter(f"{SVG}g") if group.get("clip-path")]
    places = [(float(use.attrib["x"]), float(use.attrib["y"])) for group in groups for use in group.iter(f"{SVG}use")]
    left, top = (min(values) for values in zip(*places, strict=True))
    right, bottom = (max(values) for values in zip(*places, strict=True))
    return [(round((x - left) / (right - left), 2), round((y - top) / (bottom - top), 2)) for x, y in places]


def test_what_a_plot_lacks_is_said_before_anything_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_can_plot(tmp_path / "x.svg")
    with pytest.raises(InputError, match=r"^--plot: no such folder, .*none$"):
        check_can_plot(tmp_path / "none" / "x.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"^--plot: needs matplotlib; pip install 'kgen\[plot\]'$"):
        check_can_plot(tmp_path / "x.svg")


def test_the_table_has_a_column_a_peer_and_names_the_absent(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = rows()
    found = [
        PeerTime("fast", first.layout, first.point, 25.0, 24.0, 26.0, 1e-3),
        PeerTime("fast", second.layout, second.point, reason="wrong result: off"),
    ]
    bench._print([first, second], found, shipped_spec().family.axes)
    bench._print_peers(found, {"slow": "cannot be imported: none"})
    head, one, two, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[-5:] == ["x", "default", "x", "fast", "error"]
    assert one.split()[-3:] == ["2.00", "2.50", "1.0e-03"]
    assert two.split()[-3:] == ["1.00", "-", "1.0e-03"]
    assert rest[-2:] == [
        "not compared with slow: cannot be imported: none",
        "no time of fast at 1 calls: wrong result: off",
    ]


def test_row_figures_follow_from_work_and_time() -> None:
    row, spec = rows()[0], shipped_spec()
    work = spec.family.work(spec.layout("h8_p1"), CALLS[0][1])
    assert row.intensity == work.flop / work.bytes
    assert (row.gb_s, row.tflop_s) == (work.bytes / 10e3, work.flop / 10e6)
    assert row.tflop_s * 1e3 == pytest.approx(row.gb_s * row.intensity)
