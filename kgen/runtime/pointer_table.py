"""A table of the addresses of a pool's layers, for kernels that work on all of them in one launch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kgen.errors import TensorError
from kgen.runtime.regions import ALIGNMENT_BYTES, Region


class PointerTable:
    """The addresses (uint64 [entries], on the device) of tensors of equal form, each [rows, ...] with contiguous rows.

    Made once, before calls are captured, and kept as long as they are used: it holds the tensors. ``name`` is the
    parameter that it is given for. ``row_bytes`` is the size of a row, ``row_stride_bytes`` what lies from one to the
    next. ``pointers`` is a table that the caller already has on the device (SGLang's ``data_ptrs``); its content is
    then compared once. Raises TensorError for tensors that differ, share memory, or are not aligned to 16 bytes.
    """

    def __init__(self, tensors: Sequence[Any], name: str = "layer_ptrs", pointers: Any = None) -> None:
        import torch

        if not tensors:
            raise TensorError(name, "has no tensors")
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TensorError(f"{name}[{index}]", "is no torch tensor", seen=type(tensor).__name__)
        first = tensors[0]
        self.name, self.tensors, self.device = name, tuple(tensors), first.device
        self.entries, self.rows = len(tensors), int(first.shape[0]) if first.dim() else 0
        self.row_bytes, self.row_stride_bytes = _row_form(name, first)
        for index, tensor in enumerate(tensors):
            _check_like(f"{name}[{index}]", tensor, first)
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.pointers = self._on_device(addresses, pointers)
        size = (self.rows - 1) * self.row_stride_bytes + self.row_bytes
        layers = [Region(f"{name}[{i}]", address, size, writable=True) for i, address in enumerate(addresses)]
        self.regions = (Region(name, self.pointers.data_ptr(), self.entries * 8, writable=False), *layers)
        self._sorted = sorted(layers, key=lambda region: region.address)
        self._starts = [region.address for region in self._sorted]
        for before, after in zip(self._sorted, self._sorted[1:], strict=False):
            if before.address + size > after.address:
                raise TensorError(after.name, f"shares memory with {before.name}")

    def _on_device(self, addresses: list[int], pointers: Any) -> Any:
        """The addresses on the device: ``pointers`` if they hold them as kernels read them, new ones if None."""
        import torch

        if pointers is None:
            return torch.tensor(addresses, dtype=torch.int64).to(self.device)
        if pointers.dtype not in (torch.uint64, torch.int64) or pointers.device != self.device:
            seen = f"{pointers.dtype} on {pointers.device}"
            raise TensorError(self.name, f"must have pointers of dtype uint64 on {self.device}", seen=seen)
        if not pointers.is_contiguous():
            raise TensorError(self.name, "must have contiguous pointers", seen=f"has strides {list(pointers.stride())}")
        if pointers.view(torch.int64).tolist() != addresses:
            raise TensorError(self.name, "does not hold the addresses of the tensors", remedy="leave pointers out")
        return pointers

    def check_apart(self, regions: Sequence[Region]) -> None:
        """Raise TensorError for the first of ``regions`` that shares memory with a tensor of the table."""
        for region in regions:
            at = bisect_left(self._starts, region.address + region.size_bytes)
            if at and self._sorted[at - 1].address + self._sorted[at - 1].size_bytes > region.address:
                raise TensorError(region.name, f"shares memory with {self._sorted[at - 1].name}")


def _row_form(name: str, tensor: Any) -> tuple[int, int]:
    """Bytes of a row, and from one to the next, of the tensor that all others must be like."""
    itemsize, rows = tensor.element_size(), tensor.shape[0] if tensor.dim() else 0
    if rows == 0 or tensor.numel() == 0:
        raise TensorError(f"{name}[0]", "must have rows", seen=f"has shape {list(tensor.shape)}")
    row_bytes = tensor.numel() // rows * itemsize
    stride_bytes = row_bytes if rows == 1 else tensor.stride(0) * itemsize
    if not tensor[:1].is_contiguous() or stride_bytes < row_bytes:
        raise TensorError(f"{name}[0]", "must have contiguous rows", seen=f"has strides {list(tensor.stride())}")
    if row_bytes % ALIGNMENT_BYTES or stride_bytes % ALIGNMENT_BYTES:
        seen = f"{row_bytes} bytes, {stride_bytes} from row to row"
        raise TensorError(f"{name}[0]", f"must have rows of a multiple of {ALIGNMENT_BYTES} bytes", seen=seen)
    return row_bytes, stride_bytes


def _check_like(name: str, tensor: Any, first: Any) -> None:
    form, wanted = ((t.dtype, t.device, tuple(t.shape), t.stride()) for t in (tensor, first))
    if form != wanted:
        raise TensorError(name, "differs from the first layer", seen=f"{form} instead of {wanted}")
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        seen = f"address {tensor.data_ptr():#x}"
        raise TensorError(name, f"is not aligned to {ALIGNMENT_BYTES} bytes", seen=seen, remedy="copy it")
