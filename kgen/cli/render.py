"""``kgen render``: one candidate as CUDA source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.console import JsonFlag, note, write_json
from kgen.cli.options import DEFAULT_SPEC, DEFAULT_TARGET, LayoutFlag, SpecFlag, TargetFlag, load, settings
from kgen.errors import InputError, KgenError

if TYPE_CHECKING:
    from kgen.render import Source


def render(
    spec: SpecFlag = DEFAULT_SPEC,
    layout: LayoutFlag = "h8_p1",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change one tunable of the default candidate; repeatable."),
    ] = None,
    target: TargetFlag = DEFAULT_TARGET,
    default: Annotated[
        bool, typer.Option("--default", help="The spec's default candidate (this is the default).")
    ] = False,
    oracle: Annotated[bool, typer.Option("--oracle", help="The spec's naive candidate.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write there instead of to stdout.")] = None,
    json: JsonFlag = False,
) -> None:
    """Print the CUDA source of one candidate.

    It is the text that is hashed, packed and compiled: every <kgen/...> header is inlined, and no path or date is in
    it. It compiles with nvcc alone. A candidate that does not fit --target is refused, with the rule that it breaks.

    \b
    Examples:
      kgen render --spec verify_mla.yaml --layout h8_p1 --set tile_m=32
      kgen render --layout h16_p64 --oracle --out oracle.cu

    The source goes to stdout or to --out; with --json, a document with its name, sha256 and kernels.
    """
    from kgen.render import render as render_source
    from kgen.space import check_candidate

    if oracle and (default or setting):
        raise InputError("--oracle", "excludes --default and --set", remedy="leave one of them out")
    loaded = load(spec)
    candidate = loaded.oracle if oracle else settings(loaded, loaded.default, setting or [])
    check_candidate(loaded, candidate, layout, loaded.target(target))
    source = render_source(loaded.family, candidate, loaded.layout(layout))
    if out is not None:
        _write(out, source)
    if json:
        write_json(
            {"name": source.name, "sha256": source.sha256, "entries": source.entries, "candidate": candidate}
            | ({"path": out} if out else {"text": source.text})
        )
    elif out is None:
        typer.echo(source.text, nl=False)


def _write(path: Path, source: Source) -> None:
    try:
        path.write_text(source.text, encoding="utf-8")
    except OSError as error:
        raise KgenError(str(path), "cannot be written", seen=error.strerror or str(error)) from None
    note(f"{source.name} -> {path}")
