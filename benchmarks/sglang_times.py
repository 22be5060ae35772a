"""A verify step of both backends by graph replay, timed: a part of `sglang_h200.py`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang_graphs import VerifyGraphs
from sglang_replays import KV_DTYPES, Traffic, mask_over_prefix
from sglang_server import LATENT, ROPE, backends, make_layer, serving


def time_part(options: argparse.Namespace) -> dict[str, Any]:
    """Verify steps of both backends by graph replay."""
    rows = []
    shapes = [(4, 1, 32)] if options.small else [(n, b, p) for p in (4096, 16384) for n in (16, 64) for b in (1, 4, 16)]
    for nodes, batch, prefix in shapes:
        row = time_shape(options, nodes, batch, prefix)
        rows.append(row)
        print(
            f"{nodes:3} nodes, batch {batch:2}, prefix {prefix:5}: kgen {row['kgen']['layer_us']:8.1f} us a layer, "
            f"stock {row['stock']['layer_us']:9.1f}, ratio {row['ratio']:5.2f}; outside the graph "
            f"{row['kgen']['outside_us']:.0f} and {row['stock']['outside_us']:.0f} us",
            flush=True,
        )
    return {"heads": 8 if options.small else 16, "rows": rows, "faults": []}


def time_shape(options: argparse.Namespace, nodes: int, batch: int, prefix: int) -> dict[str, Any]:
    """One shape; enough layers that their KV rows do not stay in L2."""
    heads = 8 if options.small else 16
    kv_dtype = KV_DTYPES[options.kv_dtype]
    bytes_a_layer = batch * prefix * (LATENT + ROPE) * kv_dtype.itemsize
    layers = 1 if options.small else min(40, max(4, -(-160_000_000 // bytes_a_layer)))
    row: dict[str, Any] = {"nodes": nodes, "batch": batch, "prefix": prefix, "layers": layers}
    with serving(
        nodes=nodes,
        heads=heads,
        max_bs=batch,
        context=prefix + nodes,
        layers=layers,
        device=options.device,
        kv_dtype=kv_dtype,
    ) as runner:
        traffic = Traffic(runner, nodes=nodes, most=batch, heads=heads, layers=1, context=prefix, seed=options.seed)
        attention = [make_layer(heads, layer_id=index) for index in range(layers)]

        def forward(verify: Any) -> list[torch.Tensor]:
            q, k = traffic.q[0], traffic.k[0]
            return [layer(q, k, k[..., :LATENT], verify) for layer in attention]

        full = traffic.draw()
        device = options.device
        lengths_cpu = torch.full((batch,), prefix)
        lengths = lengths_cpu.to(device)
        rows = torch.arange(1, batch + 1, device=device)
        places = lengths[:, None] + torch.arange(nodes, device=device)
        trees = full.trees[:1].expand(batch, -1, -1)
        drawn = SimpleNamespace(
            rows=rows, lengths=lengths, lengths_cpu=lengths_cpu, trees=trees, kind="in place",
            positions=places.flatten(),
            slots=runner.req_to_token_pool.req_to_token[rows[:, None], places].long().flatten(),
            full=mask_over_prefix(trees, lengths, batch * nodes * (prefix + nodes)),
        )  # fmt: skip
        for name, backend in backends(runner).items():
            graphs = VerifyGraphs(runner, backend, forward, nodes=nodes, sizes=[batch])
            verify = traffic.batch(drawn, backend, kgen=name == "kgen")
            graphs.prepare(verify)
            step = _median_us(lambda graphs=graphs: graphs.launch(batch), options)
            row[name] = {
                "step_us": step["median"],
                "step_us_min": step["min"],
                "step_us_max": step["max"],
                "layer_us": step["median"] / layers,
                "outside_us": _host_us(lambda graphs=graphs, verify=verify: graphs.prepare(verify), options),
                "graph_state_bytes": graphs.state_bytes,
            }
            if name == "kgen":
                counted = [key for key in backend.tally.ran if key.startswith("attention by")]
                row["matched"] = sorted(key.removeprefix("attention by ") for key in counted)
                backend.tally.ran.clear()
            del graphs
    row["ratio"] = row["stock"]["layer_us"] / row["kgen"]["layer_us"]
    return row


def _median_us(run: Callable[[], Any], options: argparse.Namespace) -> dict[str, float]:
    """Microseconds of a run on the device: the median, least and most of single runs, after three to warm up."""
    if options.device != "cuda":
        return {"median": 1.0, "min": 1.0, "max": 1.0}
    times = []
    started = time.perf_counter()
    for index in range(103):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
        if index >= 7 and time.perf_counter() - started > 0.5:
            break
    return {"median": float(np.median(times)), "min": min(times), "max": max(times)}


def _host_us(run: Callable[[], Any], options: argparse.Namespace) -> float:
    """Microseconds that the host takes for a run, the least of five rounds of 20."""
    best = float("inf")
    for _ in range(1 if options.small else 5):
        if options.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(1 if options.small else 20):
            run()
        best = min(best, (time.perf_counter() - started) / (1 if options.small else 20) * 1e6)
    return best
