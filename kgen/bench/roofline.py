"""The roofline plot of a bench: what was achieved at each call's intensity, under what the device allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kgen.errors import InputError

if TYPE_CHECKING:
    from kgen.targets import Target


class Timed(Protocol):
    """A timed call: its layout, operations a byte, and TFLOP/s; a `kgen.bench.Row`, or what stored results make."""

    @property
    def layout(self) -> str: ...
    @property
    def intensity(self) -> float: ...
    @property
    def tflop_s(self) -> float: ...


def check_can_plot(path: Path) -> None:
    """Raises InputError, before anything is timed, where matplotlib or the folder is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plot", "needs matplotlib", remedy="pip install 'kgen[plot]'") from None
    if not path.parent.is_dir():
        raise InputError("--plot", "no such folder", seen=str(path.parent))


def write_roofline(path: Path, rows: Sequence[Timed], target: Target, device: str) -> None:
    """Write the plot as SVG, the same bytes for the same rows: TFLOP/s against operations a byte, one mark a call.

    Raises InputError where the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "kgen", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        by_layout: dict[str, list[Timed]] = defaultdict(list)
        for row in rows:
            by_layout[row.layout].append(row)
        for (layout, mine), mark in zip(by_layout.items(), _marks(), strict=False):
            axes.plot([row.intensity for row in mine], [row.tflop_s for row in mine], mark, alpha=0.7, label=layout)
        dram_tb_s, mma_tflop_s = _limits(target)
        ridge = mma_tflop_s / dram_tb_s
        least = min([ridge, *(row.intensity for row in rows)]) / 2
        most = max([ridge, *(row.intensity for row in rows)]) * 2
        axes.plot([least, ridge, most], [least * dram_tb_s, mma_tflop_s, mma_tflop_s], "k-", label="limit")
        axes.set(xscale="log", yscale="log", xlabel="intensity (FLOP / byte)", ylabel="achieved (TFLOP/s)")
        axes.set_title(f"{device}: {dram_tb_s:.2f} TB/s, {mma_tflop_s:.0f} TFLOP/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise InputError("--plot", f"{path} cannot be written", seen=str(error.strerror)) from error


def _limits(target: Target) -> tuple[float, float]:
    """DRAM TB/s and mma TFLOP/s of a target."""
    return target.dram_gb_s / 1e3, target.mma_bf16_flop_per_clk * target.clock_mhz * target.sms / 1e6


def _marks() -> tuple[str, ...]:
    return tuple("o^svDP*Xp<>hd8")
