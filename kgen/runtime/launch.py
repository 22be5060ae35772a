"""Preparing a family for a head layout, capacities and a device, and calling it on torch tensors."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.binding import Binding, Point
from kgen.errors import DeviceError, InputError, PackError
from kgen.resources import cache_dir as default_cache_dir
from kgen.runtime.backends import Backend, CudaBackend, EmulatorBackend
from kgen.runtime.dispatch import Explanation, Match, Table, arch_capability
from kgen.runtime.manifest import Value
from kgen.runtime.pack_reader import Pack
from kgen.runtime.regions import Region
from kgen.runtime.schedule import Schedule, SharedSchedule
from kgen.runtime.tensors import TensorChecker

if TYPE_CHECKING:
    from kgen.family import Family, Launch, Plan

DTYPES = ("bfloat16", "float8_e4m3fn", "float32", "int32", "int64")


@dataclass(frozen=True)
class _Prepared:
    """The launches of one variant at one plan level."""

    source: str
    launches: tuple[Launch, ...]
    making: tuple[Launch, ...]  # the same after those that make a schedule
    scalars: Mapping[str, int]

    @classmethod
    def of(cls, source: str, plan: Plan) -> _Prepared:
        """Raises InputError where a grid is too large."""
        making = plan.sharing().launches
        _check_grids(making)
        return cls(source, plan.launches, making, plan.scalars)


class PreparedCall:
    """A family, ready to launch: modules are loaded, the workspace is there, every launch plan is made.

    Calling it launches on torch's current stream (CPU: runs to the end) and allocates, compiles, waits for and locks
    nothing, so calls may be captured in a CUDA graph; a captured graph stays right when the contents of the tensors
    change, lengths included, up to the capacities. Calls share one workspace and argument buffer: make them from one
    thread at a time and on one stream, or prepare twice. ``last`` is how the latest call was matched.

    Calls with the same lengths, as those of a model's layers, may also share one schedule: how the work is dealt to
    blocks, which each call otherwise finds for itself. The first call makes it, the others keep it.
    """

    def __init__(
        self,
        *,
        table: Table,
        family: Family,
        binding: Binding,
        checker: TensorChecker,
        backend: Backend,
        capacity: Point,
        checked: bool,
    ) -> None:
        self.table, self.capacity, self.last = table, dict(capacity), Match(table.packed.default, "default", {}, "")
        self._binding, self._checker, self._backend, self._checked = binding, checker, backend, checked
        self._names = tuple(rule.name for rule in binding.rules)
        self._packer = family.params.packer
        self._order = tuple(parameter.name for parameter in family.params.parameters)
        self._unset: dict[str, int | float] = {p.name: 0 for p in family.params.parameters if p.kind == "pointer"}
        self._levels = {axis: plan_levels(capacity[axis]) for axis in binding.plan_axes}
        self._plans: dict[tuple[str | int, ...], _Prepared] = {}
        self._workspace: list[Region] = []
        self._shared = SharedSchedule(binding.lengths, checked=checked)
        self._memory: list[Any] = []

    def __call__(
        self, *, hint: Mapping[str, int] | None = None, schedule: Schedule | None = None, **arguments: Any
    ) -> None:
        """Launch once. ``arguments`` are the family's tensors and options by name.

        ``hint`` gives values of workload axes that no tensor's shape shows (``prefix``), to choose the variant by; the
        result is right whatever it says. ``schedule="make"`` makes a schedule from the lengths, by one more launch, and
        uses it; ``"keep"`` uses the one that the latest "make" of this prepared call left, and is right while the
        lengths are the same; None uses none. Raises TensorError that names the tensor, before anything is launched, and
        InputError where there is no schedule of a call with these sizes and this variant to keep.
        """
        tensors = {name: arguments.pop(name, None) for name in self._names}
        options = {name: arguments.pop(name, None) for name in self._binding.options}
        if arguments:
            known = ", ".join((*self._names, *self._binding.options))
            raise InputError(next(iter(arguments)), "is no argument of this call", remedy=f"it takes {known}")
        if hint:
            self._check_hint(hint)
        if schedule is not None:
            self._shared.check_argument(schedule)
        self._launch(tensors, options, hint, schedule)

    def _launch(
        self,
        tensors: Mapping[str, Any],
        options: Mapping[str, Any],
        hint: Mapping[str, int] | None,
        schedule: Schedule | None,
    ) -> None:
        sizes = self._binding.sizes(tensors, options)
        regions = self._checker.check(tensors, sizes.dimensions)
        values = self._unset | self._binding.scalars(tensors, sizes, options)
        if self._checked:
            self._binding.check_content(tensors, sizes)
        if schedule == "make":
            self._shared.made = None
        if sizes.is_empty:
            return
        self.last = self.table.match(tuple(self._within({**sizes.point, **(hint or {})}).values()))
        plan = self._plans[self.last.variant, *self._level(sizes.extents)]
        if schedule is not None:
            scheduled = self._shared.call(self.last.variant, sizes, tensors)
            if schedule == "keep":
                self._shared.require(scheduled)
            regions += self._shared.regions
        regions += self._workspace
        for region in regions:
            values[region.name] = region.address
        values |= plan.scalars
        self._packer.pack_into(self._backend.arguments, 0, *[values[name] for name in self._order])
        self._backend.run(plan.source, plan.making if schedule == "make" else plan.launches, regions)
        if schedule == "make":
            self._shared.made = scheduled

    def _check_hint(self, hint: Mapping[str, Any]) -> None:
        if not hint.keys() <= self.capacity.keys():
            raise InputError("hint", "names no workload axis", seen=repr(dict(hint)), remedy=", ".join(self.capacity))
        for axis, value in hint.items():
            if not isinstance(value, Integral) or value < 0:
                raise InputError(f"hint {axis}", "must be a whole number, not negative", seen=repr(value))

    def explain(self, point: Mapping[str, int]) -> Explanation:
        """Why a call at a workload point gets what it gets; axes left out, and beyond it, are at capacity."""
        return self.table.explain(self._within(point))

    def _within(self, point: Mapping[str, int]) -> dict[str, int]:
        """The point that the table is asked for, its axes in the table's order: no more than what was prepared for."""
        return {axis: min(point.get(axis, self.capacity[axis]), self.capacity[axis]) for axis in self.table.axes}

    def _level(self, extents: Mapping[str, int]) -> list[int]:
        return [levels[bisect_left(levels, extents[axis])] for axis, levels in self._levels.items()]

    def prepare(self, pack: Pack, family: Family, torch: Any, device: Any) -> None:
        """Load every variant that a call can need, make its plans and take the largest workspace that one asks for."""
        reachable = self.table.reachable(self.capacity)
        variants = {name: pack.manifest.variants[name] for name in reachable}
        self._backend.load(pack, sorted({variant.source for variant in variants.values()}), self.table.arch)
        needed: dict[str, int] = {}
        shared: set[str] = set()
        for name, variant in variants.items():
            blocks = self._backend.resident_blocks(variant.source)
            for level in product(*self._levels.values()):
                capacity = self.capacity | dict(zip(self._levels, level, strict=True))
                plan = family.plan(
                    variant.candidate, self.table.packed.layout, capacity, sms=self._backend.sms, resident_blocks=blocks
                )
                self._plans[name, *level] = _Prepared.of(variant.source, plan)
                shared.update(plan.shared_workspace)
                for buffer, size in plan.workspace_bytes.items():
                    needed[buffer] = max(needed.get(buffer, 0), size)
        for buffer, size in needed.items():
            # Zeros: a call that keeps a schedule whose making was captured and has never run finds nothing to do.
            memory = (torch.zeros if shared else torch.empty)(size, dtype=torch.uint8, device=device)
            self._memory.append(memory)
            regions = self._shared.regions if buffer in shared else self._workspace
            regions.append(Region(buffer, memory.data_ptr(), size, writable=True))


