"""Tree speculative decoding of a small model with SGLang's pools and its own moves of accepted rows.

Trees and drafts come from the host, as does the decision what to accept; SGLang's kernels for those are CUDA code that
is not part of an attention backend. A request keeps its slots, as in SGLang: each verify writes to the next ones in
line, and what is accepted is moved to the front of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from sglang_graphs import verify_batch
from sglang_server import active


@dataclass(frozen=True)
class Tree:
    """``parents`` [nodes] (the root's is itself), ``depths`` [nodes], ``visible`` bool [nodes, nodes]."""

    parents: np.ndarray
    depths: np.ndarray
    visible: np.ndarray


def random_tree(nodes: int, random: np.random.Generator) -> Tree:
    """A tree whose nodes come after their parents."""
    parents, depths = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    visible = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        # Half of the nodes continue the latest one: trees are neither stars nor all of one depth.
        parents[node] = node - 1 if random.random() < 0.5 else random.integers(node)
        depths[node] = depths[parents[node]] + 1
        visible[node] |= visible[parents[node]]
    return Tree(parents, depths, visible)


@dataclass
class Request:
    """``text`` holds the tokens whose KV is in the pool and, last, the one that is next to go in."""

    row: int
    text: list[int]
    made: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> int:
        return len(self.text) - 1


Draft = Callable[[Request, Tree], np.ndarray]
"""The tokens [nodes] of a request's tree; the root's is the request's last token."""
Accept = Callable[[Tree, np.ndarray, np.ndarray], tuple[list[int], int]]
"""By the drafts and by what the model says at each node: the accepted nodes from the root down, and the token next."""


class Speculation:
    """Steps of verify, accept and move, for all of ``requests`` at once. ``forward(batch)`` verifies."""

    def __init__(self, runner: Any, requests: Sequence[Request], nodes: int, draft: Draft, accept: Accept) -> None:
        self._runner, self.requests, self._nodes = runner, requests, nodes
        self._draft, self._accept = draft, accept
        self._table = runner.req_to_token_pool.req_to_token
        self._rows = torch.tensor([request.row for request in requests], device=runner.device)

    def prefill(self, backend: Any, model: Any) -> None:
        """The texts but their last tokens, one request at a time, as SGLang extends: without a graph."""
        for request in self.requests:
            batch = self._extend_batch(request)
            with active(backend):
                backend.init_forward_metadata(batch)
                model(batch)

    def _extend_batch(self, request: Request) -> Any:
        device, length = self._runner.device, request.prefix
        lengths = torch.tensor([length])
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND, batch_size=1,
            input_ids=torch.tensor(request.text[:-1], device=device),
            req_pool_indices=torch.tensor([request.row], device=device), seq_lens=lengths.to(device),
            seq_lens_cpu=lengths, seq_lens_sum=length, positions=torch.arange(length, device=device),
            out_cache_loc=self._table[request.row, :length].long(),
        )  # fmt: skip
        batch.encoder_lens = None
        batch.extend_prefix_lens, batch.extend_seq_lens = torch.zeros_like(batch.seq_lens), batch.seq_lens.clone()
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [0], [length]
        self._runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def step(self, forward: Callable[[Any], Any], random: np.random.Generator) -> tuple[Any, Any]:
        """One verify of random trees; the two highest logits of each node and their tokens, [requests, nodes, 2]."""
        nodes, count = self._nodes, len(self.requests)
        trees = [random_tree(nodes, random) for _ in self.requests]
        pairs = list(zip(self.requests, trees, strict=True))
        drafts = np.stack([self._draft(request, tree) for request, tree in pairs])
        batch = self._verify_batch(drafts, trees)
        logits, tokens = (found[: count * nodes].view(count, nodes, 2).cpu() for found in forward(batch))
        accepted = [
            self._accept(tree, draft, said)
            for tree, draft, said in zip(trees, drafts, tokens[..., 0].numpy(), strict=True)
        ]
        self._move(batch, [path for path, _ in accepted])
        for request, (path, after), draft in zip(self.requests, accepted, drafts, strict=True):
            new = [*draft[path[1:]].tolist(), after]
            request.text += new
            request.made += new
        return logits, tokens

    def _verify_batch(self, drafts: np.ndarray, trees: Sequence[Tree]) -> Any:
        device, nodes = self._runner.device, self._nodes
        prefixes = np.array([request.prefix for request in self.requests])
        slots = [self._table[request.row, request.prefix : request.prefix + nodes] for request in self.requests]
        mask = [
            np.concatenate([np.ones((nodes, prefix), dtype=bool), tree.visible], 1).ravel()
            for prefix, tree in zip(prefixes, trees, strict=True)
        ]
        lengths = torch.from_numpy(prefixes)
        positions = prefixes[:, None] + np.stack([tree.depths for tree in trees])
        return verify_batch(
            self._runner,
            rows=self._rows,
            lengths=lengths.to(device),
            lengths_cpu=lengths,
            input_ids=torch.from_numpy(drafts.ravel()).to(device),
            positions=torch.from_numpy(positions.ravel()).to(device),
            out_slots=torch.cat(slots).long(),
            mask=torch.from_numpy(np.concatenate(mask)).to(device),
        )

    def _move(self, batch: Any, accepted: Sequence[Sequence[int]]) -> None:
        """SGLang's own move of what was accepted, which asks the pool."""
        device = self._runner.device
        index = torch.full((len(accepted), max(map(len, accepted))), -1, dtype=torch.int32)
        for request, path in enumerate(accepted):
            index[request, : len(path)] = torch.tensor(path) + request * self._nodes
        correct = torch.tensor([len(path) - 1 for path in accepted], dtype=torch.int32, device=device)
        moved = SimpleNamespace(seq_lens=batch.seq_lens, out_cache_loc=batch.out_cache_loc)
        move_accept_tokens_to_target_kvcache(moved, index.to(device), correct, self._runner.token_to_kv_pool_allocator)


def accept_greedily(tree: Tree, drafts: np.ndarray, said: np.ndarray) -> tuple[list[int], int]:
    """The path along which each draft is what the model says at its parent, and what it says at the end."""
    path = [0]
    for node in range(1, len(drafts)):
        if tree.parents[node] == path[-1] and drafts[node] == said[path[-1]]:
            path.append(node)
    return path, int(said[path[-1]])
