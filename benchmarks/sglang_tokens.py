"""Tree speculative decoding of two small models on each backend, tokens compared: a part of `sglang_h200.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang_graphs import VerifyGraphs
from sglang_model import Sizes, TinyMla, random_weights, recalling_weights
from sglang_replays import fill_slots
from sglang_server import LATENT, STOCK_MOVE, active, backends, serving
from sglang_speculation import Request, Speculation, Tree, accept_greedily


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


def tokens_part(options: argparse.Namespace) -> dict[str, Any]:
    """Both models."""
    return {"recalling": recalling(options), "random": forced(options)}


def recalling(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy decoding that is known beforehand: each backend on its own, drafts accepted as the model says."""
    small, device = options.small, options.device
    sizes = Sizes(vocabulary=256 if small else 16384, inner=64 if small else 4096, heads=8 if small else 16, layers=2)
    nodes, steps = (5, 4) if small else (32, options.steps or 300)
    lengths = (9, 14) if small else (700, 1500, 4000)
    context = max(lengths) + (steps + 1) * nodes
    random = np.random.default_rng(options.seed)
    texts = [random.permutation(sizes.vocabulary)[:length].tolist() for length in lengths]
    starts = [int(random.integers(1, length // 2)) for length in lengths]

    def continued(row: int, place: int) -> int:
        text, start = texts[row - 1], starts[row - 1]
        return int(text[start + (place - start) % (len(text) - start)])

    made: dict[str, list[list[int]]] = {}
    accepted: dict[str, float] = {}
    with serving(
        nodes=nodes, heads=sizes.heads, max_bs=len(lengths) + 1, context=context, layers=2, device=device
    ) as runner:
        fill_slots(runner, torch.Generator(device).manual_seed(options.seed))
        model = TinyMla(sizes, recalling_weights(sizes, options.seed, device), context, device)
        for name in ("kgen", "stock"):
            requests = [
                Request(row, [*text, text[start]])
                for row, (text, start) in enumerate(zip(texts, starts, strict=True), 1)
            ]
            drafts = np.random.default_rng(options.seed)

            def draft(request: Request, tree: Tree, drafts: Any = drafts) -> np.ndarray:
                tokens = drafts.integers(sizes.vocabulary, size=nodes)
                tokens[0], right = request.text[-1], 0
                done = len(request.made)
                for node in range(1, nodes):  # one child of the right path's end is right, mostly
                    if tree.parents[node] == right and drafts.random() < 0.7:
                        right = node
                        tokens[node] = continued(request.row, starts[request.row - 1] + done + tree.depths[node])
                return tokens

            speculation = Speculation(runner, requests, nodes, draft, accept_greedily)
            _, backend = decode(
                name, runner, model, speculation, nodes=nodes, steps=steps, seed=options.seed,
                sizes=[1, 2, 4] if len(lengths) > 2 else [1, 2],
            )  # fmt: skip
            made[name] = [request.made for request in requests]
            accepted[name] = sum(map(len, made[name])) / steps / len(lengths)
            counted = dict(backend.tally.ran) if name == "kgen" else {}
            if name == "kgen":
                faults = [f"left to SGLang: {key}" for key in backend.tally.left if "extend" not in key[1]]
                moves = counted.get("a KV move", 0)
                faults += [] if moves == steps else [f"{moves} moves counted of {steps}"]
                backend.tally.ran.clear()
                backend.tally.left.clear()
    wrong = {
        name: sum(
            token != continued(row, starts[row - 1] + 1 + place)
            for row, tokens in enumerate(found, 1)
            for place, token in enumerate(tokens)
        )
        for name, found in made.items()
    }
    if made["kgen"] != made["stock"]:
        faults.append("kgen and stock decoded other tokens")
    faults += [f"{name}: {count} tokens are not what the text goes on with" for name, count in wrong.items() if count]
    return {
        "steps": steps,
        "requests": len(lengths),
        "prefixes": lengths,
        "nodes": nodes,
        "tokens": sum(map(len, made["kgen"])),
        "tokens_a_step": accepted,
        "identical": made["kgen"] == made["stock"],
        "faults": faults,
    }


def forced(options: argparse.Namespace) -> dict[str, Any]:
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
