"""Verify steps of a small model on one attention backend, from an empty pool: kgen, stock or float32 torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang_graphs import VerifyGraphs
from sglang_server import LATENT, STOCK_MOVE, active, backends
from sglang_speculation import Speculation


class ExactBackend(TritonAttnBackend):  # type: ignore[misc]
    """Verify in float32 torch: the judge where the two backends' tokens differ."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch)
        pool, table = self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.req_to_token
        pool[forward_batch.out_cache_loc] = k
        nodes = q.shape[0] // forward_batch.batch_size
        mask, start, outputs = forward_batch.spec_info.custom_mask, 0, []
        for index, prefix in enumerate(forward_batch.seq_lens_cpu.tolist()):
            cells = nodes * (prefix + nodes)
            seen = mask[start : start + cells].view(nodes, prefix + nodes)
            start += cells
            slots = table[forward_batch.req_pool_indices[index], : prefix + nodes].long()
            keys = pool[slots, 0].float()
            score = torch.einsum("nhd,kd->hnk", q[index * nodes : (index + 1) * nodes].float(), keys) * layer.scaling
            weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hnk,kd->nhd", weight, keys[:, :LATENT]).flatten(1))
        return torch.cat(outputs).to(q.dtype)


class Eager:
    """A verify without a graph."""

    def __init__(self, backend: Any, model: Any) -> None:
        self._backend, self._model = backend, model

    def __call__(self, batch: Any) -> Any:
        with active(self._backend):
            self._backend.init_forward_metadata(batch)
            return self._model(batch)


@contextmanager
def moves_of(name: str, runner: Any) -> Iterator[None]:
    """Kgen's hook is around the pool's method; the others take the method from before."""
    pool = runner.token_to_kv_pool
    if name != "kgen":
        pool.move_kv_cache = MethodType(STOCK_MOVE, pool)
    try:
        yield
    finally:
        vars(pool).pop("move_kv_cache", None)


def decode(
    name: str, runner: Any, model: Any, speculation: Speculation, *, nodes: int, steps: int, seed: int, sizes: list[int]
) -> tuple[list[tuple[Any, Any]], Any]:
    """The verify steps of one backend from an empty pool: what each step said, and the backend."""
    torch.manual_seed(seed)
    for layer in runner.token_to_kv_pool.kv_buffer:
        layer.zero_()
    exact = name == "exact"
    backend = ExactBackend(runner) if exact else backends(runner)[name]
    with moves_of(name, runner):
        forward: Callable[[Any], Any] = (
            Eager(backend, model) if exact else VerifyGraphs(runner, backend, model, nodes=nodes, sizes=sizes)
        )
        speculation.prefill(backend, model)
        random = np.random.default_rng(seed)
        said = [speculation.step(forward, random) for _ in range(steps)]
    return said, backend
