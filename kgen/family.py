"""What a kernel family must say about itself, and how families are found.

A family is three files: ``templates/<name>.cu.j2`` (with its own ``.cuh``), ``specs/<name>*.yaml`` and
``kgen/families/<name>.py``, which holds one subclass of `Family`. Nothing else names it. Families are
imported by serving processes, so they may import numpy and the modules below this one only.
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np

from kgen.binding import Binding
from kgen.errors import InputError
from kgen.targets import Target

MANY_SMS = 4  # times a target's multiprocessors: what a wider part, or fewer rows, would make of a plan

Value = int | str
Candidate = Mapping[str, Value]
"""One value for every tunable of a spec."""
Layout = Mapping[str, Value]
"""The fields of one head layout of a spec."""
Point = Mapping[str, int]
"""One value for every workload axis: a shape to time, or the capacities to prepare for."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Constraint:
    """A named rule that a candidate must meet; the name is what people read when a point is rejected."""

    name: str
    holds: Callable[[Candidate, Layout, Target], bool]


@dataclass(frozen=True)
class Parameter:
    """One field of the kernels' parameter struct, in order."""

    name: str
    kind: Literal["pointer", "int64", "int32", "float32"]


_FORMATS = {"pointer": ("Q", 8), "int64": ("q", 8), "int32": ("i", 4), "float32": ("f", 4)}


@dataclass(frozen=True)
class ParameterStruct:
    """The C layout of a parameter struct: fields at natural alignment, size padded to 8 bytes."""

    parameters: tuple[Parameter, ...]

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field."""
        offsets, at = {}, 0
        for parameter in self.parameters:
            size = _FORMATS[parameter.kind][1]
            at = -(-at // size) * size
            offsets[parameter.name] = at
            at += size
        return offsets

    @property
    def size_bytes(self) -> int:
        """Bytes of the struct with its tail padding."""
        last = self.parameters[-1]
        return -(-(self.offsets[last.name] + _FORMATS[last.kind][1]) // 8) * 8

    @property
    def packer(self) -> struct.Struct:
        """Packs the values of all fields, in order, into the struct's bytes."""
        text, at = "<", 0
        for parameter in self.parameters:
            code, size = _FORMATS[parameter.kind]
            pad = self.offsets[parameter.name] - at
            text += f"{pad}x{code}" if pad else code
            at = self.offsets[parameter.name] + size
        pad = self.size_bytes - at
        return struct.Struct(text + (f"{pad}x" if pad else ""))

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct's bytes; every field needs a value (0 is a null pointer)."""
        return self.packer.pack(*(values[parameter.name] for parameter in self.parameters))


@dataclass(frozen=True)
class Kernel:
    """One entry point of a rendered source, with its launch shape. ``shared_bytes`` is dynamic."""

    entry: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch: entry, grid, threads a block, dynamic shared bytes."""

    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Plan:
    """The launches of one call, in stream order, fixed for capacities; lengths are read on the device.

    ``workspace_bytes`` names device buffers that the launches share, ``scalars`` the parameter values
    that the plan decides. A launch may be empty at some lengths but never missing.

    ``shared_launches`` fill ``shared_workspace``, some of the buffers, from the lengths alone: calls with the same
    lengths may share what one of them made. A call whose pointers to these are null does without.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: Mapping[str, int]
    scalars: Mapping[str, int]
    shared_launches: tuple[Launch, ...] = ()
    shared_workspace: tuple[str, ...] = ()

    def alone(self) -> Plan:
        """The plan of a call that neither makes nor uses what calls may share."""
        own = {name: size for name, size in self.workspace_bytes.items() if name not in self.shared_workspace}
        return Plan(self.launches, own, self.scalars)

    def sharing(self) -> Plan:
        """The plan of a call that first makes what calls may share, and then uses it."""
        return Plan(self.shared_launches + self.launches, self.workspace_bytes, self.scalars)


