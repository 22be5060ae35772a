"""Both backends' CUDA graphs over the same random verify batches: a part of `sglang_h200.py`."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang_graphs import VerifyGraphs, verify_batch
from sglang_server import LATENT, ROPE, SCALE, backends, make_layer, serving

PAIR_TOLERANCE = {"bf16": 8e-3, "e4m3": 0.15}
"""Relative L2 of a request's output, kgen against stock: both round probabilities and partial sums to bf16."""
REFERENCE_TOLERANCE = 5e-3
"""The same against float64; the tolerance of specs/verify_mla.yaml."""

KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
"""Of the pool, by name. In e4m3 stock rounds Q and P to e4m3 as well, and kgen draft rows."""


def fill_slots(runner: Any, generator: torch.Generator) -> None:
    """Give each request row scattered slots for its whole context."""
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    size, context = runner.req_to_token_pool.size, table.shape[1]
    used = min(context, pool.size // size)
    slots = torch.randperm(pool.size, generator=generator, device=runner.device)[: size * used] + 1
    table[1 : size + 1, :used] = slots.view(size, used).to(torch.int32)


def random_trees(count: int, nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Bool [count, nodes, nodes] on the generator's device: who sees whom, ancestors before descendants."""
    device = generator.device
    trees = torch.eye(nodes, dtype=torch.bool, device=device).repeat(count, 1, 1)
    index = torch.arange(count, device=device)
    for node in range(1, nodes):
        parent = torch.randint(node, (count,), generator=generator, device=device)
        trees[:, node] |= trees[index, parent]
    return trees


def mask_over_prefix(trees: torch.Tensor, lengths: torch.Tensor, cells: int) -> torch.Tensor:
    """SGLang's full layout, flat bool [cells]: a row-major [nodes, prefix + nodes] a request."""
    nodes = trees.shape[1]
    sizes = nodes * (lengths + nodes)
    start = (sizes.cumsum(0) - sizes)[:, None, None]
    node = torch.arange(nodes, device=trees.device)
    mask = torch.ones(cells, dtype=torch.bool, device=trees.device)
    mask[start + node[:, None] * (lengths + nodes)[:, None, None] + lengths[:, None, None] + node] = trees
    return mask


class Traffic:
    """Random verify batches of a runner, and the queries and keys of each layer for the largest."""

    def __init__(self, runner: Any, *, nodes: int, most: int, heads: int, layers: int, context: int, seed: int) -> None:
        self.runner, self.nodes, self.most, self.context = runner, nodes, most, context
        self._random = np.random.default_rng(seed)
        generator = torch.Generator(runner.device).manual_seed(seed)
        fill_slots(runner, generator)
        for layer in range(len(runner.token_to_kv_pool.kv_buffer)):
            cached = runner.token_to_kv_pool.get_key_buffer(layer)
            noise = torch.empty(cached.shape, dtype=torch.bfloat16, device=runner.device)
            cached.copy_(noise.normal_(generator=generator))
        self._trees = random_trees(512, nodes, generator)
        shape = {"generator": generator, "device": runner.device}
        self._noise = [torch.randn(4 * most * nodes, heads + 1, LATENT + ROPE, **shape) for _ in range(layers)]
        self._noise = [noise.to(torch.bfloat16) for noise in self._noise]
        self.q = [noise[: most * nodes, :heads].clone() for noise in self._noise]
        self.k = [noise[: most * nodes, heads:].clone() for noise in self._noise]

    def draw(self) -> SimpleNamespace:
        """A batch: its requests, prefixes (some empty), trees, and new queries and keys in place."""
        random, nodes, device = self._random, self.nodes, self.runner.device
        requests = int(random.integers(1, self.most + 1))
        longest = int(random.choice([nodes, self.context // 4, self.context - nodes]))
        lengths_cpu = torch.from_numpy(random.integers(0, longest + 1, requests))
        rows = torch.from_numpy(random.permutation(self.most)[:requests] + 1).to(device)
        lengths = lengths_cpu.to(device)
        trees = self._trees[torch.from_numpy(random.integers(len(self._trees), size=requests)).to(device)]
        kind = str(random.choice(["in place", "tree", "full", "chain"]))
        if kind == "chain":
            trees = torch.ones_like(trees).tril()
        first = int(random.integers(3 * self.most * nodes))
        for q, k, noise in zip(self.q, self.k, self._noise, strict=True):
            q.copy_(noise[first : first + len(q), :-1])
            k.copy_(noise[first : first + len(k), -1:])
        column = torch.arange(nodes, device=device)
        slots = self.runner.req_to_token_pool.req_to_token[rows[:, None], lengths[:, None] + column].long()
        return SimpleNamespace(
            requests=requests, rows=rows, lengths=lengths, lengths_cpu=lengths_cpu, trees=trees, kind=kind,
            slots=slots.flatten(), positions=(lengths[:, None] + column).flatten(),
            full=mask_over_prefix(trees, lengths, int((nodes * (lengths_cpu + nodes)).sum())),
        )  # fmt: skip

    def batch(self, drawn: Any, backend: Any, *, kgen: bool) -> Any:
        """SGLang's batch for a backend. Stock takes full masks; kgen takes each form that SGLang's workers bring."""
        mask = drawn.full
        if kgen and drawn.kind == "in place":  # what EAGLE does where the backend offers a buffer for the tree only
            mask = backend.verify_mask.buffer
            mask[: drawn.trees.numel()] = drawn.trees.flatten()
        elif kgen and drawn.kind != "full":
            mask = drawn.trees.flatten() if drawn.kind == "tree" else None
        return verify_batch(
            self.runner, rows=drawn.rows, lengths=drawn.lengths, lengths_cpu=drawn.lengths_cpu, mask=mask,
            input_ids=drawn.positions, positions=drawn.positions, out_slots=drawn.slots,
        )  # fmt: skip


def attend_in_float64(runner: Any, layer: int, drawn: Any, request: int, q: torch.Tensor) -> torch.Tensor:
    """Absorbed MLA of one request from the pool, by definition: [nodes, heads * latent]."""
    nodes = drawn.trees.shape[1]
    prefix = int(drawn.lengths_cpu[request])
    slots = runner.req_to_token_pool.req_to_token[drawn.rows[request], : prefix + nodes].long()
    keys = runner.token_to_kv_pool.get_key_buffer(layer)[slots, 0].double()
    score = torch.einsum("nhd,kd->hnk", q[request * nodes : (request + 1) * nodes].double(), keys) * SCALE
    seen = torch.nn.functional.pad(drawn.trees[request], (prefix, 0), value=True)
    weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnk,kd->nhd", weight, keys[:, :LATENT]).flatten(1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 by request, [requests]."""
    difference = (found - expected).double().flatten(1)
    return difference.norm(dim=1) / expected.double().flatten(1).norm(dim=1)


def replay_part(options: argparse.Namespace) -> dict[str, Any]:
    """Graphs of both backends over the same random batches."""
    small = options.small
    shapes = [(4, 8, 4, 40)] if small else [(16, 16, 16, 4096), (64, 16, 8, 3000), (65, 8, 4, 2048)]
    return {
        f"{heads} heads, {nodes} nodes": replay_shape(options, nodes, heads, most, context)
        for nodes, heads, most, context in shapes
    }


def replay_shape(options: argparse.Namespace, nodes: int, heads: int, most: int, context: int) -> dict[str, Any]:
    """One head count and tree size."""
    steps, layers = options.steps or (6 if options.small else 1000), 2
    with serving(
        nodes=nodes,
        heads=heads,
        max_bs=most,
        context=context + nodes,
        layers=layers,
        device=options.device,
        kv_dtype=KV_DTYPES[options.kv_dtype],
    ) as runner:
        traffic = Traffic(
            runner, nodes=nodes, most=most, heads=heads, layers=layers, context=context, seed=options.seed
        )
        attention = [make_layer(heads, layer_id=index) for index in range(layers)]

        def forward(batch: Any) -> list[torch.Tensor]:
            tokens = batch.batch_size * nodes
            return [
                layer(q[:tokens], k[:tokens], k[:tokens, :, :LATENT], batch)
                for layer, q, k in zip(attention, traffic.q, traffic.k, strict=True)
            ]

        made = backends(runner)
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= most]
        graphs = {
            name: VerifyGraphs(runner, backend, forward, nodes=nodes, sizes=sizes) for name, backend in made.items()
        }
        return compare_replays(traffic, made, graphs, steps, options)


def compare_replays(
    traffic: Traffic, made: dict[str, Any], graphs: dict[str, VerifyGraphs], steps: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Both backends' graphs over ``steps`` batches."""
    on_gpu, nodes = options.device == "cuda", traffic.nodes
    pair = torch.zeros(steps, dtype=torch.float64, device=options.device)
    allocations = {name: {"metadata": 0, "graph": 0} for name in graphs}
    reference: dict[str, float] = dict.fromkeys(graphs, 0.0)
    grown = 0  # in the replays themselves: what the float64 reference takes is not theirs
    kinds: dict[str, int] = {}
    padded = 0
    for step in range(steps):
        drawn = traffic.draw()
        kinds[drawn.kind] = kinds.get(drawn.kind, 0) + 1
        found: dict[str, list[torch.Tensor]] = {}
        for name, captured in graphs.items():
            batch = traffic.batch(drawn, made[name], kgen=name == "kgen")
            size = captured.size_for(drawn.requests)
            padded += size > drawn.requests
            for output in captured.outputs(size):
                output.fill_(float("nan"))
            before, reserved = _allocations(on_gpu), _reserved(on_gpu)
            captured.prepare(batch)
            prepared = _allocations(on_gpu)
            outputs = captured.launch(size)
            allocations[name]["metadata"] += prepared - before
            allocations[name]["graph"] += _allocations(on_gpu) - prepared
            grown += _reserved(on_gpu) - reserved if step > steps // 10 else 0
            found[name] = [output[: drawn.requests * nodes].view(drawn.requests, -1) for output in outputs]
        pair[step] = torch.stack([relative(ours, theirs) for ours, theirs in zip(*found.values(), strict=True)]).max()
        if step % max(1, steps // 40) == 0:
            _against_float64(traffic, drawn, found, reference)
    worst = float(pair.max()) if not pair.isnan().any() else float("nan")
    near = worst <= PAIR_TOLERANCE[options.kv_dtype]
    faults = [] if near else [f"kgen against stock {worst:.2e}, step {int(pair.argmax())}"]
    if not reference["kgen"] <= REFERENCE_TOLERANCE:
        faults.append(f"kgen against float64 {reference['kgen']:.2e}")
    if grown > 0:
        faults.append(f"replays after a tenth of the steps reserved {grown} bytes more")
    faults += _counted_faults(made["kgen"], graphs["kgen"], steps)
    return {
        "steps": steps,
        "padded": padded // 2,
        "masks": kinds,
        "worst_relative_l2": worst,
        "median_relative_l2": float(pair.median()),
        "worst_relative_l2_against_float64": reference,
        "allocations_a_replay": {
            name: {part: count / steps for part, count in counts.items()} for name, counts in allocations.items()
        },
        "allocations_inside_captures": {name: captured.captured_allocations for name, captured in graphs.items()},
        "graph_state_bytes": {name: captured.state_bytes for name, captured in graphs.items()},
        "faults": faults,
    }


def _against_float64(traffic: Traffic, drawn: Any, found: Any, worst: dict[str, float]) -> None:
    request = int(drawn.lengths_cpu.argmax())
    for layer, q in enumerate(traffic.q):
        expected = attend_in_float64(traffic.runner, layer, drawn, request, q).view(1, -1)
        for name, outputs in found.items():
            error = float(relative(outputs[layer][request : request + 1], expected))
            worst[name] = float("nan") if math.isnan(error) else max(worst[name], error)


def _counted_faults(backend: Any, graphs: VerifyGraphs, steps: int) -> list[str]:
    """What the tally says against kgen having served every verify."""
    faults = [f"left to SGLang: {kind}, {reason}" for kind, reason in backend.tally.left]
    if backend.tally.ran["verify"] < steps:
        faults.append(f"{backend.tally.ran['verify']} verifies counted of {steps}")
    backend.tally.ran.clear()
    return faults


def _allocations(on_gpu: bool) -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if on_gpu else 0


def _reserved(on_gpu: bool) -> int:
    return int(torch.cuda.memory_stats()["reserved_bytes.all.current"]) if on_gpu else 0
