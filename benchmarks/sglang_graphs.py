"""CUDA graphs of a verify forward, captured and replayed the way SGLang's graph runner does it.

The steps are those of `DecodeCudaGraphRunner.capture_one_shape` and `replay`: metadata outside the graph, two warm-up
runs, a capture that begins with the metadata hook inside the graph; then, for each batch, copies into the inputs with
SGLang's padding, its own view of the padded batch, metadata outside the graph, a replay. Without a GPU the forward is
run where a graph would be replayed, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang_server import active, verify_input

WARM_UPS = 2


def verify_batch(
    runner: Any,
    *,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    lengths_cpu: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    mask: torch.Tensor | None,
) -> Any:
    """SGLang's batch of a verify forward; ``lengths`` are the prefixes, ``out_slots`` where the nodes' KV goes."""
    bs, nodes = len(rows), len(input_ids) // len(rows)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=bs, input_ids=input_ids, req_pool_indices=rows,
        seq_lens=lengths, seq_lens_cpu=lengths_cpu, out_cache_loc=out_slots, seq_lens_sum=int(lengths_cpu.sum()),
        positions=positions, spec_info=verify_input(mask, bs, nodes, runner.device),
    )  # fmt: skip
    batch.encoder_lens = None
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


class VerifyGraphs:
    """Graphs of ``forward(batch)`` for each of ``sizes`` requests; ``captured_allocations`` is what a capture took.

    ``forward`` returns tensors that the graph leaves its results in, rows of padding last.
    """

    def __init__(
        self, runner: Any, backend: Any, forward: Callable[[Any], Any], *, nodes: int, sizes: Sequence[int]
    ) -> None:
        self.runner, self.backend, self.nodes = runner, backend, nodes
        self._forward, self._sizes = forward, sorted(sizes)
        self._on_gpu = runner.device == "cuda"
        most, device = max(sizes), runner.device
        self._inputs = SimpleNamespace(
            input_ids=torch.zeros(most * nodes, dtype=torch.int64, device=device),
            positions=torch.zeros(most * nodes, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(most * nodes, dtype=torch.int64, device=device),
            req_pool_indices=torch.zeros(most, dtype=torch.int64, device=device),
            seq_lens=torch.ones(most, dtype=torch.int64, device=device),
            seq_lens_cpu=torch.ones(most, dtype=torch.int64),
            encoder_lens=None,
            mamba_track_indices=None,
        )
        before = _allocated_bytes(self._on_gpu)
        backend.init_cuda_graph_state(max_bs=most, max_num_tokens=most * nodes)
        self.state_bytes = _allocated_bytes(self._on_gpu) - before
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._graphs: dict[int, tuple[Any, Any, Any]] = {}
        self.captured_allocations: dict[int, int] = {}
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)

    def _capture(self, size: int) -> tuple[Any, Any, Any]:
        """(graph, or without a GPU the metadata that it would hold; batch; outputs) for ``size`` requests."""
        inputs, nodes = self._inputs, self.nodes
        batch = verify_batch(
            self.runner,
            rows=inputs.req_pool_indices[:size],
            lengths=inputs.seq_lens[:size],
            lengths_cpu=inputs.seq_lens_cpu[:size],
            input_ids=inputs.input_ids[: size * nodes],
            positions=inputs.positions[: size * nodes],
            out_slots=inputs.out_cache_loc[: size * nodes],
            mask=torch.ones(size * (1 + nodes) * nodes, dtype=torch.bool, device=self.runner.device),
        )
        with active(self.backend):
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for _ in range(WARM_UPS):
            outputs = self._run(batch)
        if not self._on_gpu:
            return self.backend.forward_metadata, batch, outputs
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            outputs = self._run(batch)
            self.captured_allocations[size] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        return graph, batch, outputs

    def _run(self, batch: Any) -> Any:
        with active(self.backend):
            self.backend.init_forward_metadata_in_graph(batch)
            return self._forward(batch)

    def size_for(self, requests: int) -> int:
        """The captured size that a batch is padded to."""
        return next(size for size in self._sizes if size >= requests)

    def prepare(self, batch: Any) -> int:
        """Copy a batch in, pad it, do the metadata outside the graph; the captured size to `launch`."""
        inputs, real, size = self._inputs, batch.batch_size, self.size_for(batch.batch_size)
        for name, values in (("input_ids", 0), ("positions", 0), ("out_cache_loc", 0)):
            _copy_padded(getattr(inputs, name)[: size * self.nodes], getattr(batch, name), values)
        _copy_padded(inputs.req_pool_indices[:size], batch.req_pool_indices, 0)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        _copy_padded(inputs.seq_lens[:size], batch.seq_lens, fill)
        _copy_padded(inputs.seq_lens_cpu[:size], batch.seq_lens_cpu, fill)
        view = build_replay_fb_view(
            forward_batch=batch,
            buffers=inputs,
            bs=size,
            raw_bs=real,
            num_tokens=size * self.nodes,
            global_num_tokens_cpu=None,
            seq_len_fill_value=fill,
            capture_forward_mode=ForwardMode.TARGET_VERIFY,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        return size

    def launch(self, size: int) -> Any:
        """Replay the graph of ``size`` requests; its outputs, padding included."""
        graph, batch, outputs = self._graphs[size]
        if not self._on_gpu:
            self.backend.forward_metadata = graph
            outputs = self._run(batch)
            self._graphs[size] = graph, batch, outputs
        else:
            graph.replay()
        return outputs

    def __call__(self, batch: Any) -> Any:
        """`prepare` and `launch`."""
        return self.launch(self.prepare(batch))

    def outputs(self, size: int) -> Any:
        """What the graph of ``size`` requests writes."""
        return self._graphs[size][2]


def _copy_padded(target: torch.Tensor, source: torch.Tensor, fill: int) -> None:
    target[: len(source)].copy_(source)
    target[len(source) :].fill_(fill)


def _allocated_bytes(on_gpu: bool) -> int:
    return torch.cuda.memory_allocated() if on_gpu else 0
