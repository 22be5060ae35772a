"""Machine code: which loop is the hot one, and what it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.build.disassemble import HotLoop, find_nvdisasm, hot_loops
from kgen.errors import ToolchainError


def listing(entry: str, *code: str) -> str:
    """As nvdisasm -c prints: ``code`` is instructions without their end, and labels with a colon."""
    lines = [f"//--------------------- .text.{entry} -----", f'\t.section\t.text.{entry},"ax",@progbits', f"{entry}:"]
    lines.append(f".text.{entry}:")
    for number, item in enumerate(code):
        lines.append(item if item.endswith(":") else f"        /*{16 * number:04x}*/      {item} ;")
    return "\n".join([*lines, ".L_x_99:", ""])


@pytest.fixture
def nvdisasm(tmp_path: Path) -> Path:
    """One that prints the cubin itself."""
    tool = tmp_path / "nvdisasm"
    fail = 'grep -q broken "$2" && echo "fatal: bad" >&2 && exit 3'
    tool.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 9\n{fail}\ncat "$2"\n')
    tool.chmod(0o755)
    return tool


def loop_of(nvdisasm: Path, *code: str) -> HotLoop | None:
    return hot_loops(listing("main", *code).encode(), nvdisasm)["main"]


def test_the_innermost_loop_with_the_most_mma_is_counted_by_kind(nvdisasm: Path) -> None:
    found = loop_of(
        nvdisasm,
        "S2R R0, SR_TID.X",
        ".L_x_0:",  # over tiles
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        ".L_x_1:",  # the inner one
        "@!P1 LDSM.16.M88.4 R8, [R2+UR4]",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "UBLKCP.S.G [UR8], [UR10], UR12",
        "STL [R1], R4",
        "IMAD.MOV.U32 R2, RZ, RZ, R3",
        "MUFU.EX2 R5, R5",
        "@P0 BRA `(.L_x_1)",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6], R7",
        ".L_x_2:",  # a wait, longer than the rest but without mma
        *["NANOSLEEP 0x20"] * 30,
        "@!P2 BRA `(.L_x_2)",
        "BRA.U UP0, `(.L_x_0)",
        "EXIT",
    )
    assert found == HotLoop(
        8, {"mma": 2, "ldmatrix": 1, "async copy": 1, "local": 1, "special": 1, "control": 1, "integer": 1}
    )


def test_code_that_only_stands_in_between_is_not_in_the_loop(nvdisasm: Path) -> None:
    """An epilogue that leaves, and a path for diverged warps, whose addresses are inside."""
    found = loop_of(
        nvdisasm,
        ".L_x_0:",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "BRA.DIV ~URZ, `(.L_x_5)",
        "@P0 BRA `(.L_x_3)",
        *["STG.E [R2], R4"] * 9,
        "EXIT",
        ".L_x_5:",
        *["SHFL.IDX R4, R4, R5, R6"] * 7,
        "BRA `(.L_x_0)",
        ".L_x_3:",
        "FADD R4, R4, R5",
        "BRA `(.L_x_0)",
    )
    assert found is not None
    assert "global" not in found.mix
    assert (found.mix["mma"], found.mix["float"], found.instructions) == (1, 1, 5)


def test_without_mma_the_longest_innermost_loop_counts_and_without_a_loop_none(nvdisasm: Path) -> None:
    short = [".L_x_0:", "FFMA R1, R2, R3, R4", "@P0 BRA `(.L_x_0)"]
    longer = [".L_x_1:", "LDG.E R1, [R2]", "FFMA R1, R2, R3, R4", "FMNMX R1, R1, R2, !PT", "@P0 BRA `(.L_x_1)"]
    assert loop_of(nvdisasm, *short, *longer, "EXIT") == HotLoop(4, {"global": 1, "float": 2, "control": 1})
    end = [".L_x_2:", "BRA `(.L_x_2)", "NOP"]  # what every function ends in
    assert loop_of(nvdisasm, "FADD R1, R2, R3", "@P0 BRA `(.L_x_2)", "EXIT", *end) is None


def test_entries_are_apart(nvdisasm: Path) -> None:
    loop = [".L_x_0:", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA `(.L_x_0)", "EXIT"]
    found = hot_loops((listing("first", *loop) + listing("second", "EXIT")).encode(), nvdisasm)
    assert found == {"first": HotLoop(2, {"mma": 1, "control": 1}), "second": None}


def test_a_tool_that_is_missing_or_fails_is_named(
    nvdisasm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolchainError, match=r"does not read the cubin, fatal: bad; pip install 'kgen\[disasm\]'"):
        hot_loops(b"broken", nvdisasm)
    with pytest.raises(ToolchainError, match="cannot be run"):
        hot_loops(b"", tmp_path / "none")
    monkeypatch.setattr("kgen.build.disassemble.DEFAULT_CUDA", str(tmp_path / "cuda"))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("KGEN_NVDISASM", raising=False)
    with pytest.raises(
        ToolchainError, match=r"^nvdisasm: not found; pip install 'kgen\[disasm\]', or set KGEN_NVDISASM"
    ):
        find_nvdisasm()
    assert find_nvdisasm(tmp_path) == nvdisasm, "beside nvcc"
    wheel = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    wheel.parent.mkdir(parents=True)
    nvdisasm.rename(wheel)
    assert find_nvdisasm(tmp_path) == wheel
    monkeypatch.setenv("KGEN_NVDISASM", "nowhere")
    with pytest.raises(ToolchainError, match=r"^KGEN_NVDISASM: no such program, 'nowhere'"):
        find_nvdisasm()
