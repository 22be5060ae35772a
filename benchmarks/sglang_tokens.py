"""Greedy tree speculative decoding of small models on each backend, tokens compared: a part of `sglang_h200.py`.

recalling: a model whose weights are set so that its text is known beforehand. random: a model whose weights are all
drawn; float32 attention decodes its texts first, and a backend may part from them only where two logits are a near tie.
near ties: a model of random weights judged node by node (`sglang_near_ties`).
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
from sglang_speculation import Accept, Request, Speculation, Tree, accept_greedily

SHARPNESS = 8.0
"""What the random model multiplies its queries by: a head looks at few tokens, and each of them matters."""
DECIDED = 0.15
"""A token whose logit leads by so much is decided: backends differ by less (0.03 on an H200, logits being about 1)."""

Expected = Callable[[int, int], tuple[int, bool] | None]
"""The token that a request's row makes at a place, and whether it is decided; None where that is not known."""


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

    def expected(row: int, place: int) -> tuple[int, bool]:
        text, start = texts[row - 1], starts[row - 1]
        return int(text[start + (place + 1) % (len(text) - start)]), True

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
    nodes, steps, known = (5, 6, 12) if small else (16, options.steps or 40, 100)
    lengths = (9, 14) if small else range(200, 2200, 250)
    context = max(lengths) + max(known, steps * nodes) + nodes
    random = np.random.default_rng(options.seed)
    prompts = [random.integers(sizes.vocabulary, size=length).tolist() for length in lengths]
    model = TinyMla(sizes, random_weights(sizes, options.seed, device, SHARPNESS), context, device)
    with serving(
        nodes=nodes, heads=sizes.heads, max_bs=len(lengths) + 1, context=context, layers=sizes.layers, device=device
    ) as runner:
        fill_slots(runner, torch.Generator(device).manual_seed(options.seed))
        texts, leads = decoded_in_float32(runner, model, prompts, nodes=nodes, steps=known, seed=options.seed)

        def expected(row: int, place: int) -> tuple[int, bool] | None:
            return (texts[row - 1][place], leads[row - 1][place] >= DECIDED) if place < known else None

        report = compared(runner, model, prompts, expected, nodes=nodes, steps=steps, seed=options.seed)
    return report | {"distinct_tokens": len(set().union(*texts)), "median_lead": float(np.median(leads))}


def decoded_in_float32(
    runner: Any, model: TinyMla, prompts: Sequence[list[int]], *, nodes: int, steps: int, seed: int
) -> tuple[list[list[int]], list[list[float]]]:
    """What float32 attention goes on with, a token a step, and by how much each token's logit leads."""

    def only_the_root(_: Tree, __: np.ndarray, said: np.ndarray) -> tuple[list[int], int]:
        return [0], int(said[0])

    texts, said, _ = decoded(
        "exact", runner, model, prompts, lambda *_: None, nodes=nodes, steps=steps, seed=seed, accept=only_the_root
    )
    first, second = torch.stack([logits[:, 0] for logits, _ in said], 1).unbind(-1)  # each [requests, steps]
    return texts, (first - second).tolist()


def compared(
    runner: Any, model: TinyMla, prompts: Sequence[list[int]], expected: Expected, *, nodes: int, steps: int, seed: int
) -> dict[str, Any]:
    """Both backends on their own, with drafts that are mostly right: the same tokens, and those that are expected."""
    made: dict[str, list[list[int]]] = {}
    agreed: dict[str, int] = {}
    faults: list[str] = []
    for name in ("kgen", "stock"):
        made[name], _, backend = decoded(name, runner, model, prompts, expected, nodes=nodes, steps=steps, seed=seed)
        places = [agreeing(row, tokens, expected) for row, tokens in enumerate(made[name], 1)]
        agreed[name] = sum(count for count, _ in places)
        wrong = [row for row, (_, parts_decided) in enumerate(places, 1) if parts_decided]
        faults += [f"{name}: requests {wrong} go on with other tokens than their texts"] if wrong else []
        if name == "kgen":
            faults += [f"left to SGLang: {key}" for key in backend.tally.left if "extend" not in key[1]]
            moves = backend.tally.ran["a KV move"]
            faults += [] if moves == steps else [f"{moves} moves counted of {steps}"]
            backend.tally.ran.clear()
            backend.tally.left.clear()
    return {
        "steps": steps,
        "requests": len(prompts),
        "prompts": [len(prompt) for prompt in prompts],
        "nodes": nodes,
        "agreed_tokens": agreed,
        "tokens_a_step": {name: sum(map(len, texts)) / steps / len(prompts) for name, texts in made.items()},
        "identical": made["kgen"] == made["stock"],
        "faults": faults,
    }


def agreeing(row: int, tokens: Sequence[int], expected: Expected) -> tuple[int, bool]:
    """How many tokens are as expected, as far as that is known, and whether they part at a decided one."""
    for place, token in enumerate(tokens):
        known = expected(row, place)
        if known is None or known[0] != token:
            return place, known is not None and known[1]
    return len(tokens), False


def decoded(
    name: str, runner: Any, model: TinyMla, prompts: Sequence[list[int]], expected: Expected, *, nodes: int, steps: int,
    seed: int, accept: Accept = accept_greedily,
) -> tuple[list[list[int]], list[tuple[Any, Any]], Any]:  # fmt: skip
    """What each request makes in so many steps of one backend, what each step said, and the backend."""
    requests = [Request(row, list(prompt)) for row, prompt in enumerate(prompts, 1)]
    drafts = np.random.default_rng(seed)

    def draft(request: Request, tree: Tree) -> np.ndarray:
        tokens = drafts.integers(model.sizes.vocabulary, size=nodes)
        tokens[0], right = request.text[-1], 0
        for node in range(1, nodes):  # one child of the right path's end is right, mostly
            follows = expected(request.row, len(request.made) + tree.depths[node] - 1)
            if tree.parents[node] == right and drafts.random() < 0.7 and follows is not None:
                right, tokens[node] = node, follows[0]
        return tokens

    speculation = Speculation(runner, requests, nodes, draft, accept)
    sizes = sorted({1, 2, len(prompts) + 1})  # one of padding
    said, backend = decode(name, runner, model, speculation, nodes=nodes, steps=steps, seed=seed, sizes=sizes)
    return [request.made for request in requests], said, backend
