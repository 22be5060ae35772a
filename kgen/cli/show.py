"""``kgen show``: what the tuning database and the spaces hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, write_json, write_table
from kgen.cli.options import (
    DEFAULT_SPEC,
    DEFAULT_TARGET,
    DatabaseFlag,
    LayoutsFlag,
    SpecFlag,
    TargetFlag,
    database_url,
    load,
    shipped_pack,
)
from kgen.errors import InputError

if TYPE_CHECKING:
    from kgen.db import TuningDatabase
    from kgen.db.winners import Winner
    from kgen.records import TrialRecord
    from kgen.spec import Spec

app = typer.Typer(no_args_is_help=True, help="Show what the database and the spaces hold.")


@app.command()
def winners(
    spec: SpecFlag = DEFAULT_SPEC,
    target: TargetFlag = DEFAULT_TARGET,
    layout: LayoutsFlag = None,
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Also candidates that were never proven right, as the model sees them.")
    ] = False,
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show the winner of each head layout and workload point, its time, and what that time is worth.

    \b
    Examples:
      kgen show winners --target sm_120 --layout h8_p1
      kgen show winners --db tuning_db/tuning.sqlite --json

    One row a point goes to stdout. Nothing is compiled or timed.
    """
    from kgen.db.winners import winners as query

    loaded = load(spec)
    chip = loaded.target(target)
    names = [name for name in layout or loaded.layouts if loaded.layout(name)]
    with _open(db) as database:
        found = [
            winner
            for name in names
            for winner in query(
                database,
                family=loaded.family.name,
                target=target,
                layout=loaded.layout(name),
                arch=chip.nvcc_arch,
                sources=None if unproven else _proven_sources(database, loaded, name),
            )
        ]
    if json:
        write_json({"target": target, "winners": found})
        return
    _print_winners(found, loaded)
    if not found:
        typer.echo(f"no winners for {target} yet; run: kgen tune --spec {spec} --target {target}")


def _proven_sources(database: TuningDatabase, spec: Spec, layout_name: str) -> set[str]:
    """The digests of the sources that some trial of the layout proved right."""
    found = database.trials(family=spec.family.name, layout=spec.layout(layout_name), status="ok")
    return {record.source_sha256 for record in found if record.checked_on}


