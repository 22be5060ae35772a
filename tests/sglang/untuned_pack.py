"""A pack in memory, made from the spec: the default and the oracle of some layouts, nothing tuned, no cubins."""

from __future__ import annotations

import hashlib

from kgen.family import Candidate
from kgen.render import render
from kgen.resources import SPECS
from kgen.runtime.manifest import (
    SCHEMA,
    Manifest,
    PackedArch,
    PackedKernel,
    PackedLayout,
    PackedSource,
    PackedTarget,
    PackedVariant,
    Proof,
    SpecRef,
    source_path,
)
from kgen.runtime.pack_reader import Pack
from kgen.spec import load_spec


def untuned_pack(*layouts: str) -> Pack:
    """For the emulator: layouts of one dtype, which share their two sources."""
    spec = load_spec(SPECS / "verify_mla.yaml")
    files: dict[str, bytes] = {}
    sources: dict[str, PackedSource] = {}
    variants: dict[str, PackedVariant] = {}
    candidates: dict[str, Candidate] = {"default": spec.default, "oracle": spec.oracle}
    for role, candidate in candidates.items():
        layout = spec.layout(layouts[0])
        source = render(spec.family, candidate, layout)
        data = files[source_path(source.name)] = source.text.encode()
        kernels = tuple(
            PackedKernel(k.entry, k.threads, k.shared_bytes) for k in spec.family.kernels(candidate, layout)
        )
        sources[source.name] = PackedSource(hashlib.sha256(data).hexdigest(), kernels, {})
        proofs = {name: Proof("emulator", 1e-3) for name in layouts}
        variants[role] = PackedVariant(role, role, source.name, dict(candidate), proofs)  # type: ignore[arg-type]
    axes = dict(spec.workload.axes)
    tables = {name: PackedLayout(dict(spec.layout(name)), axes, "default", "oracle", ()) for name in layouts}
    manifest = Manifest(
        schema=SCHEMA,
        family=spec.family.name,
        interface=spec.family.interface,
        kgen_version="1",
        spec=SpecRef(spec.family.name, spec.sha256),
        tolerances={},
        archs={"sm_120": PackedArch("none", (), "580.65", (13, 0))},
        targets={"sm_120": PackedTarget("sm_120", 188, 101376)},
        sources=sources,
        variants=variants,
        dispatch={"sm_120": tables},
    )
    return Pack(manifest, files, "untuned")
