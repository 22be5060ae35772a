"""``kgen emit`` and ``kgen pack``: winners frozen into a folder, and that folder proven again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, progress, write_json
from kgen.cli.options import (
    DEFAULT_SPEC,
    DatabaseFlag,
    JobsFlag,
    LayoutsFlag,
    SpecFlag,
    database_url,
    load,
    own_pack,
)
from kgen.resources import cache_dir

if TYPE_CHECKING:
    from kgen.build.toolchain import Toolchain
    from kgen.db import TuningDatabase
    from kgen.spec import Spec

app = typer.Typer(no_args_is_help=True, help="Verify kernel packs.")


def emit(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder to write: new, empty, or a pack to replace. Default: generated/packs/<family>.",
        ),
    ] = None,
    spec: SpecFlag = DEFAULT_SPEC,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="NAME", help="Target to pack; may be repeated. Default: every tuned one."),
    ] = None,
    layout: LayoutsFlag = None,
    db: DatabaseFlag = None,
    jobs: JobsFlag = 2,
    json: JsonFlag = False,
) -> None:
    """Freeze the winners of the database into a pack.

    A pack is a folder: manifest with the dispatch table, sources, cubins. Only kernels that were proven right are
    packed, each layout's default and oracle with them; what lacks a proof is proven first. The same database and
    compiler write the same bytes.

    \b
    Examples:
      kgen emit --out my_pack
      kgen emit --out my_pack --target sm_120 --layout h8_p1 --db mine.sqlite --json

    The pack goes to --out, a line about each part to stdout.
    """
    from kgen.db import TuningDatabase
    from kgen.pack import emit as emit_pack

    loaded = load(spec)
    for name in target or ():
        loaded.target(name)
    for name in layout or ():
        loaded.layout(name)
    with TuningDatabase.open(database_url(db), read_only=True) as database, progress("proofs") as advance:
        targets = target or _tuned(loaded, database)
        report = emit_pack(
            loaded,
            database,
            targets,
            out or own_pack(loaded.family.name),
            toolchain=_toolchain_for(loaded, targets),
            cache_dir=cache_dir(),
            jobs=jobs,
            layouts=layout,
            on_proof=advance,
        )
    if json:
        write_json(report)
        return
    for arch, sources in report.sources_by_arch.items():
        typer.echo(f"{arch}: {sources} sources")
    typer.echo(f"{report.variants} variants for {len(report.layouts)} layouts on {', '.join(report.targets)}, "
               f"{len(report.proven_now)} of them proven now")  # fmt: skip
    for name in report.untuned:
        typer.echo(f"untuned, default only: {name}")
    typer.echo(f"{report.out}: {report.size_bytes / 1e6:.1f} MB; next: kgen pack verify {report.out}")


def _tuned(spec: Spec, database: TuningDatabase) -> list[str]:
    """The spec's targets that any trial was made for; the first one, for its error, where there is none."""
    trials = database.trials(family=spec.family.name)
    tuned = {record.target for record in trials} | {record.envelope for record in trials}  # a proxy for the envelope
    return [name for name in spec.targets if name in tuned] or list(spec.targets)[:1]


def _toolchain_for(spec: Spec, targets: Sequence[str]) -> Toolchain:
    """One toolchain that builds for all of the targets."""
    from kgen.build.toolchain import find_toolchain

    toolchain = find_toolchain(spec.target(targets[0]).nvcc_arch)
    for name in targets[1:]:
        toolchain.require(spec.target(name).nvcc_arch)
    return toolchain


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The pack.")],
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also compile every source again and compare the cubins' bytes.")
    ] = False,
    fail_if_stale: Annotated[
        bool,
        typer.Option(
            "--fail-if-stale",
            help="Also fail where spec, templates or --db make another pack, or it is not rebuilt.",
        ),
    ] = False,
    db: Annotated[
        str | None, typer.Option("--db", metavar="URL", help="Tuning database whose winners the pack should have.")
    ] = None,
    jobs: JobsFlag = 2,
    json: JsonFlag = False,
) -> None:
    """Recompute everything that a pack claims.

    Digests, every answer of the dispatch table, every source from its template and, with --rebuild, every cubin, where
    the compiler is the one that the pack records. A damaged, missing or foreign file is named, and exits 2; a claim
    that does not hold exits 1.

    \b
    Examples:
      kgen pack verify generated/pack/verify_mla
      kgen pack verify my_pack --rebuild --fail-if-stale --json

    Findings go to stdout. Nothing is changed.
    """
    from kgen.build.toolchain import find_toolchain
    from kgen.db import TuningDatabase
    from kgen.pack import verify_pack

    toolchain = find_toolchain() if rebuild else None
    with ExitStack() as stack:
        database = stack.enter_context(TuningDatabase.open(database_url(db), read_only=True)) if db else None
        report = verify_pack(folder, rebuild=rebuild, toolchain=toolchain, jobs=jobs, db=database)
    ok = report.ok and not (fail_if_stale and (report.stale or report.not_rebuilt))
    if json:
        write_json({"ok": ok, "report": report})
    else:
        typer.echo(f"{report.where}: {report.files} files, {report.answers} answers of the dispatch table")
        for label, lines in (("WRONG", report.problems), ("stale", report.stale), ("not rebuilt", report.not_rebuilt)):
            for line in lines:
                typer.echo(f"{label}: {line}")
        typer.echo(f"{report.rebuilt} cubins compiled again and equal" if rebuild else "cubins not compiled again")
        typer.echo("ok" if ok else "not ok")
    if not ok:
        raise typer.Exit(1)
