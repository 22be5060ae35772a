"""The kernels that ``kgen check`` checks: of a spec or of a pack, in the emulator or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.cli.console import progress
from kgen.cli.options import first_gpu, settings
from kgen.errors import InputError
from kgen.resources import cache_dir

if TYPE_CHECKING:
    from kgen.family import Value
    from kgen.render import Source
    from kgen.spec import Spec
    from kgen.validate import Verdict


@dataclass(frozen=True)
class Subject:
    """One kernel to check for one layout; ``cubin`` is empty where only the source is at hand."""

    label: str
    layout_name: str
    candidate: Mapping[str, Value]
    source: Source
    sms: int
    resident_blocks: int
    cubin: bytes = b""


def from_spec(
    spec: Spec, names: Sequence[str], changes: Sequence[str], *, oracle: bool, target: str
) -> Iterator[Subject]:
    """The oracle, or the default candidate with ``NAME=VALUE`` changes, once a layout."""
    from kgen.render import render
    from kgen.space import check_candidate

    chip = spec.target(target)
    candidate = spec.oracle if oracle else settings(spec, spec.default, changes)
    for name in names:
        check_candidate(spec, candidate, name, chip)
        layout = spec.layout(name)
        yield Subject(
            spec.family.label(candidate), name, candidate, render(spec.family, candidate, layout), chip.sms, 1
        )


def from_pack(spec: Spec, path: Path, names: Sequence[str], target: str, device: str) -> Iterator[Subject]:
    """Every variant that the pack's tables name for these layouts, once a layout."""
    from kgen.pack.verify import packed_source
    from kgen.runtime.pack_reader import load_pack

    pack = load_pack(path)
    pack.require_interface(spec.family.interface)
    dispatcher = pack.dispatcher()
    if device == "cuda":
        target = dispatcher.target(*first_gpu())
    elif target not in pack.manifest.dispatch:
        held = ", ".join(pack.manifest.dispatch)
        raise InputError("--target", f"{pack.where} has no such target", seen=repr(target), remedy=f"known: {held}")
    chip = pack.manifest.targets[target]
    for name in names:
        table = dispatcher.table(target, name).packed
        winners = [variant for bucket in table.buckets for variant in (bucket.variant, *bucket.tie)]
        for label in dict.fromkeys([table.default, table.oracle, *winners]):
            variant = pack.manifest.variants[label]
            cubin = pack.manifest.sources[variant.source].cubins[chip.arch]
            source = packed_source(pack, variant.source)
            code = pack.cubin(variant.source, chip.arch)
            yield Subject(label, name, variant.candidate, source, chip.sms, cubin.blocks_per_sm, code)


def run_checks(spec: Spec, subjects: Sequence[Subject], device: str, jobs: int) -> list[Verdict]:
    """Check every subject, on the GPU where ``device`` is ``cuda``; the verdicts are in their order."""
    with progress("check") as advance:
        verdicts = []
        check_one = _checker_on_gpu(spec) if device == "cuda" else _checker_in_emulator(spec, subjects, jobs)
        for number, subject in enumerate(subjects):
            advance(number, len(subjects), f"{subject.layout_name} {subject.label}")
            verdicts.append(check_one(subject))
        advance(len(subjects), len(subjects))
    return verdicts


def _checker_in_emulator(spec: Spec, subjects: Sequence[Subject], jobs: int) -> Callable[[Subject], Verdict]:
    """Compiles all sources at once, then checks one subject at a time."""
    from kgen.build import EMULATOR, build
    from kgen.build.toolchain import find_toolchain
    from kgen.validate import validate_in_emulator

    toolchain = find_toolchain(EMULATOR)
    sources = list({subject.source.sha256: subject.source for subject in subjects}.values())
    build(sources, arch=EMULATOR, toolchain=toolchain, cache_dir=cache_dir(), jobs=jobs)

    def check_one(subject: Subject) -> Verdict:
        return validate_in_emulator(
            subject.source,
            spec.family,
            subject.candidate,
            spec.layout(subject.layout_name),
            spec.tolerances,
            toolchain=toolchain,
            cache_dir=cache_dir(),
            target_sms=subject.sms,
            resident_blocks=subject.resident_blocks,
        )

    return check_one


def _checker_on_gpu(spec: Spec) -> Callable[[Subject], Verdict]:
    from kgen.device import Device
    from kgen.device.envelope import load_kernels
    from kgen.validate import validate
    from kgen.validate.launchers import DeviceLauncher

    device = Device.open(0)

    def check_one(subject: Subject) -> Verdict:
        layout = spec.layout(subject.layout_name)
        loaded = load_kernels(device, subject.cubin, spec.family.kernels(subject.candidate, layout))
        try:
            return validate(
                spec.family,
                subject.candidate,
                layout,
                spec.tolerances,
                DeviceLauncher(device, loaded),
                target_sms=subject.sms,
                resident_blocks=subject.resident_blocks,
            )
        finally:
            loaded.unload()

    return check_one
