"""A small kernel family for tests: the sum and the log of the sum of ragged segments, in two launches.

``segment_sum`` writes one partial sum a segment into the workspace; ``finish`` writes the outputs. Each has twins
with a planted bug, by name.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from kgen.binding import Binding
from kgen.family import (
    Array,
    Candidate,
    Case,
    Constraint,
    Family,
    Kernel,
    Launch,
    LaunchDemand,
    Layout,
    Parameter,
    ParameterStruct,
    Plan,
    Point,
    Tolerance,
    Value,
    Work,
)

TOLERANCES = {"total": Tolerance(1e-5, 1e-3), "log": Tolerance(1e-5, 1e-4)}
LAYOUT: dict[str, Value] = {"scale": 3}


class ToyFamily(Family):
    name: ClassVar[str] = "toy"
    template: ClassVar[str] = "toy.cu.j2"
    params: ClassVar[ParameterStruct] = ParameterStruct(
        (
            Parameter("values", "pointer"),  # float32 [sum of lengths]
            Parameter("offsets", "pointer"),  # int32 [batch + 1]
            Parameter("total", "pointer"),  # float32 [batch]
            Parameter("log", "pointer"),  # float32 [batch]
            Parameter("partial", "pointer"),  # float32 [batch]
            Parameter("batch", "int32"),
            Parameter("scale", "float32"),
        )
    )
    layout_constants: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[str, ...]] = ("values", "offsets")
    streamed: ClassVar[tuple[str, ...]] = ("values",)
    outputs: ClassVar[tuple[str, ...]] = ("total", "log")
    axes: ClassVar[tuple[str, ...]] = ("batch", "length")
    constraints: ClassVar[tuple[Constraint, ...]] = ()

    def layout_problem(self, layout: Layout) -> tuple[str, str, str] | None:
        return None

    def label(self, candidate: Candidate) -> str:
        return f"toy_{candidate['first']}"

    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        return dict(candidate)

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        return Kernel(str(candidate["first"]), 128, 51200), Kernel(str(candidate["last"]), 32, 0)

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        launches = tuple(
            Launch(kernel.entry, (capacity["batch"], 1, 1), kernel.threads, kernel.shared_bytes)
            for kernel in self.kernels(candidate, layout)
        )
        return Plan(launches, {"partial": 4 * capacity["batch"]}, {})

    def cases(self, layout: Layout) -> tuple[Case, ...]:
        return (
            Case("ragged", {"lengths": [5, 0, 17]}),
            Case("one", {"lengths": [3]}),
        )

    def point_case(self, point: Point) -> Case:
        return Case("point", {"lengths": [point["length"]] * point["batch"]})

    def capacity(self, case: Case) -> Point:
        lengths = case.options["lengths"]
        return {"batch": len(lengths), "length": max(lengths)}

    def binding(self, layout: Layout, capacity: Point) -> Binding:
        raise NotImplementedError("the toy is not served")

    def make_inputs(self, layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
        lengths = case.options["lengths"]
        values = np.random.default_rng(seed).uniform(0.5, 1.5, sum(lengths)).astype(np.float32)
        return {"values": values, "offsets": np.cumsum([0, *lengths]).astype(np.int32)}

    def output_arrays(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> dict[str, Array | None]:
        batch = len(case.options["lengths"])
        return {"total": np.full(batch, np.nan, np.float32), "log": np.full(batch, np.nan, np.float32)}

    def scalars(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None]) -> Mapping[str, int | float]:
        return {"batch": len(case.options["lengths"]), "scale": float(layout["scale"])}

    def reference(
        self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
    ) -> dict[str, Array]:
        values, offsets = inputs["values"], inputs["offsets"]
        assert values is not None
        assert offsets is not None
        segments = list(itertools.pairwise(offsets))
        chosen = segments if rows is None else [segments[row] for row in rows]
        total = np.array([values[a:b].astype(np.float64).sum() for a, b in chosen]) * float(layout["scale"])
        with np.errstate(divide="ignore"):
            return {"total": total, "log": np.log(total)}

    def sample_rows(self, layout: Layout, case: Case, inputs: Mapping[str, Array | None], flop: float) -> Array:
        lengths = case.options["lengths"]
        count = max(2, int(flop / max(1, *lengths)))
        return np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), count)).astype(np.int64))

    def as_float(self, output: str, array: Array) -> Array:
        return array.astype(np.float64)

    def work(self, layout: Layout, point: Point) -> Work:
        return Work(float(point["batch"] * point["length"]), 4.0 * point["batch"] * point["length"])

    def demand(self, candidate: Candidate, layout: Layout, point: Point, plan: Plan) -> tuple[LaunchDemand, ...]:
        return ()


class SharingToy(ToyFamily):
    """Its sums may take the offsets from a copy that one launch of ``keeper`` made for many calls."""

    params: ClassVar[ParameterStruct] = ParameterStruct(
        (*ToyFamily.params.parameters, Parameter("kept", "pointer"))  # int32 [batch + 1], or null
    )

    def __init__(self, keeper: str = "keep_offsets") -> None:
        self.keeper = keeper

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        return (*super().kernels(candidate, layout), Kernel(self.keeper, 32, 0))

    def plan(self, candidate: Candidate, layout: Layout, capacity: Point, *, sms: int, resident_blocks: int) -> Plan:
        plan = super().plan(candidate, layout, capacity, sms=sms, resident_blocks=resident_blocks)
        *own, keep = plan.launches
        workspace = {**plan.workspace_bytes, "kept": 4 * (capacity["batch"] + 1)}
        return Plan(tuple(own), workspace, {}, (keep,), ("kept",))


def kept(struct: int) -> Any:
    """The array behind the parameter of `SharingToy`, or None."""
    params = SharingToy.params
    address = params.packer.unpack(ctypes.string_at(struct, params.size_bytes))[-1]
    return at(address, ctypes.c_int32, Arguments(struct).batch + 1) if address else None


def keep_offsets(struct: int) -> None:
    kept(struct)[:] = Arguments(struct).offsets


def keep_most_offsets(struct: int) -> None:
    kept(struct)[:-1] = Arguments(struct).offsets[:-1]


def sum_kept(struct: int) -> None:
    arguments, ends = Arguments(struct), kept(struct)
    ends = arguments.offsets if ends is None else ends
    arguments.partial[:] = [arguments.values[a:b].sum() for a, b in itertools.pairwise(ends)]


class Arguments:
    """The arrays behind a parameter struct."""

    def __init__(self, struct_address: int) -> None:
        params = ToyFamily.params
        raw = ctypes.string_at(struct_address, params.size_bytes)
        values: dict[str, Any] = dict(
            zip([item.name for item in params.parameters], params.packer.unpack(raw), strict=True)
        )
        self.batch, self.scale = int(values["batch"]), float(values["scale"])
        self.offsets = at(values["offsets"], ctypes.c_int32, self.batch + 1)
        self.values = at(values["values"], ctypes.c_float, max(1, int(self.offsets[-1])))
        self.total = at(values["total"], ctypes.c_float, self.batch + 1)  # one more than there is
        self.log = at(values["log"], ctypes.c_float, self.batch)
        self.partial = at(values["partial"], ctypes.c_float, self.batch)

    def segments(self) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in itertools.pairwise(self.offsets)]


def at(address: int, kind: Any, count: int) -> Array:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def segment_sum(struct: int) -> None:
    arguments = Arguments(struct)
    arguments.partial[:] = [arguments.values[a:b].sum() for a, b in arguments.segments()]


def finish(struct: int) -> None:
    arguments = Arguments(struct)
    arguments.total[: arguments.batch] = arguments.partial * arguments.scale
    with np.errstate(divide="ignore"):
        arguments.log[:] = np.log(arguments.total[: arguments.batch])


def forgets_last(struct: int) -> None:
    arguments = Arguments(struct)
    arguments.partial[:-1] = [arguments.values[a:b].sum() for a, b in arguments.segments()[:-1]]


def adds_to_workspace(struct: int) -> None:
    arguments = Arguments(struct)
    arguments.partial[:] = np.nan_to_num(arguments.partial) + [
        arguments.values[a:b].sum() for a, b in arguments.segments()
    ]


def sorts_inputs(struct: int) -> None:
    segment_sum(struct)
    Arguments(struct).values[0] += 1


def writes_past(struct: int) -> None:
    finish(struct)
    arguments = Arguments(struct)
    arguments.total[arguments.batch] = 1.0


def finite_log(struct: int) -> None:
    finish(struct)
    arguments = Arguments(struct)
    arguments.log[~np.isfinite(arguments.log)] = -1e30


def slightly_off(struct: int) -> None:
    finish(struct)
    arguments = Arguments(struct)
    arguments.total[: arguments.batch] *= 1.001


def illegal(struct: int) -> None:
    raise MemoryError


def remembers_lengths() -> Callable[[int], None]:
    """A kernel that keeps the lengths of its first launch, as one would that read them on the host."""
    kept: dict[int, list[tuple[int, int]]] = {}

    def run(struct: int) -> None:
        arguments = Arguments(struct)
        segments = kept.setdefault(arguments.offsets.ctypes.data, arguments.segments())
        arguments.partial[:] = [arguments.values[a:b].sum() for a, b in segments]

    return run


def kernels() -> dict[str, Callable[[int], None]]:
    """All entries by name."""
    plain = (segment_sum, finish, forgets_last, adds_to_workspace, sorts_inputs, writes_past, finite_log)
    sharing = (keep_offsets, keep_most_offsets, sum_kept)
    named = {function.__name__: function for function in (*plain, *sharing, slightly_off, illegal)}
    return named | {"remembers_lengths": remembers_lengths()}


def candidate(first: str = "segment_sum", last: str = "finish") -> dict[str, Value]:
    return {"first": first, "last": last}
