"""``kgen coverage``: how a pack answers the shapes that a server meets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, write_json, write_table
from kgen.cli.options import DEFAULT_TARGET, AskedPackFlag, AskedTargetFlag, shipped_pack
from kgen.errors import InputError, LayoutMissingError

if TYPE_CHECKING:
    from kgen.runtime.dispatch import Dispatcher, Match
    from kgen.workload import Shape

FAMILY = "verify_mla"
MOST_ROWS = 40


def coverage(
    capture: Annotated[
        Path | None, typer.Option("--capture", metavar="FILE", help="Shapes that a server captured (docs/sglang.md).")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="NAME", help="Without --capture: the server's head layout.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--max-running-requests", min=1, metavar="N", help="Without --capture: the largest batch.")
    ] = 16,
    nodes: Annotated[
        int,
        typer.Option("--speculative-num-draft-tokens", min=1, metavar="N", help="Without --capture: nodes of a tree."),
    ] = 16,
    context: Annotated[
        int, typer.Option("--context-length", min=1, metavar="N", help="Without --capture: the longest prefix.")
    ] = 65536,
    target: AskedTargetFlag = DEFAULT_TARGET,
    pack: AskedPackFlag = None,
    most_default: Annotated[
        float | None,
        typer.Option(
            "--most-default",
            min=0.0,
            max=100.0,
            metavar="PERCENT",
            help="Exit 1 where a larger share gets the default kernel, or has no kernel.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show how the pack answers the shapes that serving can reach: exact, bucket, default, or not at all.

    The shapes come from a capture, each as often as it occurred, or from a server's arguments, each once.

    \b
    Examples:
      kgen coverage --layout h8_p1 --max-running-requests 32 --speculative-num-draft-tokens 16 --context-length 65536
      kgen coverage --capture capture.jsonl --most-default 5
      kgen coverage --capture capture.jsonl --pack my_pack --target sm_120 --json

    Shapes and shares go to stdout. Exits 1 where --most-default is exceeded, so it can guard a deployment.
    """
    from kgen.runtime.pack_reader import load_pack
    from kgen.workload import reachable_shapes, read_capture

    if (capture is None) == (layout is None):
        raise InputError("coverage", "needs shapes", remedy="give either --capture FILE or --layout NAME")
    if capture is not None:
        shapes = read_capture(capture, FAMILY)
    else:
        assert layout is not None
        shapes = Counter(reachable_shapes(layout, most_batch=batch, nodes=nodes, most_prefix=context))
    asked = load_pack(pack or shipped_pack(FAMILY))
    dispatcher = asked.dispatcher()
    answers = {shape: _answer(dispatcher, target, shape) for shape in shapes}
    shares = _shares(shapes, answers)
    if json:
        write_json({"pack": asked.where, "target": target, "shares_percent": shares, "shapes": _rows(shapes, answers)})
    else:
        _print(asked.where, target, shapes, answers, shares)
    uncovered = shares.get("default", 0.0) + shares.get("none", 0.0)
    if most_default is not None and uncovered > most_default:
        raise typer.Exit(1)


def _answer(dispatcher: Dispatcher, target: str, shape: Shape) -> Match | str:
    """How the pack matches a shape, or why it has no kernel for it."""
    try:
        table = dispatcher.table(target, shape.layout)
    except LayoutMissingError:
        return f"no head layout {shape.layout}"
    return table.lookup(shape.as_point())


def _how(answer: Match | str) -> str:
    return "none" if isinstance(answer, str) else answer.how


def _shares(shapes: Counter[Shape], answers: dict[Shape, Match | str]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for shape, count in shapes.items():
        counts[_how(answers[shape])] += count
    return {how: round(100 * counts[how] / shapes.total(), 2) for how in ("exact", "bucket", "default", "none")}


def _rows(shapes: Counter[Shape], answers: dict[Shape, Match | str]) -> list[dict[str, object]]:
    """One a shape, the most frequent first."""
    rows: list[dict[str, object]] = []
    for shape, count in shapes.most_common():
        answer = answers[shape]
        found = {"match": "none", "reason": answer, "variant": "", "evidence": ""}
        if not isinstance(answer, str):
            found = {
                "match": answer.how,
                "reason": answer.reason,
                "variant": answer.variant,
                "evidence": answer.evidence,
            }
        rows.append({"layout": shape.layout, **shape.as_point(), "count": count, **found})
    return rows


def _print(
    where: str, target: str, shapes: Counter[Shape], answers: dict[Shape, Match | str], shares: dict[str, float]
) -> None:
    rows = _rows(shapes, answers)
    columns = list(rows[0])
    shown = [[row[name] or "-" for name in columns] for row in rows[:MOST_ROWS]]
    write_table(columns, shown, title=f"{len(shown)} of {len(rows)} shapes, asked of {where} for {target}")
    typer.echo("")
    typer.echo("share of calls: " + ", ".join(f"{how} {share:.1f} %" for how, share in shares.items()))
