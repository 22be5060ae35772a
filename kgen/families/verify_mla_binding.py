"""How a caller's tensors become the parameters of a verify_mla call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar

from kgen.binding import Binding, Sizes, TensorRule
from kgen.errors import TensorError
from kgen.family import Layout, Point

INDEX_ARRAYS = ("kv_indices", "kv_indptr", "qo_indptr", "draft_slots")  # their places are bits of wide_indices
INDEX_DTYPES = ("int32", "int64")
ELEMENT_BYTES = {"bf16": 2, "e4m3": 1}  # of the dtypes that a layout's KV rows can have
TORCH_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
LOG2_E = math.log2(math.e)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def call_scalars(
    arrays: Mapping[str, Any],
    *,
    wide: Iterable[bool],
    kv_stride_bytes: int,
    batch: int,
    heads: int,
    scale: float,
    kv_scale: float,
) -> dict[str, int | float]:
    """The parameters that a call's arrays or tensors decide; ``wide`` says which of `INDEX_ARRAYS` are int64."""
    mask = arrays["tree_mask"]
    return {
        "kv_stride_bytes": kv_stride_bytes,
        "batch": batch,
        "heads": heads,
        "mask_words": 0 if mask is None else mask.shape[1],
        "wide_indices": sum(is_wide << bit for bit, is_wide in enumerate(wide)),
        "scale_log2": scale * kv_scale * LOG2_E,
        "kv_scale": kv_scale,
    }


def softmax_scale(layout: Layout) -> float:
    """1/sqrt(scale_dim): 192 for DeepSeek-V3, whose unabsorbed heads are 128 + 64 wide."""
    return 1.0 / math.sqrt(int(layout["scale_dim"]))


