"""Captured shapes: read, used as weights, and asked of a pack."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kgen.cli import main
from kgen.errors import InputError
from kgen.resources import SPECS
from kgen.spec import load_spec
from kgen.workload import Shape, reachable_shapes, read_capture, weighted_by


def line(layout: str = "h8_p1", nodes: int = 16, prefixes: tuple[int, ...] = (4000, 4200)) -> str:
    record = {"family": "verify_mla", "layout": layout, "batch": len(prefixes), "nodes": nodes, "prefixes": prefixes}
    return json.dumps(record) + "\n"


def shape(layout: str, batch: int, nodes: int, prefix: int) -> Shape:
    return Shape(layout, (("batch", batch), ("nodes", nodes), ("prefix", prefix)))


def test_a_capture_is_counted_by_shape(tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text(line() + line() + line(prefixes=(7,)) + '{"family": "slot_remap"}\n')
    assert read_capture(path, "verify_mla") == {shape("h8_p1", 2, 16, 4100): 2, shape("h8_p1", 1, 16, 7): 1}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("not json\n", r"capture.jsonl:1: is no record of a captured shape, 'not json'"),
        ("[" * 100_000 + "\n", r"capture.jsonl:1: is no record of a captured shape"),
        (line().replace('"batch": 2', '"batch": ' + "9" * 5000), r"capture.jsonl:1: is no record of a captured shape"),
        ("\x1b[2J\n", r"is no record of a captured shape, '\\x1b\[2J'"),  # a terminal would obey it
        (line() + '{"family": "verify_mla", "layout": "h8_p1"}\n', r"capture.jsonl:2: lacks a layout, batch"),
        (line(prefixes=(-7,)), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        (line(prefixes=(True,)), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        (line(prefixes=(10**400,)), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        (line(nodes=2**31), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        (line("\x1b[31m"), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        (line("\ud800"), r"capture.jsonl:1: lacks a layout, batch, nodes or prefixes"),
        ("", "holds no shapes of verify_mla"),
    ],
)
def test_what_is_no_capture_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=wrong):
        read_capture(path, "verify_mla")


def test_a_spec_is_weighted_by_the_nearest_points() -> None:
    spec = load_spec(SPECS / "verify_mla.yaml")
    shapes = Counter({shape("h8_p1", 5, 16, 5000): 98, shape("h999", 1, 1, 1): 5, shape("h16_p1", 1, 64, 400): 1})
    points = weighted_by(spec, shapes).workload.points
    most = len(points) + 99
    weights = {tuple(item.point.values()): item.weight * most for item in points}
    assert weights.pop((4, 16, 4096)) == pytest.approx(99)
    assert weights.pop((1, 64, 512)) == pytest.approx(2)  # and not (4, 64, 512): values count where they occur together
    assert list(weights.values()) == pytest.approx([1] * len(weights))
    with pytest.raises(InputError, match="names no head layout"):
        weighted_by(spec, Counter({shape("h999", 1, 1, 1): 5}))


def test_shapes_of_server_arguments() -> None:
    shapes = [item.as_point() for item in reachable_shapes("h8_p1", most_batch=3, nodes=9, most_prefix=4)]
    assert [(point["batch"], point["prefix"]) for point in shapes] == [(b, p) for b in (1, 2, 3) for p in (1, 2, 4)]
    assert {point["nodes"] for point in shapes} == {9}


def test_coverage_of_a_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture.jsonl"
    exact, bucket, beyond = line(prefixes=(4096,)), line(prefixes=(5000,)), line(prefixes=(1,))
    path.write_text(exact * 5 + bucket * 3 + beyond + line(layout="h12_p1"))
    assert main(["coverage", "--capture", str(path), "--json", "--most-default", "20"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shares_percent"] == {"exact": 50.0, "bucket": 30.0, "default": 10.0, "none": 10.0}
    assert [row["match"] for row in shown["shapes"]] == ["exact", "bucket", "default", "none"]
    assert main(["coverage", "--capture", str(path), "--most-default", "19"]) == 1
    assert "share of calls: exact 50.0 %, bucket 30.0 %, default 10.0 %, none 10.0 %" in capsys.readouterr().out


def test_coverage_of_server_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["coverage", "--layout", "h8_p1", "--max-running-requests", "4", "--context-length", "8192", "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["shapes"]) == 3 * 14
    assert main(["coverage"]) == 2
    assert "give either --capture FILE or --layout NAME" in capsys.readouterr().err


def test_why_explains_the_most_frequent_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text(line(prefixes=(5000,)) * 5 + line(layout="h12_p1") * 3 + line(prefixes=(1,)) * 2)
    assert main(["why", "--capture", str(path), "--most", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["calls"], shown["shapes"]) == (10, 3)
    first, second = shown["decisions"]
    assert (first["count"], first["match"]["how"], first["match"]["point"]["prefix"]) == (5, "bucket", 4096)
    assert (second["count"], second["layout"]) == (3, "h12_p1")
    assert "no head layout 'h12_p1'" in second["error"]
    assert main(["why", "--capture", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.index("5 of 10 calls (50.0 %)") < text.index("match      bucket: the nearest tuned point speaks for it")
    assert "match      default: no tuned point speaks for it: the default variant runs (prefix is out of reach)" in text
    assert main(["why", "--capture", str(path), "--batch", "1"]) == 2
    assert "give either --capture FILE or the values of a point" in capsys.readouterr().err


def test_tuning_takes_a_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text(line(layout="h12_p1"))
    words = ["tune", "--workload", str(path), "--db", str(tmp_path / "t.sqlite"), "--trials", "1"]
    assert main(words) == 2
    assert "names no head layout of" in capsys.readouterr().err
