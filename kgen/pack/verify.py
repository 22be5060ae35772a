"""Checks a pack from the outside: every digest, every file, every answer, and whether it could be made again today."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.build import build
from kgen.build.toolchain import Toolchain
from kgen.db import TuningDatabase
from kgen.errors import KgenError, PackError
from kgen.family import find_family
from kgen.pack.assemble import select
from kgen.pack.writer import foreign_files
from kgen.render import Source, render
from kgen.resources import find_spec
from kgen.runtime.manifest import Manifest, Value
from kgen.runtime.pack_reader import Pack, load_pack
from kgen.spec import Spec, load_spec


@dataclass(frozen=True)
class VerifyReport:
    """What was checked.

    ``problems`` make the pack unfit. ``stale`` says how it differs from today's templates and spec, ``not_rebuilt`` why
    an arch's cubins were not compiled again.
    """

    where: str
    files: int
    answers: int
    rebuilt: int
    problems: tuple[str, ...]
    stale: tuple[str, ...]
    not_rebuilt: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the pack is what it says. A stale one is."""
        return not self.problems


def verify_pack(
    path: Path,
    *,
    rebuild: bool = False,
    toolchain: Toolchain | None = None,
    jobs: int = 1,
    db: TuningDatabase | None = None,
) -> VerifyReport:
    """Check the pack in a folder.

    Every digest is recomputed, every tuned point is dispatched again, every variant is rendered again, and with
    ``rebuild`` every source is compiled again by ``toolchain`` and compared bit for bit, where the pack was built with
    the same nvcc. ``db`` is a database whose winners the pack should have. Raises PackError that names a damaged,
    missing or foreign file.
    """
    pack = load_pack(path)
    pack.require_interface(find_family(pack.manifest.family, str(path)).interface)
    foreign = foreign_files(path, set(pack.manifest.files()))
    if foreign:
        raise PackError(str(path / foreign[0]), "is no part of the pack", remedy="remove it, or emit the pack again")
    answers, problems = _dispatch_again(pack)
    problems += _false_kernels(pack)
    rebuilt, not_rebuilt = 0, []
    if rebuild:
        for arch in pack.manifest.archs:
            reason = _cannot_rebuild(pack, arch, toolchain)
            if reason or toolchain is None:
                not_rebuilt.append(f"{arch}: {reason}")
                continue
            count, different = _rebuild(pack, arch, toolchain, jobs)
            rebuilt += count
            problems += different
    return VerifyReport(
        where=str(path),
        files=len(pack.files) + 2,
        answers=answers,
        rebuilt=rebuilt,
        problems=tuple(problems),
        stale=tuple(_stale_reasons(pack, db)),
        not_rebuilt=tuple(not_rebuilt),
    )


def stale_reasons(path: Path, db: TuningDatabase | None = None) -> list[str]:
    """How a pack differs from what today's spec, templates and tuning database (if given) make, one line each.

    Empty if the pack is up to date. Raises PackError if it is damaged.
    """
    return _stale_reasons(load_pack(path), db)


def _stale_reasons(pack: Pack, db: TuningDatabase | None) -> list[str]:
    try:
        spec = load_spec(find_spec(pack.manifest.spec.name))
        reasons = _stale_sources(pack)
        if spec.sha256 != pack.manifest.spec.sha256:
            reasons.append(f"spec {pack.manifest.spec.name} has changed")
        if db is not None:
            reasons += _stale_tables(pack, spec, db)
    except KgenError as error:
        return [str(error)]
    return reasons


def _stale_tables(pack: Pack, spec: Spec, db: TuningDatabase) -> list[str]:
    reasons = []
    for target, tables in pack.manifest.dispatch.items():
        today = select(spec, db, [target], list(tables)).tables[target]
        reasons += [f"winners of {target} {name} have changed" for name in tables if tables[name] != today[name]]
    return reasons


