"""``kgen tune``: search for the fastest candidates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kgen.cli.console import Advance, JsonFlag, note, progress, write_json, write_table
from kgen.cli.options import (
    DEFAULT_SPEC,
    DEFAULT_TARGET,
    DatabaseFlag,
    JobsFlag,
    LayoutsFlag,
    SpecFlag,
    TargetFlag,
    database_url,
    load,
    seconds,
    settings,
)
from kgen.cli.winner_table import LEGEND, winner_table
from kgen.resources import cache_dir

if TYPE_CHECKING:
    from kgen.records import TrialRecord
    from kgen.spec import Spec
    from kgen.tune import TuneReport

INTERRUPTED = 130


class ProgressListener:
    """Turns what a run says into progress on stderr."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._done, self._total, self._phase = advance, 0, 0, ""

    def started(self, total: int, evaluator: str, why: str) -> None:
        """How many trials there will be, and what judges them."""
        self._total = total
        note(f"evaluator: {evaluator} ({why})")

    def phase(self, name: str) -> None:
        """What is done from now on."""
        self._phase = name
        self._advance(self._done, self._total, name)

    def trial_done(self, record: TrialRecord) -> None:
        """One more trial."""
        self._done += 1
        self._advance(self._done, self._total, self._phase)

    def proofs(self, done: int, total: int) -> None:
        """So many of the chosen candidates are proven."""
        self._advance(done, total, self._phase)

    def finished(self, report: TuneReport) -> None:
        """The run is over."""


def tune(
    spec: SpecFlag = DEFAULT_SPEC,
    target: TargetFlag = DEFAULT_TARGET,
    layout: LayoutsFlag = None,
    trials: Annotated[
        int,
        typer.Option(
            "--trials", min=1, metavar="N", help="Candidates to try a layout, with the default; the oracle is extra."
        ),
    ] = 24,
    time_budget: Annotated[
        str | None, typer.Option("--time-budget", metavar="TIME", help="Start nothing new after this: 90s, 10m, 2h.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="Same seed, same candidates.")
    ] = 0,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try", metavar="NAME=VALUE,...", help="Try the default with these changes before others; repeatable."
        ),
    ] = None,
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
    workload: Annotated[
        Path | None,
        typer.Option("--workload", metavar="FILE", help="Weigh shapes as a server captured them (docs/sglang.md)."),
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
      kgen tune --layout h8_p1 --try tile_m=32,k_split=4 --try tile_m=16,warps=4,row_groups=1,k_split=4
      kgen tune --layout h8_p1 --workload capture.jsonl
      kgen tune --target sm_90 --envelope sm_120 --evaluator device --json

    Trials go to --db; the table of winners, one row a kernel and layout, goes to stdout.
    """
    from kgen.tune import TuneOptions
    from kgen.tune import tune as run

    loaded = load(spec)
    if workload is not None:
        from kgen.workload import read_capture, weighted_by

        loaded = weighted_by(loaded, read_capture(workload, loaded.family.name))
    url = database_url(db)
    options = TuneOptions(
        spec=loaded,
        target=target,
        db=url,
        cache_dir=cache_dir(),
        envelope=envelope,
        layouts=layout,
        trials=trials,
        time_budget_s=seconds("--time-budget", time_budget),
        seed=seed,
        jobs=jobs,
        evaluator=evaluator,
        tries=[settings(loaded, loaded.default, text.split(","), "--try") for text in tries or ()],
    )
    with progress("tune") as advance:
        report = run(options, ProgressListener(advance))
    if json:
        write_json(report.as_json())
    else:
        _print(loaded, report, url)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.winners:
        raise typer.Exit(1)


def _print(spec: Spec, report: TuneReport, url: str) -> None:
    columns, rows = winner_table(spec, report)
    write_table(columns, rows, title=f"fastest kernels for {report.target} within the limits of {report.envelope}")
    outcomes = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    typer.echo("")
    typer.echo(f"evaluator {report.evaluator}: {report.why}")
    typer.echo(f"trials: {outcomes}; {report.new_trials} new rows, proofs too, in {url}; {report.wall_s:.0f} s")
    typer.echo(LEGEND)
    typer.echo(f"every point: kgen show winners --spec {spec.path.name} --target {report.target} --db {url}")
    if report.budget_spent:
        typer.echo("the time budget ended the search; run again to go on")
    if not report.winners:
        typer.echo("no winners: no candidate was proven; see: kgen show trials")
