"""What both backends and float32 attention say where many tokens are near ties: a part of `sglang_tokens`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from sglang_decoding import decode
from sglang_model import Sizes, TinyMla, random_weights
from sglang_replays import fill_slots
from sglang_server import serving
from sglang_speculation import Request, Speculation, Tree


def near_ties(options: argparse.Namespace) -> dict[str, Any]:
    """A random model over random text: what each backend says at every node, and float32 attention as the judge."""
    small, device = options.small, options.device
    sizes = Sizes(vocabulary=256, hidden=128, inner=64, heads=8, layers=2) if small else Sizes()
    nodes, steps, count = (5, 2, 2) if small else (16, options.steps or 200, 4)
    length = 9 if small else 600
    context = length + count + (steps + 1) * nodes
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with serving(
        nodes=nodes, heads=sizes.heads, max_bs=count, context=context, layers=sizes.layers, device=device
    ) as runner:
        fill_slots(runner, torch.Generator(device).manual_seed(options.seed))
        model = TinyMla(sizes, random_weights(sizes, options.seed, device), context, device)
        for name in ("kgen", "stock", "exact"):
            random = np.random.default_rng(options.seed)
            requests = [
                Request(row, random.integers(sizes.vocabulary, size=length + row).tolist())
                for row in range(1, count + 1)
            ]

            def draft(request: Request, _: Tree, random: Any = random) -> np.ndarray:
                tokens = random.integers(sizes.vocabulary, size=nodes)
                tokens[0] = request.text[-1]
                return tokens

            def accept(tree: Tree, _: Any, __: Any, random: Any = random) -> tuple[list[int], int]:
                path = [int(random.integers(nodes))]
                while path[0]:
                    path.insert(0, int(tree.parents[path[0]]))
                return path, int(random.integers(sizes.vocabulary))  # the text is the same for all backends

            speculation = Speculation(runner, requests, nodes, draft, accept)
            said, backend = decode(
                name, runner, model, speculation, nodes=nodes, steps=steps, seed=options.seed, sizes=[count]
            )
            found[name] = torch.stack([logits for logits, _ in said]), torch.stack([tokens for _, tokens in said])
            if name == "kgen":
                backend.tally.ran.clear()
                backend.tally.left.clear()
    return judge(found)


def judge(found: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Where tokens differ, and whether the logits there are closer than the backends' differences are."""
    exact_logits = found["exact"][0]
    margin = exact_logits[..., 0] - exact_logits[..., 1]
    report: dict[str, Any] = {
        "nodes": margin.numel(),
        "median_margin": float(margin.median()),
        "faults": [],
    }
    pairs = {"kgen, stock": ("kgen", "stock"), "kgen, exact": ("kgen", "exact"), "stock, exact": ("stock", "exact")}
    for pair, (one, other) in pairs.items():
        logits, tokens = found[one]
        other_logits, other_tokens = found[other]
        same = tokens[..., 0] == other_tokens[..., 0]
        noise = (logits[..., 0] - other_logits[..., 0])[same].abs()
        # Two values that move by the noise each swap only if they are closer than twice the noise.
        apart = margin[~same]
        report[pair] = {
            "differ": int((~same).sum()),
            "noise_median": float(noise.median()),
            "noise_largest": float(noise.max()),
            "largest_margin_where_they_differ": float(apart.max()) if len(apart) else 0.0,
        }
        if not bool(logits.isfinite().all()):
            report["faults"].append(f"{one}: not all logits are finite")
        if len(apart) and float(apart.max()) > 2 * float(noise.max()):
            report["faults"].append(f"{pair}: tokens differ at a margin of {float(apart.max()):.3f}")
    return report
