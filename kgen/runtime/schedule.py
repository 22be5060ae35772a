"""What calls with the same lengths share: made by one of them, kept by others, if it is theirs to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kgen.binding import Sizes
from kgen.errors import InputError, TensorError
from kgen.runtime.regions import Region

Schedule = Literal["make", "keep"]
REMEDY = "make it in the first call of a forward"


class ScheduledCall(NamedTuple):
    """What a schedule is made for: it is right for calls with an equal one.

    ``sizes`` are the call's dimensions and extents; ``lengths`` the contents of the tensors that it is made from, in
    checked mode, and else empty.
    """

    variant: str
    sizes: Mapping[str, int]
    lengths: Mapping[str, list[int]]


class SharedSchedule:
    """The schedule of one prepared call. ``regions`` hold it; ``made`` is the latest call that made it.

    It knows calls and not the replays of CUDA graphs that captured them. ``lengths`` names tensors of the call.
    """

    def __init__(self, lengths: Sequence[str], *, checked: bool) -> None:
        self.regions: list[Region] = []
        self.made: ScheduledCall | None = None
        self._lengths = tuple(lengths) if checked else ()

    def check_argument(self, schedule: object) -> None:
        """InputError unless the call has something to share and was told what to do with it."""
        if not self.regions:
            raise InputError("schedule", "is no argument of this call", seen=repr(schedule), remedy="leave it out")
        if schedule not in ("make", "keep"):
            raise InputError("schedule", "must be make, keep or None", seen=repr(schedule))

    def call(self, variant: str, sizes: Sizes, tensors: Mapping[str, Any]) -> ScheduledCall:
        """What a call needs; in checked mode this waits for the device."""
        lengths = {name: tensors[name].tolist() for name in self._lengths}
        return ScheduledCall(variant, {**sizes.dimensions, **sizes.extents}, lengths)

    def require(self, call: ScheduledCall) -> None:
        """InputError where there is no schedule of this variant and these sizes, TensorError where lengths differ."""
        made = self.made
        if made is None:
            raise InputError("schedule", "cannot be kept, no call has made one", remedy=REMEDY)
        if made.sizes != call.sizes:
            changed = [name for name, size in call.sizes.items() if size != made.sizes[name]]
            seen = "; ".join(f"{name} {call.sizes[name]}, then {made.sizes[name]}" for name in changed)
            raise InputError("schedule", "cannot be kept, it was made for other sizes", seen=seen, remedy=REMEDY)
        if made.variant != call.variant:
            seen = f"{call.variant}, then {made.variant}"
            raise InputError("schedule", "cannot be kept, it was made for another variant", seen=seen, remedy=REMEDY)
        for name, lengths in call.lengths.items():
            if lengths != made.lengths[name]:
                seen = f"{lengths[:8]}, then {made.lengths[name][:8]}"
                raise TensorError(name, "has changed since the kept schedule was made", seen=seen, remedy=REMEDY)
