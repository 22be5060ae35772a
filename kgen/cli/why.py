"""``kgen why``: one dispatch decision, in full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, write_json, write_table
from kgen.cli.options import (
    DEFAULT_SPEC,
    DEFAULT_TARGET,
    AskedPackFlag,
    AskedTargetFlag,
    AtFlag,
    BatchFlag,
    LayoutFlag,
    NodesFlag,
    PrefixFlag,
    SpecFlag,
    database_url,
    full_point,
    load,
    shipped_pack,
)
from kgen.errors import InputError, LayoutMissingError

if TYPE_CHECKING:
    from kgen.runtime.dispatch import Explanation
    from kgen.runtime.pack_reader import Pack

MATCHES = {
    "exact": "the point was tuned",
    "bucket": "the nearest tuned point speaks for it",
    "default": "no tuned point speaks for it: the default variant runs",
}
REASONS = {"untuned": "nothing was tuned"}


def why(
    layout: LayoutFlag = "h8_p1",
    batch: BatchFlag = None,
    nodes: NodesFlag = None,
    prefix: PrefixFlag = None,
    at: AtFlag = None,
    capture: Annotated[
        Path | None,
        typer.Option("--capture", metavar="FILE", help="Explain the shapes that a server captured (docs/sglang.md)."),
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, metavar="N", help="With --capture: shapes to explain.")] = 5,
    target: AskedTargetFlag = DEFAULT_TARGET,
    pack: AskedPackFlag = None,
    db: Annotated[
        str | None, typer.Option("--db", metavar="URL", help="Ask a tuning database instead of a pack.")
    ] = None,
    spec: SpecFlag = DEFAULT_SPEC,
    json: JsonFlag = False,
) -> None:
    """Explain which kernel a call gets, and why.

    Match, evidence, distance of each axis, and the tuned points nearby with their winners. With --capture, the first
    of these for the most frequent shapes of a server's traffic, whatever their layout.

    \b
    Examples:
      kgen why --layout h8_p1 --batch 4 --nodes 16 --prefix 16384
      kgen why --layout h16_p64 --at batch=1 --at nodes=64 --at prefix=5000 --target sm_90 --json
      kgen why --layout h8_p1 --batch 1 --nodes 8 --prefix 4096 --db tuning_db/tuning.sqlite
      kgen why --capture capture.jsonl --most 3

    The decision goes to stdout. Nothing is launched.
    """
    asked = _pack_of(pack, db, spec, target)
    if capture is not None:
        if at or any(value is not None for value in (batch, nodes, prefix)):
            raise InputError("why", "has two questions", remedy="give either --capture FILE or the values of a point")
        _explain_capture(asked, target, capture, most, json=json)
        return
    table = asked.dispatcher().table(target, layout)
    point = full_point(table.axes, {"batch": batch, "nodes": nodes, "prefix": prefix}, at or [])
    explanation = table.explain(point)
    if json:
        write_json(_decision(asked, explanation, point))
        return
    _print_decision(asked, explanation, point)
    _print_considered(explanation)


def _decision(pack: Pack, explanation: Explanation, point: Mapping[str, int]) -> dict[str, object]:
    variant = pack.manifest.variants[explanation.match.variant]
    more = {"candidate": dict(variant.candidate), "source": variant.source}
    return {"asked": dict(point), "pack": pack.where, **explanation.to_json(), **more}


def _explain_capture(pack: Pack, target: str, capture: Path, most: int, *, json: bool) -> None:
    """The decision for each of the most frequent shapes, with how often it occurs."""
    from kgen.workload import read_capture

    shapes = read_capture(capture, pack.manifest.family)
    dispatcher = pack.dispatcher()
    decisions: list[dict[str, object]] = []
    for shape, count in shapes.most_common(most):
        share = f"{count} of {shapes.total()} calls ({100 * count / shapes.total():.1f} %)"
        try:
            table = dispatcher.table(target, shape.layout)
        except LayoutMissingError as error:
            decisions.append({"count": count, "asked": shape.as_point(), "layout": shape.layout, "error": str(error)})
            if not json:
                typer.echo(f"{share}: {_values(shape.as_point())}\n{error}\n")
            continue
        explanation = table.explain(shape.as_point())
        decisions.append({"count": count, **_decision(pack, explanation, shape.as_point())})
        if not json:
            typer.echo(f"{share}:")
            _print_decision(pack, explanation, shape.as_point())
            typer.echo("")
    if json:
        write_json({"calls": shapes.total(), "shapes": len(shapes), "decisions": decisions})


def _print_decision(pack: Pack, explanation: Explanation, point: Mapping[str, int]) -> None:
    match = explanation.match
    variant = pack.manifest.variants[match.variant]
    typer.echo(f"pack       {pack.where}")
    typer.echo(f"asked      {explanation.layout} on {explanation.target} ({explanation.arch}), {_values(point)}")
    typer.echo(f"variant    {match.variant}")
    typer.echo(f"source     {variant.source}")
    typer.echo(f"candidate  {_values(variant.candidate)}")
    reason = f" ({REASONS.get(match.reason, f'{match.reason} is out of reach')})" if match.reason else ""
    typer.echo(f"match      {match.how}: {MATCHES[match.how]}{reason}")
    typer.echo(f"evidence   {match.evidence or 'none: the default is not chosen by time'}")
    for axis in explanation.axes:
        tuned = "nothing tuned" if axis.tuned is None else f"tuned {axis.tuned}"
        apart = "" if axis.log2_distance is None else f", {axis.log2_distance:.2f} doublings apart"
        typer.echo(
            f"axis       {axis.axis}: asked {axis.asked}, {tuned}{apart}{'' if axis.in_reach else ', out of reach'}"
        )


def _print_considered(explanation: Explanation, most: int = 8) -> None:
    typer.echo("")
    rows = [
        (_values(item.point), "-" if item.distance is None else f"{item.distance:.2f}", item.variant,
         f"{item.time_us:.1f}", item.evidence, ", ".join(item.tie) or "-")
        for item in explanation.considered[:most]
    ]  # fmt: skip
    columns = ["tuned point", "doublings apart", "winner", "time (us)", "evidence", "ties with"]
    write_table(columns, rows, title=f"nearest {len(rows)} of {len(explanation.considered)} tuned points")


def _values(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _pack_of(path: Path | None, db: str | None, spec: str, target: str) -> Pack:
    """The pack in a folder, or one assembled from a database."""
    from kgen.runtime.pack_reader import load_pack

    if db is None:
        return load_pack(path or shipped_pack(load(spec).family.name))
    from kgen.pack import pack_from_database

    return pack_from_database(load(spec), database_url(db), [target])
