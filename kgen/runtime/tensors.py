"""Checks of torch tensors against what a kernel expects; every error names the tensor. torch is never imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.binding import TensorRule
from kgen.errors import TensorError
from kgen.runtime.pointer_table import PointerTable
from kgen.runtime.regions import ALIGNMENT_BYTES, Region

REMEMBERED_FORMS = 1024


class TensorChecker:
    """Checks the tensors of calls on one device. ``dtypes`` are torch's dtypes by name.

    Calls repeat the same shapes, so what was found of a shape is remembered; addresses are always checked.
    """

    def __init__(self, rules: Sequence[TensorRule], device: Any, dtypes: Mapping[str, Any]) -> None:
        self._rules, self._device = tuple(rules), device
        self._dtypes = {rule.name: tuple(dtypes[name] for name in rule.dtypes) for rule in rules}
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def check(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Region]:
        """The regions of all tensors that are not None. Raises TensorError, also if an output shares memory."""
        regions, required = [], tuple(sizes.values())
        tables: list[PointerTable] = []
        for rule in self._rules:
            tensor = tensors[rule.name]
            if rule.table:
                tables.append(self._check_table(rule, tensor))
            elif tensor is not None:
                regions.append(self._check(rule, tensor, sizes, required))
            elif not rule.optional:
                raise TensorError(rule.name, "is missing")
        for output in regions:
            if output.writable:
                _check_overlap(output, regions)
        for table in tables:
            table.check_apart(regions)
            regions += table.regions
        return regions

    def _check_table(self, rule: TensorRule, table: Any) -> PointerTable:
        if not isinstance(table, PointerTable):
            raise TensorError(rule.name, "is no PointerTable", seen=type(table).__name__)
        if table.device != self._device:
            wrong = f"must be on {self._device}, which the call was prepared for"
            raise TensorError(rule.name, wrong, seen=f"is on {table.device}")
        return table

    def _check(self, rule: TensorRule, tensor: Any, sizes: Mapping[str, int], required: tuple[int, ...]) -> Region:
        try:
            form = (rule.name, required, tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        except AttributeError:
            raise TensorError(rule.name, "is not a torch tensor", seen=type(tensor).__name__) from None
        known = self._known.get(form)
        if known is None:
            known = self._measure(rule, tensor, sizes)
            if len(self._known) >= REMEMBERED_FORMS:
                self._known.clear()
            self._known[form] = known
        row_bytes, size_bytes = known
        address = tensor.data_ptr()
        if rule.aligned and (address % ALIGNMENT_BYTES or row_bytes % ALIGNMENT_BYTES):
            seen = f"address {address:#x}, {row_bytes} bytes from row to row"
            raise TensorError(rule.name, f"is not aligned to {ALIGNMENT_BYTES} bytes", seen=seen, remedy="copy it")
        return Region(rule.name, address, size_bytes, rule.writable)

    def _measure(self, rule: TensorRule, tensor: Any, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Bytes from row to row, and from the first byte to the last, of a tensor that is right but for its address."""
        if tensor.dtype not in self._dtypes[rule.name]:
            raise TensorError(rule.name, f"must have dtype {' or '.join(rule.dtypes)}", seen=str(tensor.dtype))
        if tensor.device != self._device:
            wrong = f"must be on {self._device}, which the call was prepared for"
            raise TensorError(rule.name, wrong, seen=f"is on {tensor.device}")
        shape = tuple(tensor.shape)
        if not _fits(shape, rule.shape, sizes):
            want = ", ".join(str(sizes.get(name, name)) for name in rule.shape)
            raise TensorError(rule.name, f"must have shape [{want}]", seen=f"has {list(shape)}")
        elements, itemsize = tensor.numel(), tensor.element_size()
        if not elements:
            return 0, 0
        row_elements = elements // shape[0]
        row_bytes = itemsize * (row_elements if tensor.is_contiguous() else _row_stride(rule, tensor, row_elements))
        return row_bytes, (shape[0] - 1) * row_bytes + row_elements * itemsize


def _fits(shape: tuple[int, ...], names: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    if "1?" in names and len(shape) != len(names):
        names = tuple(name for name in names if name != "1?")
    if len(shape) != len(names):
        return False
    return all((1 if name == "1?" else sizes.get(name, got)) == got for name, got in zip(names, shape, strict=True))


def _row_stride(rule: TensorRule, tensor: Any, row_elements: int) -> int:
    """Elements from one row to the next of a tensor that is not contiguous as a whole."""
    stride = int(tensor.stride(0))
    if not rule.rows_apart or not tensor[:1].is_contiguous() or stride < row_elements:
        wrong = "must have contiguous rows" if rule.rows_apart else "must be contiguous"
        raise TensorError(rule.name, wrong, seen=f"has strides {list(tensor.stride())}", remedy="copy it")
    return stride


def _check_overlap(output: Region, regions: Sequence[Region]) -> None:
    first, end = output.address, output.address + output.size_bytes
    for other in regions:
        if first < other.address + other.size_bytes and other.address < end and other is not output:
            raise TensorError(output.name, f"shares memory with {other.name}", remedy="give it memory of its own")
