"""What the kernels of a pack take of a chip, what their hot loops are made of, and what the model expects of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.build.disassemble import INTEGER, MIX, HotLoop, hot_loops
from kgen.model import Footprint, floor_us, predict
from kgen.runtime.manifest import PackedKernel, PackedSource
from kgen.runtime.pack_reader import Pack
from kgen.spec import Spec
from kgen.targets import Target


@dataclass(frozen=True)
class ResourceRow:
    """One kernel of one packed source on one target; shared bytes are static and dynamic ones of a block.

    ``points`` is how often the target's dispatch tables name a variant of the source. ``modelled_x_floor`` is the
    modelled time over the roofline floor there (geometric mean) and ``modelled_bound`` what bounds most of them by the
    model; both are of whole calls, stand with the main kernel, and are None where there is no point.
    """

    target: str
    source: str
    entry: str
    roles: tuple[str, ...]
    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    blocks_per_sm: int
    hot_loop: HotLoop | None
    points: int
    modelled_x_floor: float | None
    modelled_bound: str | None


def resource_rows(spec: Spec, pack: Pack, nvdisasm: Path) -> list[ResourceRow]:
    """A row for each target, source and kernel of a pack, in this order; main kernels first.

    Raises InputError where the spec lacks a target of the pack, ToolchainError where nvdisasm fails.
    """
    return [
        row
        for target_name in pack.manifest.dispatch
        for source_name in sorted(pack.manifest.sources)
        for row in _source_rows(spec, pack, spec.target(target_name), source_name, nvdisasm)
    ]


def _source_rows(spec: Spec, pack: Pack, target: Target, source_name: str, nvdisasm: Path) -> Iterator[ResourceRow]:
    source = pack.manifest.sources[source_name]
    cubin = source.cubins.get(target.nvcc_arch)
    if cubin is None:
        return
    loops = hot_loops(pack.cubin(source_name, target.nvcc_arch), nvdisasm)
    footprints = _footprints(source, target)
    ratios, bounds = _modelled(spec, pack, target, source_name, footprints)
    roles = sorted({variant.role for variant in pack.manifest.variants.values() if variant.source == source_name})
    for kernel in source.kernels:
        taken, is_main = cubin.resources[kernel.entry], kernel == source.kernels[0]
        modelled = is_main and bool(ratios)
        yield ResourceRow(
            target=target.name,
            source=source_name,
            entry=kernel.entry,
            roles=tuple(roles),
            threads=kernel.threads,
            registers=taken.registers,
            shared_bytes=kernel.shared_bytes + taken.static_shared_bytes,
            spill_bytes=taken.spill_bytes,
            blocks_per_sm=footprints[kernel.entry].resident_blocks,
            hot_loop=loops.get(kernel.entry),
            points=len(ratios) if is_main else 0,
            modelled_x_floor=math.exp(sum(map(math.log, ratios)) / len(ratios)) if modelled else None,
            modelled_bound=bounds.most_common(1)[0][0] if modelled else None,
        )


def _footprints(source: PackedSource, target: Target) -> dict[str, Footprint]:
    """What each kernel takes; the main one's resident blocks are those that its launches are planned for."""
    cubin = source.cubins[target.nvcc_arch]

    def footprint(kernel: PackedKernel) -> Footprint:
        taken = cubin.resources[kernel.entry]
        shared_bytes = kernel.shared_bytes + taken.static_shared_bytes
        fits = target.resident_blocks(threads=kernel.threads, registers=taken.registers, shared_bytes=shared_bytes)
        blocks = cubin.blocks_per_sm if kernel == source.kernels[0] else fits
        return Footprint(kernel.threads, blocks, taken.spill_bytes)

    return {kernel.entry: footprint(kernel) for kernel in source.kernels}


