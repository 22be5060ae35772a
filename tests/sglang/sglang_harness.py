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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
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

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

LATENT, ROPE = 512, 64
SCALE = 192**-0.5

_parallel = get_parallel().override(attn_tp_size=1, attn_dcp_rank=0)
_parallel.__enter__()


@contextmanager
def serving(
    *,
    nodes: int,
    heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 1,
    max_bs: int = 4,
    context: int = 96,
    layers: int = 1,
    **arguments: Any,
) -> Iterator[SimpleNamespace]:
    """A runner as a backend's constructor sees it, around real pools."""
    given = {
        "attention_backend": "triton", "chunked_prefill_size": -1, "tp_size": 1, "pp_size": 1, "dp_size": 1,
        "enable_deterministic_inference": False, "kv_cache_dtype": "auto", "speculative_algorithm": None,
        "speculative_eagle_topk": 2, "speculative_num_draft_tokens": nodes, "speculative_num_steps": 3,
        "triton_attention_num_kv_splits": 8, "triton_attention_split_tile_size": None,
    }  # fmt: skip
    override = get_context().override_server_args(**(given | arguments))
    runner = SimpleNamespace(
        device="cpu", gpu_id=0, dtype=dtype, kv_cache_dtype=kv_dtype or dtype, page_size=page_size,
        model_config=_model_config(heads, context), server_args=override.install(), sliding_window_size=None,
        is_draft_worker=False, spec_algorithm=SpeculativeAlgorithm.NONE, use_mla_backend=True, is_hybrid_swa=False,
        init_new_workspace=False, decode_num_tokens_per_req=lambda *_, **__: nodes,
    )  # fmt: skip
    runner.req_to_token_pool = ReqToTokenPool(
        size=max_bs, max_context_len=context, device="cpu", enable_memory_saver=False
    )
    runner.token_to_kv_pool = make_pool(max_bs * context, layers, kv_dtype or dtype, page_size)
    runner.token_to_kv_pool_allocator = SimpleNamespace(page_size=page_size)
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=page_size,
        device="cpu",
        is_draft_worker=False,
    )
    try:
        with torch.no_grad():
            yield runner
    finally:
        override.restore()


def make_pool(size: int, layers: int, dtype: torch.dtype, page_size: int = 1, rope: int = ROPE) -> Any:
    return MLATokenToKVPool(
        size=size, page_size=page_size, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=rope, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def _model_config(heads: int, context: int) -> SimpleNamespace:
    text = SimpleNamespace(
        architectures=["TinyMLAForCausalLM"], hidden_size=64, num_attention_heads=heads, num_key_value_heads=1,
        kv_lora_rank=LATENT, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=LATENT,
    )  # fmt: skip
    text.get_text_config = lambda: text
    return SimpleNamespace(
        attention_arch=AttentionArch.MLA, context_len=context, num_attention_heads=heads, kv_lora_rank=LATENT,
        qk_nope_head_dim=128, qk_rope_head_dim=ROPE, head_dim=LATENT + ROPE, v_head_dim=LATENT, swa_v_head_dim=LATENT,
        is_encoder_decoder=False, hf_config=text, hf_text_config=text, linear_attn_registry_result=None,
        get_max_num_attention_heads=lambda: heads, get_num_attention_heads=lambda tp: heads // tp,
        get_num_kv_heads=lambda tp, dcp=1: 1,
    )  # fmt: skip


def make_layer(heads: int = 8, **changes: Any) -> Any:
    fields = {"num_heads": heads, "head_dim": LATENT + ROPE, "scaling": SCALE, "num_kv_heads": 1, "layer_id": 0}
    return RadixAttention(**(fields | {"v_head_dim": LATENT} | changes))


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
    pool.kv_buffer[0].copy_(torch.randn(pool.kv_buffer[0].shape, generator=generator))
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


def verify_input(mask: torch.Tensor | None, bs: int, nodes: int) -> Any:
    return EagleVerifyInput(
        draft_token=torch.arange(bs * nodes), custom_mask=mask, positions=torch.zeros(bs * nodes, dtype=torch.int64),
        retrieve_index=torch.arange(bs * nodes).view(bs, nodes), retrieve_next_token=torch.full((bs, nodes), -1),
        retrieve_next_sibling=torch.full((bs, nodes), -1), retrieve_cum_len=None, spec_steps=3, topk=2,
        draft_token_num=nodes, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


@contextmanager
def active(backend: Any) -> Iterator[None]:
    """What a forward pass runs inside of."""
    with forward_context(ForwardContext(attn_backend=backend)):
        yield


def eager(backend: Any, layer: Any, step: Step, **changes: Any) -> torch.Tensor:
    """Metadata and one layer's attention, without a graph."""
    with active(backend):
        backend.init_forward_metadata(step.batch)
        arguments = {"q": step.q, "k": step.k, "v": step.v} | changes
        output: torch.Tensor = layer(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), step.batch, **arguments
        )
    return output
