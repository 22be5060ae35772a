"""What the shipped pack's kernels take: every kernel a row, the model's part labelled and without invention."""

from __future__ import annotations

from pathlib import Path

import pytest
from mla_packs import shipped_spec

from kgen.build.disassemble import HotLoop
from kgen.cli import main
from kgen.cli.options import shipped_pack
from kgen.pack import resources
from kgen.pack.resources import ResourceRow, markdown_page, resource_rows, resource_table
from kgen.runtime.pack_reader import Pack, load_pack

LOOP = HotLoop(40, {"mma": 16, "integer": 24})


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """The shipped pack, without a disassembler: main kernels have a loop."""
    monkeypatch.setattr(
        resources, "hot_loops", lambda cubin, tool: {"verify_mla_flash": LOOP, "verify_mla_oracle": None}
    )
    return load_pack(shipped_pack("verify_mla"))


def test_every_kernel_of_every_target_is_a_row(pack: Pack) -> None:
    rows = resource_rows(shipped_spec(), pack, Path("nvdisasm"))
    expected = {
        (target, source, kernel.entry)
        for target, packed in pack.manifest.targets.items()
        for source, made in pack.manifest.sources.items()
        if packed.arch in made.cubins
        for kernel in made.kernels
    }
    assert {(row.target, row.source, row.entry) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        source = pack.manifest.sources[row.source]
        cubin = source.cubins[row.target]
        taken = cubin.resources[row.entry]
        assert (row.registers, row.spill_bytes) == (taken.registers, taken.spill_bytes)
        assert row.hot_loop == (LOOP if row.entry == "verify_mla_flash" else None)
        if row.entry == source.kernels[0].entry:
            assert row.blocks_per_sm == cubin.blocks_per_sm


def test_the_model_speaks_of_the_points_that_are_dispatched(pack: Pack) -> None:
    rows = resource_rows(shipped_spec(), pack, Path("nvdisasm"))
    for target, tables in pack.manifest.dispatch.items():
        mine = [row for row in rows if row.target == target]
        assert sum(row.points for row in mine) == sum(len(table.buckets) for table in tables.values())
        for row in mine:
            assert (row.modelled_x_floor is None) == (row.modelled_bound is None) == (row.points == 0)
            assert row.modelled_x_floor is None or row.modelled_x_floor > 1


def made(source: str, entry: str, registers: int) -> ResourceRow:
    return ResourceRow("sm_120", f"f__{source}", entry, ("tuned",), 128, registers, 1024, 0, 2, LOOP, 0, None, None)


def test_kernels_that_are_the_same_share_a_row() -> None:
    columns, cells = resource_table(
        [made("a", "main", 40), made("a", "last", 9), made("b", "main", 41), made("b", "last", 9)]
    )
    assert columns[-3:] == ["hot loop", "mma", "integer"]
    assert [row[1:5] for row in cells] == [
        ("a", "main", "128", "40"),
        ("2 sources", "last", "128", "9"),
        ("b", "main", "128", "41"),
    ]
    assert cells[0][5:] == ("1024", "0", "2", "0", "-", "-", "40", "16", "24")


def test_the_page_has_a_table_a_target(pack: Pack) -> None:
    page = markdown_page(shipped_spec(), pack, resource_rows(shipped_spec(), pack, Path("nvdisasm")))
    assert "not timed" in page
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in pack.manifest.dispatch
    ]
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_command_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pack: Pack
) -> None:
    monkeypatch.setenv("KGEN_NVDISASM", str(tmp_path / "none"))
    assert main(["show", "resources"]) == 2
    assert "KGEN_NVDISASM: no such program" in capsys.readouterr().err
    monkeypatch.setenv("KGEN_NVDISASM", "true")
    assert main(["show", "resources", "--markdown", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().startswith("# What the packed kernels of verify_mla take")
    assert main(["show", "resources", "--markdown", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
