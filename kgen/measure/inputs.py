"""The inputs and outputs of one workload point on the GPU: what is streamed in so many copies that L2 has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kgen.device import Device, DeviceBuffer, Stream
from kgen.family import Array, Case, Family, Layout, Point, Tolerance, slice_addresses
from kgen.measure.timing import input_sets
from kgen.validate import CaseResult, compare
from kgen.validate.launchers import ALIGNMENT

REFERENCE_FLOP = 2e9  # of the reference: more would take the host longer than about a second
UNWRITTEN_CHUNK = 1 << 20  # elements that are looked at at once: their float64 numbers stay in the host's cache


@dataclass
class PointInputs:
    """A point's inputs and outputs; of the streamed inputs ``sets`` copies, ``set_bytes`` apart, behind the others.

    ``expected`` is the family's reference (float64, by output) of ``rows``: all rows of the outputs where the point is
    small, else a sample of them. No kernel is compared with another one, which may be wrong as well. ``inouts`` are
    inputs that kernels write in place: those of the first copy are renewed and compared. ``tables`` are pointer tables,
    one a copy, one after the other.
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
    inouts: Mapping[str, Array]
    tables: Mapping[str, DeviceBuffer]
    rows: Array
    expected: Mapping[str, Array]

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
        tables = {}
        for table, name in family.pointer_tables.items():
            step = set_bytes if name in family.streamed else 0
            starts = [arena.address + offsets[name] + index * step for index in range(sets)]
            tables[table] = _table(device, starts, arrays[name])
        rows = family.sample_rows(layout, case, inputs, REFERENCE_FLOP)
        reference = family.reference(layout, case, inputs, rows)
        return cls(
            family=family,
            case=case,
            arena=arena,
            sets=sets,
            set_bytes=set_bytes,
            offsets=offsets,
            scalars=family.scalars(layout, case, inputs),
            outputs=present,
            output_buffers={name: device.allocate(array.nbytes) for name, array in present.items()},
            inouts={name: arrays[name] for name in family.inouts if name in arrays},
            tables=tables,
            rows=rows,
            expected=reference,
        )

    def pointers(self, index: int) -> dict[str, int]:
        """Addresses by parameter name, for copy ``index``."""
        shift = dict.fromkeys(self.family.streamed, index * self.set_bytes)
        inputs = {name: self.arena.address + at + shift.get(name, 0) for name, at in self.offsets.items()}
        inputs |= {
            name: buffer.address + index * buffer.size_bytes // self.sets for name, buffer in self.tables.items()
        }
        return inputs | {name: buffer.address for name, buffer in self.output_buffers.items()}

    def poison(self, device: Device) -> None:
        """Fill the outputs with NaN, so that what a launch leaves unwritten is seen, and renew the inouts."""
        addresses = self.pointers(0)
        for name, array in {**self.outputs, **self.inouts}.items():
            device.copy_to_device(addresses[name], array)

    def compare(self, device: Device, tolerances: Mapping[str, Tolerance]) -> list[CaseResult]:
        """Compare the outputs on the device with what is expected; the first failure is the last result.

        The whole output must have been written; its sampled rows must be within the tolerances.
        """
        results: list[CaseResult] = []
        addresses = self.pointers(0)
        for name, array in {**self.outputs, **self.inouts}.items():
            on_host = np.empty_like(array)
            device.copy_to_host(on_host, addresses[name])
            expected = self.expected[name]
            result = self._unwritten(name, on_host) if name in self.outputs else None
            if result is None:
                found = self.family.as_float(name, on_host.reshape(-1, *expected.shape[1:])[self.rows])
                result = compare(found, expected, tolerances[name], name=self.case.name, seed=0, output=name)
            results.append(result)
            if not result.ok:
                break
        return results

    def _unwritten(self, name: str, array: Array) -> CaseResult | None:
        """The failure of an output with elements that are NaN, or None."""
        flat, missing, first = array.reshape(-1), 0, 0
        for start in range(0, flat.size, UNWRITTEN_CHUNK):
            places = np.flatnonzero(np.isnan(self.family.as_float(name, flat[start : start + UNWRITTEN_CHUNK])))
            first = first if missing or not places.size else start + int(places[0])
            missing += places.size
        if not missing:
            return None
        at = [int(index) for index in np.unravel_index(first, array.shape)]
        seen = f"{missing} of {array.size} elements are NaN or never written, first {at}"
        reason = f"{name} of {self.case.name}, seed 0: {seen}"
        return CaseResult(self.case.name, 0, name, np.inf, np.inf, False, reason)

    def free(self) -> None:
        """Give the device memory back."""
        for buffer in (self.arena, *self.output_buffers.values(), *self.tables.values()):
            buffer.free()


def _table(device: Device, starts: Sequence[int], array: Array) -> DeviceBuffer:
    """One pointer table after the other, of the copies of an array that start at these addresses."""
    addresses = np.concatenate([slice_addresses(start, array) for start in starts])
    buffer = device.allocate(addresses.nbytes)
    device.copy_to_device(buffer.address, addresses)
    return buffer


def _padded(array: Array) -> int:
    """Bytes of an array up to the start of the next one."""
    return -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT
