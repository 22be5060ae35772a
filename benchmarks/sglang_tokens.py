"""Greedy tree speculative decoding of small models on each backend, tokens compared: a part of `sglang_h200.py`.

recalling: a model whose weights are set so that its text is known beforehand. random: a model whose weights are all
drawn, with queries so long that a head looks at one token and rounding decides nothing; float32 attention decodes its
text first, a token a step. near ties: a model of usual queries, judged node by node (`sglang_near_ties`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang_decoding import decode
from sglang_model import Sizes, TinyMla, random_weights, recalling_weights
from sglang_near_ties import near_ties
from sglang_replays import fill_slots
from sglang_server import serving
from sglang_speculation import Request, Speculation, Tree, accept_greedily

SHARPNESS = 600.0
"""What the random model multiplies its queries by: scores have a standard deviation of about 1000."""

Expected = Callable[[int, int], int | None]
"""The token that a request's row makes at a place, or None where that is not known."""


def tokens_part(options: argparse.Namespace) -> dict[str, Any]:
    """All three models."""
    return {"recalling": recalling(options), "random": drawn(options), "near ties": near_ties(options)}


def recalling(options: argparse.Namespace) -> dict[str, Any]:
    """A model that goes on as its text went on before."""
    small, device = options.small, options.device
    sizes = Sizes(vocabulary=256 if small else 16384, inner=64 if small else 4096, heads=8 if small else 16, layers=2)
    nodes, steps = (5, 4) if small else (32, options.steps or 300)
    lengths = (9, 14) if small else (700, 1500, 4000)
    context = max(lengths) + (steps + 1) * nodes
    random = np.random.default_rng(options.seed)
    texts = [random.permutation(sizes.vocabulary)[:length].tolist() for length in lengths]
    starts = [int(random.integers(1, length // 2)) for length in lengths]

    def expected(row: int, place: int) -> int:
        text, start = texts[row - 1], starts[row - 1]
        return int(text[start + (place + 1) % (len(text) - start)])

    prompts = [[*text, text[start]] for text, start in zip(texts, starts, strict=True)]
    model = TinyMla(sizes, recalling_weights(sizes, options.seed, device), context, device)
    with serving(
        nodes=nodes, heads=sizes.heads, max_bs=len(lengths) + 1, context=context, layers=2, device=device
    ) as runner:
        fill_slots(runner, torch.Generator(device).manual_seed(options.seed))
        return compared(runner, model, prompts, expected, nodes=nodes, steps=steps, seed=options.seed)


def drawn(options: argparse.Namespace) -> dict[str, Any]:
    """A model of random weights over random prompts."""
    small, device = options.small, options.device
    sizes = Sizes(vocabulary=256, hidden=128, inner=64, heads=8, layers=2) if small else Sizes()
    nodes, steps, known = (5, 6, 18) if small else (32, options.steps or 150, 3 * (options.steps or 150))
    lengths = (9, 14) if small else (700, 1500, 4000)
    context = max(lengths) + (max(steps, known) + 1) * nodes
    random = np.random.default_rng(options.seed)
    prompts = [random.integers(sizes.vocabulary, size=length).tolist() for length in lengths]
    model = TinyMla(sizes, random_weights(sizes, options.seed, device, SHARPNESS), context, device)
    with serving(
        nodes=nodes, heads=sizes.heads, max_bs=len(lengths) + 1, context=context, layers=sizes.layers, device=device
    ) as runner:
        fill_slots(runner, torch.Generator(device).manual_seed(options.seed))
        texts, _ = decoded(
            "exact", runner, model, prompts, lambda *_: None, nodes=nodes, steps=known, seed=options.seed
        )

        def expected(row: int, place: int) -> int | None:
            return texts[row - 1][place] if place < len(texts[row - 1]) else None

        report = compared(runner, model, prompts, expected, nodes=nodes, steps=steps, seed=options.seed)
        return report | {"distinct_tokens": [len(set(text)) for text in texts], "known_tokens": list(map(len, texts))}


def compared(
    runner: Any, model: TinyMla, prompts: Sequence[list[int]], expected: Expected, *, nodes: int, steps: int, seed: int
) -> dict[str, Any]:
    """Both backends on their own, with drafts that are mostly right: the same tokens, and those that are expected."""
    made: dict[str, list[list[int]]] = {}
    faults: list[str] = []
    for name in ("kgen", "stock"):
        made[name], backend = decoded(name, runner, model, prompts, expected, nodes=nodes, steps=steps, seed=seed)
        wrong = sum(
            token != expected(row, place)
            for row, tokens in enumerate(made[name], 1)
            for place, token in enumerate(tokens)
            if expected(row, place) is not None
        )
        faults += [f"{name}: {wrong} tokens are not what the text goes on with"] if wrong else []
        if name == "kgen":
            faults += [f"left to SGLang: {key}" for key in backend.tally.left if "extend" not in key[1]]
            moves = backend.tally.ran["a KV move"]
            faults += [] if moves == steps else [f"{moves} moves counted of {steps}"]
            backend.tally.ran.clear()
            backend.tally.left.clear()
    if made["kgen"] != made["stock"]:
        faults.append("kgen and stock decoded other tokens")
    return {
        "steps": steps,
        "requests": len(prompts),
        "prompts": [len(prompt) for prompt in prompts],
        "nodes": nodes,
        "tokens": sum(map(len, made["kgen"])),
        "tokens_a_step": {name: sum(map(len, texts)) / steps / len(prompts) for name, texts in made.items()},
        "identical": made["kgen"] == made["stock"],
        "faults": faults,
    }


def decoded(
    name: str, runner: Any, model: TinyMla, prompts: Sequence[list[int]], expected: Expected, *, nodes: int, steps: int,
    seed: int,
) -> tuple[list[list[int]], Any]:  # fmt: skip
    """What each request makes in so many steps of one backend, and the backend."""
    requests = [Request(row, list(prompt)) for row, prompt in enumerate(prompts, 1)]
    drafts = np.random.default_rng(seed)

    def draft(request: Request, tree: Tree) -> np.ndarray:
        tokens = drafts.integers(model.sizes.vocabulary, size=nodes)
        tokens[0], right = request.text[-1], 0
        for node in range(1, nodes):  # one child of the right path's end is right, mostly
            follows = expected(request.row, len(request.made) + tree.depths[node] - 1)
            if tree.parents[node] == right and drafts.random() < 0.7 and follows is not None:
                right, tokens[node] = node, follows
        return tokens

    speculation = Speculation(runner, requests, nodes, draft, accept_greedily)
    sizes = [1, 2, 4] if len(prompts) > 2 else [1, 2]
    _, backend = decode(name, runner, model, speculation, nodes=nodes, steps=steps, seed=seed, sizes=sizes)
    return [request.made for request in requests], backend