@app.command()
def trials(
    layout: LayoutsFlag = None,
    target: Annotated[str | None, typer.Option("--target", metavar="NAME", help="Only this target.")] = None,
    status: Annotated[str | None, typer.Option("--status", metavar="STATUS", help="Only this outcome.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="Only the latest N.")] = 20,
    db: DatabaseFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show the latest trials, failures too, with the reason of each failure.

    \b
    Examples:
      kgen show trials --last 5
      kgen show trials --status compile_error --layout h128_p1

    One row a trial goes to stdout, latest last.
    """
    with _open(db) as database:
        found = [
            record
            for record in database.trials()
            if (target in {None, record.target}) and (status in {None, record.status})
            and (not layout or record.layout_name in layout)
        ][-last:]  # fmt: skip
    if json:
        write_json({"trials": found})
        return
    columns = ["created", "target", "layout", "source", "status", "evidence", "registers", "shared (B)", "reason"]
    write_table(columns, [_trial_row(record) for record in found])


@app.command()
def summary(db: DatabaseFlag = None, json: JsonFlag = False) -> None:
    """Show how many trials the tuning database has, by target, layout, evidence and status.

    \b
    Examples:
      kgen show summary
      kgen show summary --db sqlite:///tuning_db/tuning.sqlite --json

    Counts go to stdout.
    """
    with _open(db) as database:
        records = database.trials()
        where = database.where
    counts = Counter((item.target, item.layout_name, item.evidence, item.status) for item in records)
    rows = [(*key, count) for key, count in sorted(counts.items())]
    columns = ["target", "layout", "evidence", "status", "trials"]
    if json:
        write_json({"db": where, "counts": [dict(zip(columns, row, strict=True)) for row in rows]})
        return
    typer.echo(f"{where}: {len(records)} trials")
    write_table(columns, rows)


@app.command()
def space(
    spec: SpecFlag = DEFAULT_SPEC,
    target: TargetFlag = DEFAULT_TARGET,
    layout: LayoutsFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show how many candidates are feasible, and which rules reject the others.

    \b
    Examples:
      kgen show space --spec verify_mla.yaml --target sm_120 --layout h8_p1
      kgen show space --target sm_90 --json

    Counts go to stdout; with --json, the feasible candidates too.
    """
    from kgen.space import enumerate_space

    loaded = load(spec)
    chip = loaded.target(target)
    spaces = [enumerate_space(loaded, name, chip) for name in layout or loaded.layouts]
    if json:
        write_json({"target": target, "spaces": spaces})
        return
    write_table(["layout", "feasible", "rejected", "of"],
                [(item.layout_name, len(item.candidates), item.total - len(item.candidates), item.total)
                 for item in spaces], title=f"{loaded.label} on {target}")  # fmt: skip
    rules: Counter[str] = Counter()
    for item in spaces:
        rules.update(item.rejected)
    typer.echo("")
    write_table(["rule that rejects, first one broken", "combinations"], rules.most_common())


@app.command("rejected")
def rejected_command(db: DatabaseFlag = None, json: JsonFlag = False) -> None:
    """Show the sources that were put out of the running by hand, and why.

    \b
    Examples:
      kgen show rejected
      kgen show rejected --db mine.sqlite --json

    One row a source goes to stdout; kgen db reject SOURCE --undo takes one back.
    """
    from kgen.db.reject import rejected

    with _open(db) as database:
        found = sorted(rejected(database).values(), key=lambda item: item.source_name)
    if json:
        write_json({"rejected": found})
        return
    write_table(["source", "since", "reason"], [(item.source_name, item.created_at, item.reason) for item in found])


@app.command()
def resources(
    spec: SpecFlag = DEFAULT_SPEC,
    pack: Annotated[
        Path | None, typer.Option("--pack", metavar="DIR", help="Pack to look into. Default: the one that kgen ships.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a page for the docs here instead.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what each kernel of a pack takes of a chip, its hot loop, and what the model expects of it.

    Registers, shared bytes, spills and resident blocks are the pack's; the mix of instructions comes from the machine
    code, through nvdisasm (of a CUDA toolkit, or pip install 'kgen[disasm]'). Nothing is timed: what the model says is
    labelled modelled.

    \b
    Examples:
      kgen show resources
      kgen show resources --pack my_pack --json
      kgen show resources --markdown docs/resources.md

    A row a kernel and target goes to stdout, or a page to --markdown.
    """
    from kgen.build.disassemble import find_nvdisasm
    from kgen.pack.resources import markdown_page, resource_rows, resource_table
    from kgen.runtime.pack_reader import load_pack

    loaded = load(spec)
    frozen = load_pack(pack or shipped_pack(loaded.family.name))
    frozen.require_interface(loaded.family.interface)
    rows = resource_rows(loaded, frozen, find_nvdisasm())
    if markdown is not None:
        try:
            markdown.write_text(markdown_page(loaded, frozen, rows), encoding="utf-8")
        except OSError as error:
            raise InputError("--markdown", f"{markdown} cannot be written", seen=str(error.strerror)) from error
    if json:
        write_json({"pack": frozen.where, "rows": rows})
    elif markdown is None:
        columns, cells = resource_table(rows)
        mix = columns.index("hot loop")
        write_table(columns[:mix], [row[:mix] for row in cells], title=frozen.where)
        typer.echo("\ninstructions of the hot loop, by kind")
        write_table([*columns[:3], *columns[mix:]], [(*row[:3], *row[mix:]) for row in cells])


def _open(db: str | None) -> TuningDatabase:
    from kgen.db import TuningDatabase

    return TuningDatabase.open(database_url(db), read_only=True)


def _trial_row(record: TrialRecord) -> Sequence[object]:
    numbers = ["-" if value is None else value for value in (record.registers, record.shared_bytes)]
    return (record.created_at, record.target, record.layout_name, record.source_name, record.status,
            record.evidence, *numbers, record.reason.partition("\n")[0] or "-")  # fmt: skip


def _print_winners(found: Sequence[Winner], spec: Spec) -> None:
    rows = [
        (
            winner.layout_name,
            *(winner.point[axis] for axis in spec.family.axes),
            spec.family.label(winner.candidate),
            f"{winner.time_us:.1f}",
            winner.evidence,
            winner.checked_on or "no",
        )
        for winner in found
    ]
    write_table(["layout", *spec.family.axes, "variant", "time (us)", "evidence", "proven on"], rows)
