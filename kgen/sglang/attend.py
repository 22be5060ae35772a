"""`verify_mla` prepared for a server: its head layout, its largest batch, its trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.errors import InputError, LayoutMissingError
from kgen.runtime import Pack, PreparedCall, prepare
from kgen.sglang.environment import positive_number

PREFIX_VARIABLE = "KGEN_EXPECTED_PREFIX"
DEFAULT_PREFIX = 16384


class VerifyAttention:
    """The prepared call. ``shape`` is (heads, latent + rope, latent); ``batch`` and ``nodes`` bound what it takes.

    The batch is halved until its largest launch is one that CUDA takes. Slots reach the kernel through ``kv_indices``
    whatever the page size, so a page size that was not tuned takes the layout of page size 1. Raises KgenError.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        heads: int,
        latent: int,
        rope: int,
        page_size: int,
        capacity: Mapping[str, int],
        device: Any,
    ) -> None:
        self.shape = heads, latent + rope, latent
        self._prefix = positive_number(PREFIX_VARIABLE, DEFAULT_PREFIX)
        self.batch, self.nodes = capacity["batch"], capacity["nodes"]
        layout: dict[str, int | str] = {"heads": heads, "latent": latent, "rope": rope, "dtype": "bf16"}
        self._call = self._prepare(pack, {**layout, "page_size": page_size}, capacity, device)
        if not self._call.table.packed.buckets and page_size != 1:
            self._call = self._prepare(pack, {**layout, "page_size": 1}, capacity, device)
        self.layout_name = self._call.table.layout_name

    def _prepare(
        self, pack: Pack, layout: Mapping[str, int | str], capacity: Mapping[str, int], device: Any
    ) -> PreparedCall:
        while True:
            try:
                return prepare(
                    pack,
                    family="verify_mla",
                    layout=layout,
                    capacity={**capacity, "batch": self.batch},
                    device=device,
                )
            except LayoutMissingError:
                if layout["page_size"] == 1:
                    raise
                layout = {**layout, "page_size": 1}
            except InputError:
                if self.batch == 1:
                    raise
                self.batch //= 2

    def __call__(self, **arguments: Any) -> None:
        """Launch; see docs/pack.md for the arguments."""
        self._call(**arguments)

    @property
    def how(self) -> str:
        """How the latest call was matched: exact, bucket or default."""
        return self._call.last.how

    def expected_prefix(self, forward_batch: Any) -> int:
        """The prefix that a variant is chosen for, from the host alone: the batch's mean, or $KGEN_EXPECTED_PREFIX.

        A captured graph is made before there is traffic, with prefixes of 1, and keeps its variant: it gets the latter.
        """
        import torch

        on_gpu = forward_batch.seq_lens.is_cuda
        total = None if on_gpu and torch.cuda.is_current_stream_capturing() else forward_batch.seq_lens_sum
        if total is None:
            return self._prefix
        return max(1, int(total) // max(1, int(forward_batch.batch_size)))