def _modelled(
    spec: Spec, pack: Pack, target: Target, source_name: str, footprints: dict[str, Footprint]
) -> tuple[list[float], Counter[str]]:
    """Modelled time over floor at every point that the source is dispatched to, and what bounds them."""
    family, main = spec.family, next(iter(footprints))
    ratios: list[float] = []
    bounds: Counter[str] = Counter()
    for table in pack.manifest.dispatch[target.name].values():
        for bucket in table.buckets:
            variant = pack.manifest.variants[bucket.variant]
            if variant.source != source_name:
                continue
            capacity = family.capacity(family.point_case(bucket.point))
            plan = family.plan(
                variant.candidate,
                table.layout,
                capacity,
                sms=target.sms,
                resident_blocks=footprints[main].resident_blocks,
            )
            found = predict(target, family.demand(variant.candidate, table.layout, bucket.point, plan), footprints)
            work = family.work(table.layout, bucket.point)
            ratios.append(found.time_us / floor_us(target, flop=work.flop, bytes_moved=work.bytes))
            bounds[found.bound] += 1
    return ratios, bounds


def resource_table(rows: Sequence[ResourceRow]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Column names and cells; kernels that are the same in several sources share a row."""
    kinds = [kind for kind in (*MIX, INTEGER) if any(row.hot_loop and kind in row.hot_loop.mix for row in rows)]
    columns = ["target", "source", "kernel", "threads", "registers", "shared (B)", "spill (B)", "blocks/SM", "points"]
    columns += ["x floor (modelled)", "bound (modelled)", "hot loop", *kinds]
    sharing: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        sharing.setdefault(_cells(row, kinds), []).append(row.source.partition("__")[2])
    return columns, [
        (cells[0], names[0] if len(names) == 1 else f"{len(names)} sources", *cells[1:])
        for cells, names in sharing.items()
    ]


def _cells(row: ResourceRow, kinds: Sequence[str]) -> tuple[str, ...]:
    """All cells but the source."""
    mix = row.hot_loop.mix if row.hot_loop else {}
    return (
        row.target,
        row.entry.removeprefix(row.source.partition("__")[0] + "_"),
        str(row.threads),
        str(row.registers),
        str(row.shared_bytes),
        str(row.spill_bytes),
        str(row.blocks_per_sm),
        str(row.points),
        "-" if row.modelled_x_floor is None else f"{row.modelled_x_floor:.2f}",
        row.modelled_bound or "-",
        str(row.hot_loop.instructions) if row.hot_loop else "-",
        *(str(mix.get(kind, 0)) for kind in kinds),
    )


_PAGE = """\
# What the packed kernels of {family} take

Written by `kgen show resources --markdown docs/resources.md`; run it again when the pack changes.

* Registers a thread, shared bytes a block, spilled bytes a thread: what the compiler says. Blocks/SM: resident blocks,
  for a main kernel those that its launches are planned for.
* Points: how often the dispatch tables choose the source. **x floor and bound are modelled: computed at these points
  by [the time model](model.md), not timed**: the geometric mean of modelled time over roofline floor, and what the
  model says limits most of them.
* Hot loop: the instructions of the innermost loop with the most mma (of the longest innermost loop in a kernel without
  any), as nvdisasm lists them, and how many are of each kind. Both ways of a branch are counted.
"""


def markdown_page(spec: Spec, pack: Pack, rows: Sequence[ResourceRow]) -> str:
    """The page docs/resources.md: the table of each target, and how to read it."""
    lines = [_PAGE.format(family=spec.family.name)]
    for target in dict.fromkeys(row.target for row in rows):
        columns, cells = resource_table([row for row in rows if row.target == target])
        arch = pack.manifest.archs[spec.target(target).nvcc_arch]
        lines += [f"## {target}", "", f"Compiled by {arch.toolchain}.", ""]
        lines += ["| " + " | ".join(columns[1:]) + " |", "|" + "---|" * (len(columns) - 1)]
        lines += ["| " + " | ".join(row[1:]) + " |" for row in cells]
        lines += [""]
    return "\n".join(lines)
