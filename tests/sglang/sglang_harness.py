"""SGLang's real classes on CPU tensors: Triton's interpreter for its kernels, kgen's emulator for ours.

Import it before anything of triton or sglang. What a server would bring (runner, model config) is faked; pools,
batches, spec inputs, layers and backends are SGLang's own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is decorated
os.environ.setdefault("SGLANG_LOGGING_LEVEL", "error")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", category=RuntimeWarning)  # (-inf) - (-inf) inside the interpreter


def _hide_torchvision() -> None:
    """sglang.srt.configs imports torchvision, whose wheel does not load beside a CPU torch; nothing here uses it."""
    import transformers.utils.import_utils as availability

    assert not availability.is_torchvision_available()  # the answer is remembered

    class Inert(types.ModuleType):
        __path__: list[str] = []  # noqa: RUF012 - the attribute of a package

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io"):
        module = Inert(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        if name:
            parent, _, child = module.__name__.rpartition(".")
            setattr(sys.modules[parent], child, module)


def _widen_bf16_dots() -> None:
    """The interpreter keeps bf16 as raw uint16, and its dot multiplies those: widen both sides to float32 first."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, d, *rest: original(self, widen(a), widen(b), d, *rest)


_hide_torchvision()
_widen_bf16_dots()

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_server import LATENT, ROPE, SCALE, active, make_layer, make_pool, serving, verify_input

__all__ = ["LATENT", "ROPE", "SCALE", "active", "make_layer", "make_pool", "serving", "verify_input"]


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Who sees whom in a random tree: bool [nodes, nodes], ancestors before descendants."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        visible[node] |= visible[int(torch.randint(node, (1,), generator=generator))]
    return visible


@dataclass(frozen=True)
class Step:
    """One verify step: the batch, what each request's nodes see, and the tensors of a layer's call."""

    batch: Any
    trees: tuple[torch.Tensor, ...]
    prefixes: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor

    @property
    def v(self) -> torch.Tensor:
        return self.k[..., :LATENT]


def make_step(
    runner: Any, prefixes: Sequence[int], nodes: int, seed: int = 0, *, heads: int = 8, padded: int = 0
) -> Step:
    """A TARGET_VERIFY step in scattered slots; ``padded`` requests after the others look as SGLang pads a graph."""
    generator = torch.Generator().manual_seed(seed)
    bs, pool, dtype = len(prefixes), runner.token_to_kv_pool, runner.dtype
    total = bs + padded
    slots = torch.randperm(pool.size, generator=generator) + 1  # slot 0 is for padding
    rows = torch.zeros(total, dtype=torch.int64)
    rows[:bs] = torch.randperm(runner.req_to_token_pool.size, generator=generator)[:bs] + 1
    for layer in range(len(pool.kv_buffer)):
        cached = pool.get_key_buffer(layer)
        cached.copy_(torch.randn(cached.shape, generator=generator))
    out_slots = torch.zeros(total * nodes, dtype=torch.int64)
    used = 0
    for index, prefix in enumerate(prefixes):
        mine = slots[used : used + prefix + nodes]
        used += prefix + nodes
        runner.req_to_token_pool.req_to_token[rows[index], : prefix + nodes] = mine.to(torch.int32)
        out_slots[index * nodes : (index + 1) * nodes] = mine[prefix:]
    lengths = torch.tensor([*prefixes, *[1] * padded], dtype=torch.int64)
    trees = tuple(random_tree(nodes, generator) for _ in prefixes)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=total, input_ids=torch.arange(total * nodes),
        req_pool_indices=rows, seq_lens=lengths, seq_lens_cpu=lengths, out_cache_loc=out_slots,
        seq_lens_sum=int(lengths.sum()), positions=torch.zeros(total * nodes, dtype=torch.int64),
        spec_info=verify_input(full_mask(trees, prefixes), bs, nodes),
    )  # fmt: skip
    batch.encoder_lens = None
    runner.kv_index_translator.bind_own_plan(batch)
    q, k = (torch.randn(bs * nodes, width, LATENT + ROPE, generator=generator) for width in (heads, 1))
    q, k = (torch.cat([real, torch.ones(padded * nodes, *real.shape[1:])]) for real in (q, k))
    return Step(batch, trees, tuple(prefixes), q.to(dtype), k.to(dtype))


def full_mask(trees: Sequence[torch.Tensor], prefixes: Sequence[int]) -> torch.Tensor:
    """SGLang's layout over prefix and tree: flat bool, a row-major [nodes, prefix + nodes] a request."""
    parts = [
        torch.cat([torch.ones(len(tree), prefix, dtype=torch.bool), tree], 1).flatten()
        for tree, prefix in zip(trees, prefixes, strict=True)
    ]
    return torch.cat(parts)


def eager(backend: Any, layer: Any, step: Step, **changes: Any) -> torch.Tensor:
    """Metadata and one layer's attention, without a graph."""
    with active(backend):
        backend.init_forward_metadata(step.batch)
        arguments = {"q": step.q, "k": step.k, "v": step.v} | changes
        output: torch.Tensor = layer(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), step.batch, **arguments
        )
    return output


def attended_in_float64(
    runner: Any, step: Step, *, scale: float = 1.0, drafts_as_given: bool = False, layer_id: int = 0
) -> torch.Tensor:
    """Absorbed MLA by definition: float64 [tokens, heads, latent] over the pool's rows times ``scale``.

    Draft rows are the pool's too, or, as SGLang's kernel has them, those of K.
    """
    pool = runner.token_to_kv_pool.get_key_buffer(layer_id)[:, 0].double() * scale
    outputs = []
    for index, (prefix, tree) in enumerate(zip(step.prefixes, step.trees, strict=True)):
        nodes = len(tree)
        mine = slice(index * nodes, (index + 1) * nodes)
        row = runner.req_to_token_pool.req_to_token[step.batch.req_pool_indices[index]]
        keys = pool[row[: prefix + nodes].long()]
        if drafts_as_given:
            keys[prefix:] = step.k[mine, 0].double()
        score = torch.einsum("nhd,kd->hnk", step.q[mine].double(), keys) * SCALE
        hidden = torch.cat([torch.zeros(nodes, prefix, dtype=torch.bool), ~tree], 1)
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnk,kd->nhd", weight, keys[:, :LATENT]))
    return torch.cat(outputs)


def graph_forward(backend: Any, layer: Any, step: Step, *, capture: bool = False) -> torch.Tensor:
    """What capture, or a replay, of a CUDA graph runs, without the graph."""
    with active(backend):
        backend.init_forward_metadata_out_graph(step.batch, in_capture=capture)
        backend.init_forward_metadata_in_graph(step.batch)
        output: torch.Tensor = layer(step.q, step.k, step.v, step.batch)
    return output
