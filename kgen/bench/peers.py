"""Kernels of others, timed on the same inputs by the same protocol: CUDA-graph replay, cold pool, medians, checked.

A peer that cannot be imported is named as absent, one that fails or computes something else is named as such; neither
has a time. Peers keep no envelope: they take what shared memory and occupancy the device gives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from kgen.measure.inputs import REFERENCE_FLOP
from kgen.measure.timing import input_sets, launches_per_replay, summarise
from kgen.model import floor_us
from kgen.validate import compare

if TYPE_CHECKING:
    from kgen.bench import BenchCall
    from kgen.family import Array, Family, Layout, Point
    from kgen.spec import Spec
    from kgen.targets import Target

Call = Callable[[], None]
"""One launch, or a few, on torch's current stream."""


@dataclass(frozen=True)
class PeerInputs:
    """A workload point as a peer gets it: the family's inputs as torch tensors on ``device``, by parameter name.

    ``streamed`` holds copies of the family's streamed inputs, enough that L2 has none; ``out`` is what a call writes.
    """

    family: Family
    layout: Layout
    point: Point
    tensors: Mapping[str, Any]
    streamed: Sequence[Mapping[str, Any]]
    out: Any


class Peer(ABC):
    """One kernel of somebody else's. ``computes`` is a tree or, at the same work, a causal chain."""

    name: ClassVar[str]
    what: ClassVar[str]
    family: ClassVar[str]
    output: ClassVar[str]
    computes: ClassVar[Literal["tree", "chain"]]

    @abstractmethod
    def missing(self, capability: tuple[int, int]) -> str:
        """Why it cannot run on a device of this compute capability; empty where it can."""

    @abstractmethod
    def calls(self, inputs: PeerInputs) -> list[Call]:
        """One call for each of ``inputs.streamed``; everything that needs to be done only once is done here."""


class Timer(ABC):
    """Runs calls on a device."""

    device: str
    l2_bytes: int
    free_bytes: int

    @abstractmethod
    def samples_us(self, calls: Sequence[Call], rounds: int) -> list[float]:
        """Microseconds a call, in each of several replays of ``rounds`` times all calls."""


@dataclass(frozen=True)
class PeerTime:
    """A peer at one call, in microseconds; without times where ``reason`` says what went wrong."""

    peer: str
    layout: str
    point: Mapping[str, int]
    time_us: float | None = None
    time_us_min: float | None = None
    time_us_max: float | None = None
    relative_error: float | None = None
    reason: str = ""


def time_peers(
    spec: Spec, peers: Sequence[Peer], timer: Timer, target: Target, calls: Iterable[BenchCall]
) -> Iterator[PeerTime]:
    """Every peer at every call; an exception of a peer is its result there."""
    for name, point in calls:
        for peer in peers:
            try:
                yield _time_peer(spec, peer, timer, target, name, point)
            except Exception as error:  # noqa: BLE001 - what another's code raises is not ours to know
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                yield PeerTime(peer.name, name, dict(point), reason=reason)


def _time_peer(spec: Spec, peer: Peer, timer: Timer, target: Target, layout_name: str, point: Point) -> PeerTime:
    family, layout = spec.family, spec.layout(layout_name)
    case = family.point_case(point)
    arrays = family.make_inputs(layout, case, seed=0)
    if peer.computes == "chain":
        arrays["tree_mask"] = None
    inputs = _on_device(family, layout, point, arrays, timer)
    calls = peer.calls(inputs)
    calls[0]()
    rows = family.sample_rows(layout, case, arrays, REFERENCE_FLOP)
    expected = family.reference(layout, case, arrays, rows)[peer.output]
    found = inputs.out.float().cpu().numpy().reshape(-1, *expected.shape[1:])[rows]
    result = compare(
        found.astype(np.float64), expected, spec.tolerances[peer.output], name=case.name, seed=0, output=peer.output
    )
    if not result.ok:
        return PeerTime(peer.name, layout_name, dict(point), reason=f"wrong result: {result.reason}")
    work = family.work(layout, point)
    floor = floor_us(target, flop=work.flop, bytes_moved=work.bytes)
    samples = timer.samples_us(calls, launches_per_replay(len(calls), floor) // len(calls))
    timed = summarise(point, samples)
    times_us = timed.time_us, timed.time_us_min, timed.time_us_max
    return PeerTime(peer.name, layout_name, dict(point), *times_us, float(result.relative_l2))


def _on_device(
    family: Family, layout: Layout, point: Point, arrays: Mapping[str, Array | None], timer: Timer
) -> PeerInputs:
    tensors = {name: tensor_of(array, timer.device) for name, array in arrays.items() if array is not None}
    streamed = {name: tensors[name] for name in family.streamed}
    size = sum(tensor.numel() * tensor.element_size() for tensor in streamed.values())
    copies = input_sets(size, timer.l2_bytes, timer.free_bytes // 4)
    sets = [streamed, *({name: tensor.clone() for name, tensor in streamed.items()} for _ in range(copies - 1))]
    outputs = family.output_arrays(layout, family.point_case(point), arrays)
    first = next(array for array in outputs.values() if array is not None)
    return PeerInputs(family, layout, point, tensors, sets, tensor_of(first, timer.device))


def tensor_of(array: Array, device: str) -> Any:
    """A torch tensor of an array, on a CPU over the same memory.

    16-bit words are bf16, bytes are e4m3, and 32-bit words keep their bits.
    """
    import torch

    if array.dtype == np.uint8:
        return torch.from_numpy(array).to(device).view(torch.float8_e4m3fn)
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).to(device)
