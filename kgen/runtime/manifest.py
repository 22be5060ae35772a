"""What a pack's ``manifest.json`` holds, as dataclasses, and the strict codec between the two.

The standard library only: a serving process reads packs with this. docs/pack.md describes the fields for people.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union

from kgen.errors import PackError

SCHEMA = 2
"""Raised when a reader of this version could misread a newer pack."""
MANIFEST_FILE, DIGEST_FILE = "manifest.json", "MANIFEST.sha256"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""What a source, arch or target may be called: such a name is one path component and never a hidden or parent one."""

ARCH = re.compile(r"sm_\d{2,3}[af]?")
"""An architecture that cubins are built for."""

Value = int | str
Role = Literal["tuned", "default", "oracle"]


@dataclass(frozen=True)
class SpecRef:
    """The spec a pack was emitted from: its file name without suffix and the sha256 of its content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class PackedTolerance:
    """What every packed variant was proven within, for one output (see `kgen.family.Tolerance`)."""

    relative_l2: float
    max_abs: float


@dataclass(frozen=True)
class PackedArch:
    """How the cubins of one architecture were built and the oldest driver that loads them.

    ``min_driver`` is NVIDIA's Linux driver version, ``min_cuda`` the CUDA version (major, minor) that it supports.
    """

    toolchain: str
    flags: tuple[str, ...]
    min_driver: str
    min_cuda: tuple[int, ...]


@dataclass(frozen=True)
class PackedTarget:
    """A tuning target: which cubins it runs and the chip that its launch plans were tuned for."""

    arch: str
    sms: int
    shared_bytes_per_block: int


@dataclass(frozen=True)
class PackedKernel:
    """One entry point with its launch shape; ``shared_bytes`` is dynamic shared memory."""

    entry: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class PackedResources:
    """What the compiler says that one entry takes."""

    registers: int
    static_shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class PackedCubin:
    """One source compiled for one arch. ``blocks_per_sm`` is of the first (main) kernel; resources are by entry."""

    sha256: str
    blocks_per_sm: int
    resources: Mapping[str, PackedResources]


@dataclass(frozen=True)
class PackedSource:
    """One rendered source: its digest, its kernels (main one first) and its cubins by arch."""

    sha256: str
    kernels: tuple[PackedKernel, ...]
    cubins: Mapping[str, PackedCubin]


@dataclass(frozen=True)
class Proof:
    """Where a variant was checked against the float64 reference, and its relative L2 error there."""

    checked_on: str
    relative_error: float | None


@dataclass(frozen=True)
class PackedVariant:
    """One candidate: all its parameters, the source they render to, and its proofs by layout name."""

    role: Role
    label: str
    source: str
    candidate: Mapping[str, Value]
    proofs: Mapping[str, Proof]


@dataclass(frozen=True)
class PackedBucket:
    """One tuned workload point and its winner. ``tie`` names packed variants that were no slower beyond the noise."""

    point: Mapping[str, int]
    variant: str
    evidence: str
    time_us: float
    tie: tuple[str, ...]


@dataclass(frozen=True)
class PackedLayout:
    """The dispatch table of one head layout: its fields, tuned values of each axis in order, winners."""

    layout: Mapping[str, Value]
    axes: Mapping[str, tuple[int, ...]]
    default: str
    oracle: str
    buckets: tuple[PackedBucket, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything a pack says about itself. ``tolerances`` is by output, ``dispatch`` by target and layout name.

    ``interface`` is how the kernels are launched (`kgen.family.Family.interface`).
    """

    schema: int
    family: str
    interface: str
    kgen_version: str
    spec: SpecRef
    tolerances: Mapping[str, PackedTolerance]
    archs: Mapping[str, PackedArch]
    targets: Mapping[str, PackedTarget]
    sources: Mapping[str, PackedSource]
    variants: Mapping[str, PackedVariant]
    dispatch: Mapping[str, Mapping[str, PackedLayout]]

    def files(self) -> dict[str, str]:
        """Path in the pack -> sha256, of every file that the manifest vouches for."""
        found = {}
        for name, source in self.sources.items():
            found[source_path(name)] = source.sha256
            for arch, cubin in source.cubins.items():
                found[cubin_path(arch, name)] = cubin.sha256
        return found


def source_path(name: str) -> str:
    """Path of a source in the pack."""
    return f"sources/{name}.cu"


def cubin_path(arch: str, name: str) -> str:
    """Path of a source's cubin in the pack."""
    return f"cubins/{arch}/{name}.cubin"


