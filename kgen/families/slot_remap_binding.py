"""The tensors of a slot_remap call as its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kgen.binding import Binding, Point, Sizes, TensorRule
from kgen.errors import InputError, TensorError

WIDE_ARRAYS = ("lengths", "slot_list")  # their places are bits of wide
SLOT_DTYPES = ("int32", "int64")
VECTOR_BYTES = 16
SHORT_LIST = 4  # times as many tokens as entries, or more
MOST_ELEMENTS = 1 << 29  # of a row or a list: kernels count in int32, and up to three times as far


def call_scalars(
    *, row_stride: int, requests: int, context: int, slots: int, entries: int, wide: list[bool], whole: list[bool]
) -> dict[str, int | float]:
    """Parameters that say what the arrays are; ``wide`` and ``whole`` have a flag for each bit of their sets."""
    return {
        "row_stride": row_stride,
        "requests": requests,
        "context": context,
        "slots": slots,
        "entries": entries,
        "wide": sum(flag << bit for bit, flag in enumerate(wide)),
        "whole_vectors": sum(flag << bit for bit, flag in enumerate(whole)),
    }


def _listed(tokens: int, entries: int) -> int:
    """The list that a kernel is chosen for: one that is short beside the tokens counts as a single entry."""
    return entries if entries * SHORT_LIST > tokens else 1


def _extent(tensor: Any, dimension: int) -> int:
    """A dimension of a tensor that may be left out, and whose other properties are checked later; 0 without one."""
    shape: tuple[int, ...] = getattr(tensor, "shape", ())
    return int(shape[dimension]) if dimension < len(shape) else 0


class SlotRemapBinding(Binding):
    """The tensors of a call: ``req_to_token`` with ``lengths``, a flat ``slot_list``, or both."""

    rules = (
        TensorRule("slot_map", ("int32",), ("slots",)),
        TensorRule("lengths", SLOT_DTYPES, ("requests",), optional=True),
        TensorRule("req_to_token", ("int32",), ("requests", "context"), optional=True, rows_apart=True, writable=True),
        TensorRule("slot_list", SLOT_DTYPES, ("entries",), optional=True, writable=True),
    )
    options: ClassVar[tuple[str, ...]] = ()
    plan_axes: ClassVar[tuple[str, ...]] = ("requests", "entries")

    def __init__(self, capacity: Point) -> None:
        """Raises InputError for a capacity that the kernels cannot count to."""
        for axis in ("context", "entries"):
            if capacity[axis] > MOST_ELEMENTS:
                raise InputError("capacity", f"has more {axis} than {MOST_ELEMENTS}", seen=str(capacity[axis]))
        self._capacity = capacity

    def sizes(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """Requests and context of ``req_to_token``, entries of ``slot_list``, within the prepared capacity."""
        if (tensors["req_to_token"] is None) != (tensors["lengths"] is None):
            raise TensorError("lengths", "goes with req_to_token", seen="one of the two is missing")
        requests, context = (_extent(tensors["req_to_token"], dimension) for dimension in (0, 1))
        entries = _extent(tensors["slot_list"], 0)
        for axis, name, size in (
            ("requests", "req_to_token", requests),
            ("context", "req_to_token", context),
            ("entries", "slot_list", entries),
        ):
            if size > self._capacity[axis]:
                seen = f"{size}, prepared for {self._capacity[axis]}"
                raise TensorError(name, f"has too many {axis}", seen=seen)
        return Sizes(
            dimensions={"requests": requests, "context": context, "entries": entries},
            point={"requests": requests, "context": context, "entries": _listed(requests * context, entries)},
            extents={"requests": requests, "entries": entries},
            is_empty=requests * context + entries == 0,
        )

    def scalars(self, tensors: Mapping[str, Any], sizes: Sizes, options: Mapping[str, Any]) -> dict[str, int | float]:
        """Counts, strides, the widths of the tensors, and which of them are aligned."""
        tokens, entries = tensors["req_to_token"], tensors["slot_list"]
        stride = 0 if tokens is None else int(tokens.stride(0))
        return call_scalars(
            row_stride=stride,
            requests=sizes.dimensions["requests"],
            context=sizes.dimensions["context"],
            slots=tensors["slot_map"].shape[0],
            entries=sizes.dimensions["entries"],
            wide=[tensor is not None and tensor.element_size() == 8 for tensor in map(tensors.get, WIDE_ARRAYS)],
            whole=[
                tokens is not None and tokens.data_ptr() % VECTOR_BYTES == 0 and stride * 4 % VECTOR_BYTES == 0,
                entries is not None and entries.data_ptr() % VECTOR_BYTES == 0,
            ],
        )

    def check_content(self, tensors: Mapping[str, Any], sizes: Sizes) -> None:
        """Lengths must be within the rows, and the map within itself."""
        slot_map, lengths = tensors["slot_map"], tensors["lengths"]
        if slot_map.numel() and not 0 <= int(slot_map.min()) <= int(slot_map.max()) < slot_map.shape[0]:
            seen = f"{int(slot_map.min())} to {int(slot_map.max())} for {slot_map.shape[0]} slots"
            raise TensorError("slot_map", "points outside the pool", seen=seen)
        if lengths is not None and lengths.numel():
            context = sizes.dimensions["context"]
            if not 0 <= int(lengths.min()) <= int(lengths.max()) <= context:
                seen = f"{int(lengths.min())} to {int(lengths.max())} for rows of {context}"
                raise TensorError("lengths", "are not those of rows", seen=seen)