@dataclass(frozen=True)
class Case:
    """One validation problem: a name, the lengths and options that make its inputs, nothing random."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """The least work of one call: floating-point operations, and bytes read plus written once."""

    flop: float
    bytes: float


@dataclass(frozen=True)
class LaunchDemand:
    """What one launch asks of a chip, for the model: ``steps`` is of its longest block; the rest is per step or block.

    ``stages`` is how many steps' rows a block holds at once: with one, nothing arrives while a step computes.
    ``step_converted`` counts the elements that each warp makes wider before it multiplies them.
    """

    entry: str
    blocks: int
    steps: int
    stages: int
    step_mma_flop: float
    step_shared_bytes: float
    step_gather_bytes: float
    step_syncs: float
    block_bytes: float
    dram_bytes: float
    step_converted: float = 0.0


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the float64 reference: relative L2 error, and the largest absolute error."""

    relative_l2: float
    max_abs: float


class Family(ABC):
    """A family of interchangeable kernels that compute one function.

    ``params`` is the C struct that every entry takes; ``layout_constants`` are the layout fields compiled
    into the source (the others are run-time parameters, so layouts share cubins); ``inputs`` / ``outputs``
    are the pointer parameters that a caller supplies (the remaining pointers are workspace). ``streamed`` are the
    inputs that no earlier kernel has just touched: timing finds them in DRAM, and the others in the L2 cache.
    ``inouts`` are arrays that are read and written in place: `make_inputs` gives their content, and the reference
    what they must hold afterwards. They are streamed, so that timing launches on each copy equally often.
    ``plan_version`` is raised whenever `plan`, `kernels`, or what a parameter means changes, so that no kernel of a
    pack is launched in another way than it was made for. ``pointer_tables`` names pointer parameters that are tables
    (uint64) of the addresses of an array's leading-dimension slices; such an array need be no parameter itself.
    ``known_names`` has, for each tunable that is a name, the names that the template knows; the others are integers.
    """

    name: ClassVar[str]
    template: ClassVar[str]
    params: ClassVar[ParameterStruct]
    layout_constants: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    streamed: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    inouts: ClassVar[tuple[str, ...]] = ()
    pointer_tables: ClassVar[Mapping[str, str]] = {}
    axes: ClassVar[tuple[str, ...]]
    constraints: ClassVar[tuple[Constraint, ...]]
    known_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    plan_version: ClassVar[int] = 1

    @property
    def interface(self) -> str:
        """What a packed kernel and this family must agree on: ``plan_version`` and the parameter struct's fields."""
        fields = ", ".join(f"{parameter.kind} {parameter.name}" for parameter in self.params.parameters)
        return f"{self.plan_version}: {fields}"

    @abstractmethod
    def layout_problem(self, layout: Layout) -> tuple[str, str, str] | None:
        """The first field of a layout that the family cannot serve: its name, what it must be, what was seen.

        A missing field is seen as ``missing``. None if the layout is fine; nothing else is called for one that is not.
        """

    @abstractmethod
    def label(self, candidate: Candidate) -> str:
        """The decodable part of a source's name, e.g. ``flash_m64_n32_s2_w8``."""

    @abstractmethod
    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        """Everything the template may name: tunables, layout constants and what follows from them."""

    @abstractmethod
    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        """The entry points of the rendered source; the first is the main one (occupancy, resources)."""

    @abstractmethod
    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        """Grids and workspace for the largest call; ``resident_blocks`` is of the main kernel, per SM."""

    @abstractmethod
    def binding(self, layout: Layout, capacity: Point) -> Binding:
        """How a caller's tensors become the parameters of a call, for one layout and its capacities."""

    @abstractmethod
    def cases(self, layout: Layout) -> tuple[Case, ...]:
        """Validation problems, small enough for the emulator: every feature and edge at least once."""

    @abstractmethod
    def point_case(self, point: Point) -> Case:
        """The problem that times one workload point.

        It is launched again and again on the same ``inouts``: every launch must do as much as the first, and an odd
        number of them leave what one does. Moves that are done twice as once are such, and maps that undo themselves.
        """

    @abstractmethod
    def capacity(self, case: Case) -> Point:
        """The capacities that a case needs."""

    @abstractmethod
    def make_inputs(self, layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
        """Input arrays by parameter name (bf16 as uint16, e4m3 as uint8); None where the case leaves an input out."""

    @abstractmethod
    def output_arrays(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> dict[str, Array | None]:
        """Output arrays of the right shape, poisoned with NaN so that an unwritten element fails the check."""

    @abstractmethod
    def scalars(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> Mapping[str, int | float]:
        """Parameter values that depend on the inputs but not on the plan."""

    @abstractmethod
    def reference(
        self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
    ) -> dict[str, Array]:
        """The outputs in float64 numpy, from the definition.

        With ``rows`` (int64), only those: indices into the leading dimensions, flattened, that all outputs share;
        every array then is [len(rows), what remains of its shape].
        """

    @abstractmethod
    def sample_rows(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], flop: float) -> Array:
        """Rows (int64, ascending) whose `reference` takes about ``flop``: all that fit, the first and the last always.

        They are spread over what a kernel divides: requests, nodes, heads.
        """

    @abstractmethod
    def as_float(self, output: str, array: Array) -> Array:
        """An output array as float64 numbers."""

    @abstractmethod
    def work(self, layout: Layout, point: Point) -> Work:
        """The least work at a workload point."""

    @abstractmethod
    def demand(self, candidate: Candidate, layout: Layout, point: Point, plan: Plan) -> tuple[LaunchDemand, ...]:
        """What each launch of the plan asks at a workload point, for the model."""

    def proving_plans(
        self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int
    ) -> tuple[Plan, ...]:
        """The plans to validate a case under, without repeats; the first is the one that ``sms`` would run.

        A validation case is short: spread over a whole GPU it leaves every block next to nothing to loop over. One
        multiprocessor makes the longest blocks, `MANY_SMS` times as many the most of them. Calls that may share what
        they make are proven alone, and but for the longest blocks also with it.
        """
        sizes = ((sms, resident_blocks), (1, 1), (MANY_SMS * sms, resident_blocks))
        target, longest, most = (
            self.plan(candidate, layout, capacity, sms=count, resident_blocks=resident) for count, resident in sizes
        )
        plans: list[Plan] = []
        for plan in (target.alone(), target.sharing(), longest.alone(), most.alone(), most.sharing()):
            if plan not in plans:
                plans.append(plan)
        return tuple(plans)

    def violation(self, candidate: Candidate, layout: Layout, target: Target) -> str | None:
        """Name of the first constraint that the candidate breaks, or None; later ones may rely on earlier ones."""
        return next((rule.name for rule in self.constraints if not rule.holds(candidate, layout, target)), None)


def slice_addresses(address: int, array: Array | None) -> Array:
    """The addresses (uint64) of an array's leading-dimension slices, for an array that starts at ``address``."""
    assert array is not None, "an array behind a pointer table is never left out"
    count = len(array)
    return address + np.arange(count, dtype=np.uint64) * np.uint64(array.nbytes // max(count, 1))


@cache
def families() -> Mapping[str, Family]:
    """All families, by name: one instance of every `Family` subclass found in ``kgen/families``."""
    import kgen.families

    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(kgen.families.__path__):
        loaded = importlib.import_module(f"kgen.families.{module.name}")
        for item in vars(loaded).values():
            if isinstance(item, type) and issubclass(item, Family) and item.__module__ == loaded.__name__:
                found[item.name] = item()
    return found


def find_family(name: str, where: str) -> Family:
    """The family called ``name``; InputError naming ``where`` and the known ones otherwise."""
    known: Sequence[str] = sorted(families())
    if name not in families():
        raise InputError(where, "unknown kernel family", seen=repr(name), remedy=f"known: {', '.join(known)}")
    return families()[name]