def _stale_sources(pack: Pack) -> list[str]:
    manifest, reasons = pack.manifest, []
    family = find_family(manifest.family, "manifest.json")
    layouts = _layouts(manifest)
    for name, variant in manifest.variants.items():
        layout: Mapping[str, Value] = layouts[next(iter(variant.proofs))]
        try:
            rendered = render(family, variant.candidate, layout).sha256
        except (KgenError, KeyError, ValueError, ArithmeticError) as error:
            reasons.append(f"variant {name} does not render any more: {error}")
            continue
        if rendered != manifest.sources[variant.source].sha256:
            reasons.append(f"variant {name} renders to another source")
    return reasons


def _dispatch_again(pack: Pack) -> tuple[int, list[str]]:
    """Ask the pack for every tuned point: the answer must be exact and the recorded winner."""
    dispatcher, count, problems = pack.dispatcher(), 0, []
    for target, layouts in pack.manifest.dispatch.items():
        for name, packed in layouts.items():
            table = dispatcher.table(target, name)
            for bucket in packed.buckets:
                count += 1
                match = table.lookup(bucket.point)
                if (match.how, match.variant) != ("exact", bucket.variant):
                    problems.append(f"{target} {name} {dict(bucket.point)}: {match.how} {match.variant}")
    return count, problems


def _layouts(manifest: Manifest) -> dict[str, Mapping[str, Value]]:
    """The fields of every head layout of a pack, by name."""
    return {name: table.layout for tables in manifest.dispatch.values() for name, table in tables.items()}


def _false_kernels(pack: Pack) -> list[str]:
    """Variants whose source is recorded with other kernels or launch shapes than the family gives it."""
    manifest, problems = pack.manifest, []
    family = find_family(manifest.family, "manifest.json")
    layouts = _layouts(manifest)
    for name, variant in manifest.variants.items():
        try:
            kernels = family.kernels(variant.candidate, layouts[next(iter(variant.proofs))])
        except (KeyError, ValueError, ArithmeticError):
            continue  # no candidate of today's family: stale, which _stale_sources says
        recorded = manifest.sources[variant.source].kernels
        if [(k.entry, k.threads, k.shared_bytes) for k in kernels] != [
            (k.entry, k.threads, k.shared_bytes) for k in recorded
        ]:
            problems.append(f"variant {name} is recorded with other kernels than its candidate has")
    return problems


def _cannot_rebuild(pack: Pack, arch: str, toolchain: Toolchain | None) -> str:
    packed = pack.manifest.archs[arch].toolchain
    if toolchain is None:
        return f"no toolchain; built by {packed}"
    if toolchain.nvcc_fingerprint != packed:
        return f"built by {packed}, this is {toolchain.nvcc_fingerprint}"
    return ""


def _rebuild(pack: Pack, arch: str, toolchain: Toolchain, jobs: int) -> tuple[int, list[str]]:
    """Compile an arch's sources from the packed text alone, in an empty cache; name those that come out different."""
    manifest = pack.manifest
    names = [name for name, source in manifest.sources.items() if arch in source.cubins]
    sources = [packed_source(pack, name) for name in names]
    with tempfile.TemporaryDirectory(prefix="kgen-verify.") as folder:
        results = build(sources, arch=arch, toolchain=toolchain, cache_dir=Path(folder), jobs=jobs)
    problems = []
    for name, result in zip(names, results, strict=True):
        if result.sha256 != manifest.sources[name].cubins[arch].sha256:
            problems.append(f"{name} for {arch} compiles to another cubin: {result.reason or result.sha256[:12]}")
    return len(names), problems


def packed_source(pack: Pack, name: str) -> Source:
    """A source as it is in the pack: what is compiled is the text that was hashed, without a line map."""
    packed, text = pack.manifest.sources[name], pack.source_text(name)
    entries = tuple(kernel.entry for kernel in packed.kernels)
    return Source(pack.manifest.family, name, text, text, packed.sha256, entries)
