"""The tensors of a kv_defrag call: which are refused, and how the others become parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kgen.binding import Binding, Sizes, TensorRule
from kgen.errors import TensorError
from kgen.family import Layout, Point

SLOT_ARRAYS = ("src_slots", "dst_slots")  # their places are bits of wide_slots
SLOT_DTYPES = ("int32", "int64")


class KvDefragBinding(Binding):
    """The tensors of a call.

    ``layer_ptrs`` is a `kgen.runtime.PointerTable` of the layers, each [slots, ...] with ``row_bytes`` bytes a slot.
    ``count`` (int32 [1], on the device) says how many entries of the slot lists to do; all where it is left out.
    """

    rules: ClassVar[tuple[TensorRule, ...]] = (
        TensorRule("layer_ptrs", (), ("layers",), table=True),
        TensorRule("src_slots", SLOT_DTYPES, ("moves",)),
        TensorRule("dst_slots", SLOT_DTYPES, ("moves",)),
        TensorRule("count", ("int32",), ("1",), optional=True),
    )
    options: ClassVar[tuple[str, ...]] = ()
    plan_axes: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(self, layout: Layout, capacity: Point) -> None:
        self._capacity = capacity
        self._row_bytes, self._apart = int(layout["row_bytes"]), layout["moves"] == "disjoint"

    def sizes(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """Layers and row bytes of the pool, entries of ``src_slots``, within the prepared capacity."""
        table = tensors["layer_ptrs"]
        layers, row_bytes = getattr(table, "entries", None), getattr(table, "row_bytes", None)
        if layers is None:
            seen = type(table).__name__
            raise TensorError("layer_ptrs", "is no PointerTable", seen=seen, remedy="kgen.runtime.PointerTable(layers)")
        if row_bytes != self._row_bytes:
            wrong = f"must have rows of {self._row_bytes} bytes, which the call was prepared for"
            raise TensorError("layer_ptrs", wrong, seen=f"{row_bytes} bytes")
        if not 0 < layers <= self._capacity["layers"]:
            seen = f"{layers}, prepared for {self._capacity['layers']}"
            raise TensorError("layer_ptrs", "has too many layers", seen=seen)
        shape: tuple[int, ...] = getattr(tensors["src_slots"], "shape", ())
        moves = int(shape[0]) if len(shape) == 1 else 0  # a tensor of another shape is refused later
        if moves > self._capacity["rows"]:
            seen = f"{moves}, prepared for {self._capacity['rows']}"
            raise TensorError("src_slots", "has too many moves", seen=seen, remedy="split them, or prepare for more")
        return Sizes(
            dimensions={"layers": layers, "moves": moves, "1": 1},
            point={"layers": layers, "rows": moves},
            extents={"rows": moves},
            is_empty=moves == 0,
        )

    def scalars(self, tensors: Mapping[str, Any], sizes: Sizes, options: Mapping[str, Any]) -> dict[str, int | float]:
        """Shape and stride of the pool, length and width of the slot lists."""
        table = tensors["layer_ptrs"]
        return {
            "row_stride": table.row_stride_bytes,
            "row_bytes": table.row_bytes,
            "layers": table.entries,
            "slots": table.rows,
            "moves": sizes.dimensions["moves"],
            "wide_slots": sum((tensors[name].element_size() == 8) << bit for bit, name in enumerate(SLOT_ARRAYS)),
        }

    def check_content(self, tensors: Mapping[str, Any], sizes: Sizes) -> None:
        """Counts within the lists, slots within the pool, no destination twice, and apart where that was promised."""
        given = tensors["count"]
        count = sizes.dimensions["moves"] if given is None else int(given.item())
        if not 0 <= count <= sizes.dimensions["moves"]:
            raise TensorError("count", "is beyond the slot lists", seen=f"{count} of {sizes.dimensions['moves']}")
        source, target = (tensors[name][:count].cpu().numpy().astype(np.int64) for name in SLOT_ARRAYS)
        check_moves(source, target, slots=tensors["layer_ptrs"].rows, apart=self._apart)


def check_moves(source: Any, target: Any, *, slots: int, apart: bool) -> None:
    """Raise TensorError where moves (int64 arrays) are not what the kernels take.

    Slots must be in the pool; destinations of rows that do move must differ, and with ``apart`` be no sources.
    """
    for name, values in (("src_slots", source), ("dst_slots", target)):
        outside = values[(values < 0) | (values >= slots)]
        if outside.size:
            raise TensorError(name, "points outside the pool", seen=f"slot {outside[0]} of {slots}")
    moving = source != target
    found, times = np.unique(target[moving], return_counts=True)
    if (times > 1).any():
        raise TensorError("dst_slots", "has a destination twice", seen=f"slot {found[times > 1][0]}")
    shared = np.intersect1d(found, source[moving]) if apart else found[:0]
    if shared.size:
        wrong, remedy = "overwrites a source of a disjoint move", "use a layout with moves: any"
        raise TensorError("dst_slots", wrong, seen=f"slot {shared[0]}", remedy=remedy)
