"""``kgen check``: kernels against the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kgen.cli import subjects
from kgen.cli.console import JsonFlag, write_json, write_table
from kgen.cli.options import DEFAULT_SPEC, DEFAULT_TARGET, JobsFlag, LayoutsFlag, SpecFlag, load, shipped_pack
from kgen.errors import InputError

if TYPE_CHECKING:
    from kgen.validate import Verdict


def check(
    spec: SpecFlag = DEFAULT_SPEC,
    layout: LayoutsFlag = None,
    pack: Annotated[
        Path | None, typer.Option("--pack", metavar="DIR", help="Pack to check. Default: the one that kgen ships.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Check the default candidate with this change, not a pack."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Check the spec's default candidate, not a pack.")] = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="Check the spec's naive candidate, not a pack.")] = False,
    target: Annotated[
        str, typer.Option("--target", metavar="NAME", help="Whose launch shapes to use in the emulator.")
    ] = DEFAULT_TARGET,
    device: Annotated[
        Literal["emulator", "cuda"], typer.Option("--device", help="Where to run: on the CPU, or on the first GPU.")
    ] = "emulator",
    jobs: JobsFlag = 2,
    json: JsonFlag = False,
) -> None:
    """Check kernels against the float64 reference.

    Every feature and edge, two seeds, NaN-poisoned outputs, replays with changed lengths.

    Without --set, --default or --oracle, every kernel of a pack is checked: each winner, default and oracle, for each
    layout that can be given it. Exits 1 if any is wrong.

    \b
    Examples:
      kgen check --spec verify_mla.yaml
      kgen check --layout h8_p1 --set tile_m=32
      kgen check --pack my_pack --device cuda --json

    One line a kernel and layout goes to stdout, with its worst relative L2 error.
    """
    loaded = load(spec)
    from_spec = bool(setting) or default or oracle
    if from_spec and (pack is not None or device == "cuda"):
        raise InputError("--set, --default, --oracle", "need neither --pack nor --device cuda",
                         remedy="tune it with 'kgen tune' on the GPU, which checks what it times")  # fmt: skip
    names = [name for name in layout or loaded.layouts if loaded.layout(name)]
    if from_spec:
        checked = list(subjects.from_spec(loaded, names, setting or [], oracle=oracle, target=target))
    else:
        checked = list(subjects.from_pack(loaded, pack or shipped_pack(loaded.family.name), names, target, device))
    verdicts = subjects.run_checks(loaded, checked, device, jobs)
    _report(checked, verdicts, device, json)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


def _report(checked: Sequence[subjects.Subject], verdicts: Sequence[Verdict], device: str, json: bool) -> None:
    pairs = list(zip(checked, verdicts, strict=True))
    if json:
        results = [
            {
                "layout": subject.layout_name,
                "kernel": subject.label,
                "source": subject.source.name,
                "ok": verdict.ok,
                "checks": len(verdict.cases),
                "relative_l2": verdict.worst.relative_l2 if verdict.ok and verdict.worst else None,
                "reason": verdict.reason,
            }
            for subject, verdict in pairs
        ]
        write_json({"ok": all(verdict.ok for verdict in verdicts), "checked_on": device, "results": results})
        return
    rows = [
        (
            "ok" if verdict.ok else "WRONG",
            subject.layout_name,
            subject.label,
            len(verdict.cases),
            f"{verdict.worst.relative_l2:.2e}" if verdict.ok and verdict.worst else verdict.reason,
        )
        for subject, verdict in pairs
    ]
    write_table(["result", "layout", "kernel", "checks", "worst relative L2 error"], rows)
    typer.echo(f"{sum(verdict.ok for verdict in verdicts)} of {len(verdicts)} right, on the {device}")
