"""``kgen tune``: search for the fastest candidates."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kgen.cli.console import JsonFlag
from kgen.cli.options import (
    DEFAULT_SPEC,
    DEFAULT_TARGET,
    DatabaseFlag,
    JobsFlag,
    LayoutsFlag,
    SpecFlag,
    TargetFlag,
)


def tune(
    spec: SpecFlag = DEFAULT_SPEC,
    target: TargetFlag = DEFAULT_TARGET,
    layout: LayoutsFlag = None,
    trials: Annotated[int, typer.Option("--trials", min=1, metavar="N", help="Candidates to try a layout.")] = 24,
    time_budget: Annotated[
        str | None, typer.Option("--time-budget", metavar="TIME", help="Start nothing new after this: 90s, 10m, 2h.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Same seed, same candidates.")] = 0,
    jobs: JobsFlag = 2,
    db: DatabaseFlag = None,
    evaluator: Annotated[
        Literal["auto", "device", "model"],
        typer.Option("--evaluator", help="Time on a GPU, or compile and model; auto takes a GPU where one is usable."),
    ] = "auto",
    envelope: Annotated[
        str | None,
        typer.Option("--envelope", metavar="NAME", help="Target whose limits every launch keeps. Default: --target."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Try candidates, prove the best, record every trial.

    On a GPU, candidates are proven and then timed; without one they are compiled, their time is modelled from real
    registers, shared bytes and occupancy, and the best are proven in the emulator. The evidence column says which:
    measured, proxy (timed on another architecture within the target's limits) or modelled.

    Ctrl-C keeps everything and exits 130; the next run goes on where this one stopped and compiles nothing twice.

    \b
    Examples:
      kgen tune --spec verify_mla.yaml
      kgen tune --layout h8_p1 --layout h16_p1 --trials 64 --time-budget 10m
      kgen tune --target sm_90 --envelope sm_120 --evaluator device --json

    Trials go to --db; the table of winners goes to stdout.
    """