def plan_levels(capacity: int) -> tuple[int, ...]:
    """The extents that launch plans are made for: 1 to 8, then two a power of two, and the capacity.

    A call takes the least level that covers it, so at most half of a grid is idle.
    """
    levels = {*range(1, 9), capacity}
    step = 8
    while step < capacity:
        levels |= {step, step * 3 // 2}
        step *= 2
    return tuple(sorted(level for level in levels if level <= capacity))


def prepare(
    pack: Pack,
    *,
    family: str,
    layout: Mapping[str, Value] | str,
    capacity: Mapping[str, int],
    device: Any,
    checked: bool = False,
    target: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PreparedCall:
    """Make ``family`` ready for calls of up to ``capacity`` (every workload axis) on ``device``.

    ``layout`` is a layout's name in the pack or fields that only it has. ``device`` is ``"cpu"`` (the emulator; it
    compiles now, into ``cache_dir``) or a CUDA device. ``target`` picks one of the pack's targets; by default a GPU
    gets the one closest to it and the CPU the newest architecture. ``checked`` makes every call look at the contents of
    its tensors, which waits for the device. Raises PackError (ForeignArchError, LayoutMissingError), DeviceError,
    BuildError or InputError.
    """
    import torch

    from kgen.family import find_family

    if pack.manifest.family != family:
        raise PackError(pack.where, f"is no pack of {family}", seen=f"it holds {pack.manifest.family}")
    described = find_family(family, "family")
    pack.require_interface(described.interface)
    _check_capacity(described.axes, capacity)
    on = _device(torch, device)
    params_bytes = described.params.size_bytes
    dispatcher = pack.dispatcher()
    backend: Backend
    if on.type == "cpu":
        on = torch.device("cpu")  # tensors never say cpu:0
        backend = EmulatorBackend(Path(cache_dir) if cache_dir else default_cache_dir(), params_bytes)
        chosen = target or _newest_target(pack)
    elif on.type == "cuda":
        if not torch.cuda.is_available():
            wrong = "is not there for torch"
            raise DeviceError(
                str(on), wrong, seen=f"torch {torch.__version__}", remedy="install a CUDA build, or use cpu"
            )
        on = torch.empty(1, device=on).device  # has an index, and lets torch make the primary context
        backend = CudaBackend(on.index, params_bytes)
        chosen = dispatcher.target(backend.capability, backend.sms, target)
    else:
        raise InputError("device", "must be cpu or cuda", seen=str(on))
    table = dispatcher.table(chosen, layout)
    binding = described.binding(table.packed.layout, capacity)
    call = PreparedCall(
        table=table,
        family=described,
        binding=binding,
        checker=TensorChecker(binding.rules, on, {name: getattr(torch, name) for name in DTYPES}),
        backend=backend,
        capacity=capacity,
        checked=checked,
    )
    call.prepare(pack, described, torch, on)
    return call


def _device(torch: Any, device: Any) -> Any:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        seen = f"{device!r}: {str(error).splitlines()[0]}"
        raise InputError("device", "is none that torch knows", seen=seen, remedy="use cpu, cuda or cuda:N") from None


def _check_capacity(axes: Sequence[str], capacity: object) -> None:
    values = capacity if isinstance(capacity, Mapping) else {}
    if set(values) != set(axes) or any(type(value) is not int or not 1 <= value < 2**31 for value in values.values()):
        remedy = f"give a positive whole number for each of {', '.join(axes)}"
        raise InputError("capacity", "does not fit the family", seen=repr(capacity), remedy=remedy)


def _check_grids(launches: Sequence[Launch]) -> None:
    """InputError where a grid is beyond what CUDA takes (programming guide, technical specifications)."""
    for launch in launches:
        if launch.grid[0] >= 2**31 or max(launch.grid[1:]) >= 2**16:
            seen = f"{launch.entry} would need a grid of {' x '.join(map(str, launch.grid))}"
            raise InputError("capacity", "is too large for one launch", seen=seen, remedy="prepare for less")


def _newest_target(pack: Pack) -> str:
    if not pack.manifest.dispatch:
        raise PackError(pack.where, "has no targets")
    targets = pack.manifest.targets
    return max(sorted(pack.manifest.dispatch), key=lambda name: arch_capability(targets[name].arch))
