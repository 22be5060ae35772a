"""``kgen defrag``: compaction of KV pools, shown."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kgen.cli.console import JsonFlag, write_json, write_table
from kgen.errors import InputError
from kgen.resources import cache_dir

if TYPE_CHECKING:
    from kgen.defrag import Plan

app = typer.Typer(no_args_is_help=True, help="Compact KV pools.")
CPU_LAYERS, CUDA_LAYERS = 2, 61
READ_WRITE_GB_S = 3700.0  # of an H200, for the modelled microseconds (docs/kv_defrag.md)


@app.callback()
def group() -> None:
    """Compact KV pools."""


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="PNG of the slots before (left) and after (right).")
    ] = Path("slot_map.png"),
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="Where the kernels run; auto is a GPU if there is one, else the emulator."),
    ] = "auto",
    slots: Annotated[int, typer.Option("--slots", min=128, max=1 << 20, metavar="N", help="Slots of the pool.")] = 2048,
    requests: Annotated[int, typer.Option("--requests", min=2, max=1024, metavar="N", help="Requests in it.")] = 12,
    budget_kb: Annotated[
        int, typer.Option("--budget-kb", min=1, metavar="KB", help="Most that one plan moves, in all layers.")
    ] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Same seed, same pool.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Fragment a pool, plan, move, verify, and draw the slots before and after.

    Requests come, grow and leave; plans of bounded bytes then move the tail into holes and scattered requests into
    runs, with the kernels of the shipped packs; every request must read the same bytes as before.

    \b
    Examples:
      kgen defrag demo
      kgen defrag demo --slots 4096 --requests 24 --budget-kb 2048 --out pool.png

    One line a plan goes to stdout, the picture to --out. Expected microseconds are modelled, of an H200.
    """
    from kgen.defrag.picture import write_picture
    from kgen.defrag_demo import Settings, run_demo

    chosen = _device(device)
    layers = CPU_LAYERS if chosen == "cpu" else CUDA_LAYERS
    settings = Settings(slots, layers, requests, 0.5, budget_kb * 1000, READ_WRITE_GB_S, seed)
    plans: list[tuple[str, Plan]] = []
    before, after = run_demo(settings, chosen, cache_dir(), lambda kind, plan: plans.append((kind, plan)))
    write_picture(out, [before, after])
    if json:
        write_json(_document(plans, chosen, out))
        return
    columns = ["plan", "slots", "MB", "us (modelled)", "holes", "largest free run", "runs a request"]
    write_table(columns, [_row(kind, plan) for kind, plan in plans])
    typer.echo(f"every request reads the same bytes, on the {'emulator' if chosen == 'cpu' else 'GPU'}; {out}")


def _device(asked: str) -> str:
    try:
        import torch
    except ImportError:
        raise InputError("kgen defrag demo", "needs torch", remedy="install kgen[gpu]") from None
    usable = torch.cuda.is_available()
    if asked == "cuda" and not usable:
        raise InputError("--device", "no GPU is usable", seen="cuda", remedy="see kgen doctor, or use --device cpu")
    return ("cuda" if usable else "cpu") if asked == "auto" else asked


def _row(kind: str, plan: Plan) -> tuple[object, ...]:
    before, after = plan.before, plan.after
    return (
        kind,
        plan.source.size,
        f"{plan.moved_bytes / 1e6:.2f}",
        f"{plan.expected_us:.1f}",
        f"{before.holes} -> {after.holes}",
        f"{before.largest_run} -> {after.largest_run}",
        f"{before.runs_per_request:.1f} -> {after.runs_per_request:.1f}",
    )


def _document(plans: list[tuple[str, Plan]], device: str, out: Path) -> dict[str, object]:
    return {
        "ok": True,
        "device": device,
        "picture": str(out),
        "plans": [
            {
                "kind": kind,
                "slots": int(plan.source.size),
                "moved_bytes": plan.moved_bytes,
                "expected_us": plan.expected_us,
                "evidence": "modelled",
                "before": asdict(plan.before),
                "after": asdict(plan.after),
            }
            for kind, plan in plans
        ],
    }
