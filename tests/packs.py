"""Packs made of invented sources and cubins: for tests of the format and of dispatch, where nothing is launched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product

from kgen.family import families
from kgen.runtime.manifest import (
    SCHEMA,
    Manifest,
    PackedArch,
    PackedBucket,
    PackedCubin,
    PackedKernel,
    PackedLayout,
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

ARCHS = {"sm_120": PackedArch("nvcc 13.0.88", ("-cubin",), "580.65", (13, 0)),
         "sm_90": PackedArch("nvcc 13.0.88", ("-cubin",), "580.65", (13, 0))}  # fmt: skip
LAYOUT: dict[str, int | str] = {
    "heads": 8,
    "latent": 512,
    "rope": 64,
    "dtype": "bf16",
    "page_size": 1,
    "scale_dim": 192,
}
GRID: dict[str, tuple[int, ...]] = {"batch": (1, 4, 16), "nodes": (1, 8, 64), "prefix": (4096, 65536)}
NAMES = ("default", "oracle", "fast", "wide")


def table(
    axes: Mapping[str, tuple[int, ...]] = GRID,
    layout: Mapping[str, int | str] = LAYOUT,
    winners: Sequence[str] = ("fast", "wide"),
    leave_out: Sequence[tuple[int, ...]] = (),
) -> PackedLayout:
    """A table over the whole grid but ``leave_out``; winners take turns."""
    points = [point for point in product(*axes.values()) if point not in leave_out]
    buckets = tuple(
        PackedBucket(dict(zip(axes, point, strict=True)), winners[i % len(winners)], "measured", 10.0 + i, ())
        for i, point in enumerate(points)
    )
    return PackedLayout(layout, axes, "default", "oracle", buckets)


def invented_pack(layouts: Mapping[str, PackedLayout] | None = None) -> Pack:
    """Two targets, two layouts, four variants of four sources; equal every time."""
    tables = layouts or {"h8_p1": table(), "h16_p1": table(layout={**LAYOUT, "heads": 16})}
    files: dict[str, bytes] = {}
    sources, variants = {}, {}
    for name in NAMES:
        source = f"demo__{name}"
        files[source_path(source)] = f"// {name}\n".encode()
        cubins = {}
        for arch in ARCHS:
            data = files[cubin_path(arch, source)] = f"{name}_kernel {arch}".encode()
            cubins[arch] = PackedCubin(
                hashlib.sha256(data).hexdigest(), 1, {f"{name}_kernel": PackedResources(128, 0, 0)}
            )
        digest = hashlib.sha256(files[source_path(source)]).hexdigest()
        sources[source] = PackedSource(digest, (PackedKernel(f"{name}_kernel", 256, 1024),), cubins)
        proofs = {layout: Proof("emulator", 1.5e-3) for layout in tables}
        role = "default" if name == "default" else "oracle" if name == "oracle" else "tuned"
        variants[name] = PackedVariant(role, name, source, {"tile_m": 64}, proofs)  # type: ignore[arg-type]
    manifest = Manifest(
        schema=SCHEMA,
        family="verify_mla",
        interface=families()["verify_mla"].interface,
        kgen_version="1",
        spec=SpecRef("verify_mla", "0" * 64),
        tolerances={"out": PackedTolerance(5e-3, 0.05)},
        archs=ARCHS,
        targets={"sm_120": PackedTarget("sm_120", 188, 101376), "sm_90": PackedTarget("sm_90", 132, 232448)},
        sources=sources,
        variants=variants,
        dispatch={"sm_120": tables, "sm_90": tables},
    )
    return Pack(manifest, files, "invented")
