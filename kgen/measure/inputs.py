"""The inputs and outputs of one workload point on the GPU: what is streamed in so many copies that L2 has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kgen.device import Device, DeviceBuffer, Stream
from kgen.family import Array, Case, Family, Layout, Point, Tolerance
from kgen.measure.timing import input_sets
from kgen.validate import CaseResult, compare
from kgen.validate.launchers import ALIGNMENT

REFERENCE_FLOP = 1e9  # the reference of a larger point takes more than about a second on the host
SAMPLES = 1 << 20  # elements of an output that are compared, spread evenly


@dataclass
class PointInputs:
    """A point's inputs and outputs; of the streamed inputs ``sets`` copies, ``set_bytes`` apart, behind the others.

    ``expected`` holds samples (float64, by output) of what every kernel must compute here: the reference's
    where the point is small enough, else those of the first kernel that was confirmed, ``expected_of``.
    """

    family: Family
    case: Case
    arena: DeviceBuffer
    sets: int
    set_bytes: int
    offsets: Mapping[str, int]
    scalars: Mapping[str, int | float]
    outputs: Mapping[str, Array]
    output_buffers: Mapping[str, DeviceBuffer]
    expected: dict[str, Array] = field(default_factory=dict)
    expected_of: str = "the reference"

    @classmethod
    def make(
        cls, device: Device, stream: Stream, family: Family, layout: Layout, point: Point, budget_bytes: int
    ) -> PointInputs:
        """Make the inputs once on the host; copies, within half the budget, are made on the device."""
        case = family.point_case(point)
        inputs = family.make_inputs(layout, case, seed=0)
        arrays = {name: array for name, array in inputs.items() if array is not None}
        outputs = family.output_arrays(layout, case, inputs)
        present = {name: array for name, array in outputs.items() if array is not None}
        order = [name for name in arrays if name not in family.streamed]
        resident_bytes = sum(_padded(arrays[name]) for name in order)
        order += [name for name in arrays if name in family.streamed]
        offsets, at = {}, 0
        for name in order:
            offsets[name] = at
            at += _padded(arrays[name])
        set_bytes = at - resident_bytes
        sets = input_sets(set_bytes, device.l2_bytes, budget_bytes // 2)
        arena = device.allocate(resident_bytes + sets * set_bytes)
        for name, array in arrays.items():
            device.copy_to_device(arena.address + offsets[name], array)
        first = arena.address + resident_bytes
        for index in range(1, sets):
            device.copy_on_device(first + index * set_bytes, first, set_bytes, stream)
        stream.synchronize()
        made = cls(
            family=family,
            case=case,
            arena=arena,
            sets=sets,
            set_bytes=set_bytes,
            offsets=offsets,
            scalars=family.scalars(layout, case, inputs),
            outputs=present,
            output_buffers={name: device.allocate(array.nbytes) for name, array in present.items()},
        )
        if family.work(layout, point).flop <= REFERENCE_FLOP:
            reference = family.reference(layout, case, inputs)
            made.expected = {name: _sample(reference[name]) for name in present}
        return made

    def pointers(self, index: int) -> dict[str, int]:
        """Addresses by parameter name, for copy ``index``."""
        shift = dict.fromkeys(self.family.streamed, index * self.set_bytes)
        inputs = {name: self.arena.address + at + shift.get(name, 0) for name, at in self.offsets.items()}
        return inputs | {name: buffer.address for name, buffer in self.output_buffers.items()}

    def poison(self, device: Device) -> None:
        """Fill the outputs with NaN, so that what a launch leaves unwritten is seen."""
        for name, array in self.outputs.items():
            device.copy_to_device(self.output_buffers[name].address, array)

    def compare(self, device: Device, job_name: str, tolerances: Mapping[str, Tolerance]) -> list[CaseResult]:
        """Compare the outputs on the device with what is expected; the first failure is the last result.

        Two kernels may each be off by a tolerance, in opposite directions: against another kernel it is doubled.
        """
        results: list[CaseResult] = []
        found = {}
        for name, array in self.outputs.items():
            on_host = np.empty_like(array)
            device.copy_to_host(on_host, self.output_buffers[name].address)
            found[name] = self.family.as_float(name, _sample(on_host))
            factor = 1.0 if self.has_reference else 2.0
            tolerance = Tolerance(factor * tolerances[name].relative_l2, factor * tolerances[name].max_abs)
            where = f"{self.case.name} against {self.expected_of}" if self.expected else self.case.name
            expected = self.expected.get(name, found[name])
            results.append(compare(found[name], expected, tolerance, name=where, seed=0, output=name))
            if not results[-1].ok:
                return results
        if not self.expected:
            self.expected, self.expected_of = found, job_name
        return results

    @property
    def has_reference(self) -> bool:
        """Whether ``expected`` is the reference's."""
        return bool(self.expected) and self.expected_of == "the reference"

    def free(self) -> None:
        """Give the device memory back."""
        for buffer in (self.arena, *self.output_buffers.values()):
            buffer.free()


def _padded(array: Array) -> int:
    """Bytes of an array up to the start of the next one."""
    return -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT


def _sample(array: Array) -> Array:
    """At most about `SAMPLES` elements, spaced by an odd step so that no column of a power of two is left out."""
    step = max(1, array.size // SAMPLES) | 1
    return array.reshape(-1)[::step]
