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
    whatever the page size, so a page size that was not tuned takes the layout of page size 1. ``kv_dtype`` is that of
    the pool's rows, bf16 or e4m3. Raises KgenError.

    The first call of a forward makes a schedule of its lengths, and those that are like it keep it.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        heads: int,
        latent: int,
        rope: int,
        page_size: int,
        kv_dtype: str,
        capacity: Mapping[str, int],
        device: Any,
    ) -> None:
        self.shape, self.kv_dtype = (heads, latent + rope, latent), kv_dtype
        self._prefix = positive_number(PREFIX_VARIABLE, DEFAULT_PREFIX)
        self.batch, self.nodes = capacity["batch"], capacity["nodes"]
        layout: dict[str, int | str] = {"heads": heads, "latent": latent, "rope": rope, "dtype": kv_dtype}
        self._call = self._prepare(pack, {**layout, "page_size": page_size}, capacity, device)
        if not self._call.table.packed.buckets and page_size != 1:
            self._call = self._prepare(pack, {**layout, "page_size": 1}, capacity, device)
        self.layout_name = self._call.table.layout_name
        self._scheduled: tuple[int, ...] = ()  # the sizes and the hint of the call that made the schedule

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

    def begin_forward(self) -> None:
        """The next call is of another forward, or of another run of a graph: lengths are not those of before."""
        self._scheduled = ()

    def __call__(self, *, q: Any, kv_indptr: Any, nodes: int, prefix: int, **arguments: Any) -> None:
        """Launch, by the variant for ``prefix``; see docs/pack.md for the other arguments."""
        like = *q.shape, *kv_indptr.shape, nodes, prefix
        kept = like == self._scheduled
        self._scheduled = ()
        self._call(
            **arguments,
            q=q,
            kv_indptr=kv_indptr,
            nodes=nodes,
            hint={"prefix": prefix},
            schedule="keep" if kept else "make",
        )
        self._scheduled = like

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