def canonical_json(value: Any) -> str:
    """Sorted keys, two-space indent, a newline at the end: equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    return canonical_json(asdict(manifest)).encode("ascii")


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``.

    Raises PackError naming ``where``: another schema, an unknown or missing key, a wrong type, a name that is no plain
    file name, a reference to something that the manifest does not hold.
    """
    try:
        tree = json.loads(data)
        schema = tree["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackError(where, "is not a pack's manifest", seen=str(error)) from None
    if schema != SCHEMA:
        remedy = "upgrade kgen, or emit the pack again with this one"
        raise PackError(where, f"pack schema {schema!r} is not {SCHEMA}, the one this kgen reads", remedy=remedy)
    try:
        manifest: Manifest = _decode(Manifest, tree, "manifest")
    except _MalformedError as error:
        raise PackError(where, "is malformed", seen=str(error)) from None
    problem = _inconsistency(manifest)
    if problem:
        raise PackError(where, "contradicts itself", seen=problem)
    return manifest


class _MalformedError(Exception):
    """A part of the tree is not what its dataclass field says."""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, tree: Any, at: str) -> Any:
    if not isinstance(tree, dict):
        raise _MalformedError(f"{at} is no object")
    names = {field.name for field in fields(kind)}
    odd = sorted(names ^ tree.keys())
    if odd:
        raise _MalformedError(f"{at}: {'missing' if odd[0] in names else 'unknown'} key {odd[0]!r}")
    hints = _hints(kind)
    return kind(**{name: _convert(hints[name], tree[name], f"{at}.{name}") for name in sorted(names)})


def _convert(hint: Any, value: Any, at: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _expect(value in arguments, value, at)
    if origin in (types.UnionType, Union):
        return _expect(any(type(value) is kind for kind in arguments), value, at)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return _decode(hint, value, at)
    return _expect(type(value) is hint, value, at)


def _expect(right: bool, value: Any, at: str) -> Any:
    if not right:
        raise _MalformedError(f"{at} is {value!r}")
    return value


def _inconsistency(manifest: Manifest) -> str:
    """The first thing that does not fit together, or an empty string."""
    return next(_inconsistencies(manifest), "")


def _inconsistencies(manifest: Manifest) -> Iterator[str]:
    yield from _naming_problems(manifest)
    for name, source in manifest.sources.items():
        if not source.cubins.keys() <= manifest.archs.keys():
            yield f"source {name!r} has a cubin for an arch that is not listed"
        if not source.kernels:
            yield f"source {name!r} has no kernels"
        if any(cubin.blocks_per_sm < 1 for cubin in source.cubins.values()):
            yield f"no SM holds a block of source {name!r}"
    for name, variant in manifest.variants.items():
        if variant.source not in manifest.sources:
            yield f"variant {name!r} names the missing source {variant.source!r}"
    for target, layouts in manifest.dispatch.items():
        if target not in manifest.targets:
            yield f"dispatch names the missing target {target!r}"
            return
        for name, table in layouts.items():
            place = f"dispatch.{target}.{name}"
            yield from (f"{place}: {problem}" for problem in _point_problems(table))
            arch = manifest.targets[target].arch
            yield from (f"{place}: {problem}" for problem in _variant_problems(manifest, arch, name, table))


def _naming_problems(manifest: Manifest) -> Iterator[str]:
    for name in (*manifest.sources, *manifest.archs, *manifest.targets):
        if not NAME.fullmatch(name):
            yield f"{name!r} is not a plain name"
    for name in (*manifest.archs, *(target.arch for target in manifest.targets.values())):
        if not ARCH.fullmatch(name):
            yield f"{name!r} is not an architecture"
    for arch in manifest.archs.values():
        if len(arch.min_cuda) != 2:
            yield f"min_cuda is {list(arch.min_cuda)}, not a major and a minor version"


def _point_problems(table: PackedLayout) -> Iterator[str]:
    points = set()
    for values in table.axes.values():
        if list(values) != sorted(set(values)):
            yield f"axis values {list(values)} are not ascending"
    for bucket in table.buckets:
        if bucket.point.keys() != table.axes.keys():
            yield f"the point {dict(bucket.point)} does not name the axes"
            return
        point = tuple(bucket.point[axis] for axis in table.axes)
        if point in points or any(bucket.point[axis] not in values for axis, values in table.axes.items()):
            yield f"the point {dict(bucket.point)} is listed twice or is off the axes' values"
        if not 0 < bucket.time_us < math.inf:
            yield f"the time at {dict(bucket.point)} is {bucket.time_us}"
        points.add(point)


def _variant_problems(manifest: Manifest, arch: str, layout: str, table: PackedLayout) -> Iterator[str]:
    named = [variant for bucket in table.buckets for variant in (bucket.variant, *bucket.tie)]
    for name in (table.default, table.oracle, *named):
        variant = manifest.variants.get(name)
        if variant is None:
            yield f"missing variant {name!r}"
        elif arch not in manifest.sources[variant.source].cubins:
            yield f"variant {name!r} has no cubin for {arch}"
        elif layout not in variant.proofs or not variant.proofs[layout].checked_on:
            yield f"variant {name!r} was not proven right"