class VerifyMlaBinding(Binding):
    """The tensors and the options of a call.

    KV tensors have the layout's dtype, all others are bfloat16 or what `rules` say. ``scale`` is of the softmax
    (1/sqrt(scale_dim) of the layout by default); ``kv_scale`` (1 by default) is what all KV elements are multiplied by:
    the scale of an fp8 cache. ``nodes`` is a promise that no request has
    more tree nodes, which keeps grids small; by default it is what the mask has bits for, within the capacity.
    """

    options: ClassVar[tuple[str, ...]] = ("scale", "kv_scale", "nodes")
    plan_axes: ClassVar[tuple[str, ...]] = ("batch", "nodes")
    lengths: ClassVar[tuple[str, ...]] = ("kv_indptr", "qo_indptr")

    def __init__(self, layout: Layout, capacity: Point) -> None:
        self._capacity = capacity
        latent = int(layout["latent"])
        self._fixed = {"heads": int(layout["heads"]), "latent": latent, "head_dim": latent + int(layout["rope"])}
        self._scale = softmax_scale(layout)
        kv_dtypes = (TORCH_DTYPES[str(layout["dtype"])],)
        self.rules = (
            TensorRule("q", ("bfloat16",), ("tokens", "heads", "head_dim"), aligned=True),
            TensorRule("kv_pool", kv_dtypes, ("slots", "1?", "head_dim"), rows_apart=True, aligned=True),
            TensorRule("draft_kv", kv_dtypes, ("tokens", "1?", "head_dim"), optional=True, aligned=True),
            TensorRule("kv_indices", INDEX_DTYPES, ("entries",)),
            TensorRule("kv_indptr", INDEX_DTYPES, ("batch + 1",)),
            TensorRule("qo_indptr", INDEX_DTYPES, ("batch + 1",)),
            TensorRule("draft_slots", INDEX_DTYPES, ("tokens",), optional=True),
            TensorRule("tree_mask", ("int32",), ("tokens", "words"), optional=True),
            TensorRule("out", ("bfloat16",), ("tokens", "heads", "latent"), aligned=True, writable=True),
            TensorRule("lse", ("float32",), ("tokens", "heads"), optional=True, writable=True),
        )

    def sizes(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """Tokens of ``q`` and requests of ``kv_indptr``, within the prepared capacity."""
        tokens, batch = _rows("q", tensors["q"]), _rows("kv_indptr", tensors["kv_indptr"]) - 1
        if not 0 <= batch <= self._capacity["batch"]:
            seen = f"{batch} requests, prepared for {self._capacity['batch']}"
            raise TensorError("kv_indptr", "must have one more entry than there are requests", seen=seen)
        nodes = options["nodes"]
        most = self._most_nodes(tensors["tree_mask"], nodes)
        if tokens > batch * most:
            raise TensorError("q", "has too many tokens", seen=f"{tokens} for {batch} requests of at most {most} nodes")
        average = -(-tokens // batch) if batch else 0
        return Sizes(
            dimensions={"tokens": tokens, "batch + 1": batch + 1, **self._fixed},
            point={"batch": batch, "nodes": average if nodes is None else nodes},
            extents={"batch": batch, "nodes": most},
            is_empty=tokens == 0,
        )

    def _most_nodes(self, mask: Any, promised: Any) -> int:
        """How many tree nodes a request may have in this call."""
        capacity = self._capacity["nodes"]
        shape: tuple[int, ...] = getattr(mask, "shape", ())
        bits = shape[1] * 32 if len(shape) == 2 else capacity  # a mask of another shape is refused later
        if promised is None:
            return min(capacity, bits)
        if not isinstance(promised, Integral):
            raise TensorError("nodes", "must be a whole number", seen=repr(promised))
        nodes = int(promised)
        if not 0 < nodes <= capacity:
            raise TensorError("nodes", "is beyond the capacity", seen=f"{nodes}, prepared for {capacity}")
        if nodes > bits:
            raise TensorError("tree_mask", "has too few words", seen=f"{bits} bits for {nodes} nodes")
        return nodes

    def scalars(self, tensors: Mapping[str, Any], sizes: Sizes, options: Mapping[str, Any]) -> dict[str, int | float]:
        """Strides, counts, the widths of the index tensors and the softmax scale."""
        if (tensors["draft_kv"] is None) == (tensors["draft_slots"] is None):
            seen = "neither" if tensors["draft_kv"] is None else "both"
            raise TensorError("draft_kv", "give either it or draft_slots", seen=seen)
        scale, kv_scale = _finite("scale", options["scale"], self._scale), _finite("kv_scale", options["kv_scale"], 1.0)
        if abs(scale * kv_scale * LOG2_E) > FLOAT32_MAX:
            raise TensorError("scale", "is too large for a float32 with kv_scale", seen=f"{scale:g} x {kv_scale:g}")
        stride_bytes = tensors["kv_pool"].stride(0) * tensors["kv_pool"].element_size()
        if stride_bytes >= 1 << 31:
            raise TensorError("kv_pool", "has rows too far apart for an int32", seen=f"{stride_bytes} bytes")
        return call_scalars(
            tensors,
            wide=[tensor is not None and tensor.element_size() == 8 for tensor in map(tensors.get, INDEX_ARRAYS)],
            kv_stride_bytes=stride_bytes,
            batch=sizes.extents["batch"],
            heads=self._fixed["heads"],
            scale=scale,
            kv_scale=kv_scale,
        )

    def check_content(self, tensors: Mapping[str, Any], sizes: Sizes) -> None:
        """Offsets must rise from 0 and end in their tensors; slots must be in the pool, lengths within capacity."""
        slots = tensors["kv_pool"].shape[0]
        prefixes = _lengths("kv_indptr", tensors["kv_indptr"])
        nodes = _lengths("qo_indptr", tensors["qo_indptr"])
        for name, lengths, limit in (
            ("kv_indptr", prefixes, self._capacity["prefix"]),
            ("qo_indptr", nodes, sizes.extents["nodes"]),
        ):
            if max(lengths, default=0) > limit:
                raise TensorError(name, f"has a request longer than {limit}", seen=str(max(lengths)))
        tokens = sizes.dimensions["tokens"]
        if sum(nodes) != tokens:
            raise TensorError("qo_indptr", "must end at the number of tokens", seen=f"{sum(nodes)} instead of {tokens}")
        entries = tensors["kv_indices"].shape[0]
        if sum(prefixes) > entries:
            seen = f"{sum(prefixes)}, but kv_indices has {entries} entries"
            raise TensorError("kv_indptr", "ends beyond kv_indices", seen=seen)
        _check_slots("kv_indices", tensors["kv_indices"][: sum(prefixes)], slots)
        if tensors["draft_slots"] is not None:
            _check_slots("draft_slots", tensors["draft_slots"], slots)


def _finite(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if not isinstance(value, Real) or not math.isfinite(value) or abs(float(value)) > FLOAT32_MAX:
        raise TensorError(name, "must be a finite float32", seen=repr(value))
    return float(value)


def _rows(name: str, tensor: Any) -> int:
    """The first dimension of a tensor whose other properties are checked later."""
    shape: tuple[int, ...] = getattr(tensor, "shape", ())
    if len(shape) == 0:
        raise TensorError(name, "is not a torch tensor with dimensions", seen=type(tensor).__name__)
    return int(shape[0])


def _lengths(name: str, offsets: Any) -> list[int]:
    values: list[int] = offsets.tolist()
    lengths = [after - before for before, after in pairwise(values)]
    if values[0] != 0 or min(lengths, default=0) < 0:
        raise TensorError(name, "must start at 0 and never fall", seen=str(values[:8]))
    return lengths


def _check_slots(name: str, slots: Any, limit: int) -> None:
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= limit:
            seen = f"{low if low < 0 else high} for {limit} rows"
            raise TensorError(name, "points outside kv_pool", seen=seen)
