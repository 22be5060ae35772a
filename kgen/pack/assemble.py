"""From the tuning database to a frozen pack: select the winners, prove what is not proven, build, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kgen
from kgen.build import NVCC_FLAGS, BuildResult, build
from kgen.build.toolchain import Toolchain
from kgen.db import TuningDatabase
from kgen.device.cuda_driver import cubin_needs
from kgen.errors import BuildError, ValidationError
from kgen.family import Kernel
from kgen.pack.select import Selection, Variant
from kgen.pack.writer import write_pack
from kgen.runtime.manifest import (
    SCHEMA,
    Manifest,
    PackedArch,
    PackedCubin,
    PackedKernel,
    PackedResources,
    PackedSource,
    PackedTarget,
    PackedTolerance,
    PackedVariant,
    Proof,
    SpecRef,
    cubin_path,
    source_path,
)
from kgen.runtime.pack_reader import Pack
from kgen.spec import Spec
from kgen.targets import Target
from kgen.validate import validate_in_emulator

OnProof = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EmitReport:
    """What was packed: distinct sources by arch, variants in all, those proven now, layouts without any winner."""

    out: Path
    targets: tuple[str, ...]
    layouts: tuple[str, ...]
    sources_by_arch: dict[str, int]
    variants: int
    proven_now: tuple[str, ...]
    untuned: tuple[str, ...]
    size_bytes: int


def emit(
    spec: Spec,
    db: TuningDatabase,
    targets: Sequence[str],
    out: Path,
    *,
    toolchain: Toolchain,
    cache_dir: Path,
    jobs: int,
    layouts: Sequence[str] | None = None,
    on_proof: OnProof | None = None,
) -> EmitReport:
    """Write the pack of a spec's winners for some targets (and layouts; all of them by default) to ``out``.

    Variants without a proof for a layout are proven in the emulator first; ``on_proof`` is told how many of how many
    are done, and which is next. Raises InputError where a target was never tuned, ValidationError for a variant that
    is wrong, BuildError for one that does not compile, and PackError if ``out`` cannot be written.
    """
    names = tuple(layouts or spec.layouts)
    selection = select(spec, db, targets, names)
    pack, proven_now = freeze(selection, toolchain, cache_dir, jobs, on_proof)
    write_pack(out, pack)
    tables = selection.tables
    return EmitReport(
        out=out,
        targets=tuple(targets),
        layouts=names,
        sources_by_arch={
            arch: sum(arch in source.cubins for source in pack.manifest.sources.values())
            for arch in pack.manifest.archs
        },
        variants=len(selection.variants),
        proven_now=tuple(proven_now),
        untuned=tuple(f"{t} {name}" for t in tables for name, table in tables[t].items() if not table.buckets),
        size_bytes=sum(len(data) for data in pack.files.values()),
    )


def select(spec: Spec, db: TuningDatabase, targets: Sequence[str], layouts: Sequence[str]) -> Selection:
    """The variants and tables for some targets and layouts."""
    selection = Selection(spec, db)
    for target in targets:
        selection.add_target(target, layouts)
    return selection


def pack_from_database(spec: Spec, url: str, targets: Sequence[str], layouts: Sequence[str] | None = None) -> Pack:
    """What `emit` would pack today, without cubins: nothing is built or proven. It explains, and runs on the CPU."""
    with TuningDatabase.open(url, create=False, read_only=True) as db:
        selection = select(spec, db, targets, tuple(layouts or spec.layouts))
    return _assemble(selection, {}, {}, url)


def freeze(
    selection: Selection, toolchain: Toolchain, cache_dir: Path, jobs: int, on_proof: OnProof | None = None
) -> tuple[Pack, list[str]]:
    """The selection as a pack in memory, complete and ready to prepare; and what had to be proven for it."""
    built = _build(selection, toolchain, cache_dir, jobs)
    proven_now = _prove(selection, built, toolchain, cache_dir, on_proof)
    archs = {arch: packed_arch(arch, toolchain) for arch in built}
    return _assemble(selection, built, archs, selection.spec.label), proven_now


def _assemble(
    selection: Selection, built: dict[str, dict[str, BuildResult]], archs: dict[str, PackedArch], where: str
) -> Pack:
    files = {source_path(variant.source.name): variant.source.text.encode() for variant in selection.variants.values()}
    for arch, results in built.items():
        for name, result in results.items():
            assert result.path is not None
            files[cubin_path(arch, name)] = result.path.read_bytes()
    return Pack(_manifest(selection, built, archs), files, where)


def packed_arch(arch: str, toolchain: Toolchain) -> PackedArch:
    """How this toolchain builds for ``arch``, and the smallest driver for its cubins."""
    cuda, driver = cubin_needs(arch, toolchain.nvcc_version)
    return PackedArch(toolchain.nvcc_fingerprint, NVCC_FLAGS, driver, cuda)


def _build(selection: Selection, toolchain: Toolchain, cache_dir: Path, jobs: int) -> dict[str, dict[str, BuildResult]]:
    """Arch -> source name -> result, each one ok."""
    sources: dict[str, dict[str, Variant]] = {}
    for variant in selection.variants.values():
        for target in variant.targets.values():
            sources.setdefault(target.nvcc_arch, {})[variant.source.name] = variant
    built = {}
    for arch, variants in sources.items():
        texts = [variant.source for variant in variants.values()]
        results = build(texts, arch=arch, toolchain=toolchain, cache_dir=cache_dir, jobs=jobs)
        for result in results:
            if result.status != "ok":
                raise BuildError(result.source.name, f"does not build for {arch}: {result.status}", seen=result.reason)
        built[arch] = {result.source.name: result for result in results}
    return built


def _prove(
    selection: Selection,
    built: dict[str, dict[str, BuildResult]],
    toolchain: Toolchain,
    cache_dir: Path,
    on_proof: OnProof | None,
) -> list[str]:
    """Prove what has no proof yet, in the emulator; returns what was proven, as ``variant layout``."""
    spec, done = selection.spec, []
    for number, (name, layout_name, target_name) in enumerate(selection.unproven):
        if on_proof is not None:
            on_proof(number, len(selection.unproven), f"{name} {layout_name}")
        variant, layout, target = selection.variants[name], spec.layout(layout_name), spec.target(target_name)
        main = spec.family.kernels(variant.candidate, layout)[0]
        result = built[target.nvcc_arch][variant.source.name]
        verdict = validate_in_emulator(
            variant.source,
            spec.family,
            variant.candidate,
            layout,
            spec.tolerances,
            toolchain=toolchain,
            cache_dir=cache_dir,
            target_sms=target.sms,
            resident_blocks=_resident_blocks(result, target, main),
        )
        if not verdict.ok or verdict.worst is None:
            raise ValidationError(f"{name} for {layout_name}", "is wrong, so it is not packed", seen=verdict.reason)
        variant.proofs[layout_name] = Proof("emulator", float(verdict.worst.relative_l2))
        done.append(f"{name} {layout_name}")
    return done


def _manifest(selection: Selection, built: dict[str, dict[str, BuildResult]], archs: dict[str, PackedArch]) -> Manifest:
    spec = selection.spec
    targets = {name: spec.target(name) for name in selection.tables}
    return Manifest(
        schema=SCHEMA,
        family=spec.family.name,
        interface=spec.family.interface,
        kgen_version=kgen.__version__,
        spec=SpecRef(spec.path.stem, spec.sha256),
        tolerances={
            name: PackedTolerance(float(item.relative_l2), float(item.max_abs))
            for name, item in spec.tolerances.items()
        },
        archs=archs,
        targets={
            name: PackedTarget(target.nvcc_arch, target.sms, target.shared_bytes_per_block)
            for name, target in targets.items()
        },
        sources={variant.source.name: _source(selection, variant, built) for variant in selection.variants.values()},
        variants={
            variant.name: PackedVariant(
                variant.role,
                spec.family.label(variant.candidate),
                variant.source.name,
                dict(variant.candidate),
                dict(variant.proofs),
            )
            for variant in selection.variants.values()
        },
        dispatch=selection.tables,
    )


def _source(selection: Selection, variant: Variant, built: dict[str, dict[str, BuildResult]]) -> PackedSource:
    """A packed source; its kernels are the same for every layout, as the source is."""
    layout = selection.spec.layout(next(iter(variant.proofs)))
    kernels = tuple(
        PackedKernel(kernel.entry, kernel.threads, kernel.shared_bytes)
        for kernel in selection.spec.family.kernels(variant.candidate, layout)
    )
    sharing = [other for other in selection.variants.values() if other.source.name == variant.source.name]
    targets = {target.nvcc_arch: target for other in sharing for target in other.targets.values()}
    cubins = {
        arch: _cubin(results[variant.source.name], targets[arch], kernels, _timed_blocks(sharing, arch))
        for arch, results in built.items()
        if variant.source.name in results
    }
    return PackedSource(variant.source.sha256, kernels, cubins)


def _timed_blocks(sharing: Sequence[Variant], arch: str) -> int | None:
    """The fewest blocks that an SM held when a winner among these variants was timed; None where none was."""
    return min((variant.timed_blocks[arch] for variant in sharing if arch in variant.timed_blocks), default=None)


def _cubin(
    result: BuildResult, target: Target, kernels: tuple[PackedKernel, ...], timed_blocks: int | None
) -> PackedCubin:
    """A packed cubin. Its launches are planned for no more blocks an SM than it was timed with."""
    resources = {
        entry: PackedResources(item.registers, item.static_shared_bytes, item.spill_store_bytes + item.spill_load_bytes)
        for entry, item in result.resources.items()
    }
    blocks = _resident_blocks(result, target, kernels[0])
    return PackedCubin(result.sha256, min(blocks, timed_blocks or blocks), resources)


def _resident_blocks(result: BuildResult, target: Target, main: Kernel | PackedKernel) -> int:
    """How many blocks of the main kernel one SM of the target holds. BuildError if none."""
    taken = result.resources[main.entry]
    shared_bytes = main.shared_bytes + taken.static_shared_bytes
    blocks = target.resident_blocks(threads=main.threads, registers=taken.registers, shared_bytes=shared_bytes)
    if blocks == 0:
        seen = f"{main.threads} threads, {taken.registers} registers, {shared_bytes} shared bytes"
        raise BuildError(result.source.name, f"does not fit one SM of {target.name}", seen=seen)
    return blocks
