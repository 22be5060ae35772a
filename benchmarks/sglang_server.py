"""What SGLang's attention backends see of a server: its pools, batches, layers and spec inputs around a fake runner.

`benchmarks/sglang_h200.py` and the tests of `tests/sglang` run SGLang's real classes on it. Import it after whatever
the machine needs before SGLang can be imported (`sglang_stand_ins`, or the interpreter's set-up of the tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

LATENT, ROPE = 512, 64
SCALE = 192**-0.5

STOCK_MOVE = partial(MLATokenToKVPool.move_kv_cache)
"""SGLang's own method: import this module before plug-ins are loaded. Their hooks replace the method wherever a module
has it under a name, so that only what holds it otherwise keeps it."""

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
    device: str = "cpu",
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
        device=device, gpu_id=0, dtype=dtype, kv_cache_dtype=kv_dtype or dtype, page_size=page_size,
        model_config=_model_config(heads, context), server_args=override.install(), sliding_window_size=None,
        is_draft_worker=False, spec_algorithm=SpeculativeAlgorithm.NONE, use_mla_backend=True, is_hybrid_swa=False,
        init_new_workspace=False, decode_num_tokens_per_req=lambda *_, **__: nodes,
    )  # fmt: skip
    runner.req_to_token_pool = ReqToTokenPool(
        size=max_bs, max_context_len=context, device=device, enable_memory_saver=False
    )
    runner.token_to_kv_pool = make_pool(max_bs * context, layers, kv_dtype or dtype, page_size, device=device)
    runner.token_to_kv_pool_allocator = SimpleNamespace(
        page_size=page_size, get_kvcache=lambda: runner.token_to_kv_pool
    )
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=page_size,
        device=device,
        is_draft_worker=False,
    )
    try:
        with torch.no_grad():
            yield runner
    finally:
        override.restore()


def make_pool(
    size: int, layers: int, dtype: torch.dtype, page_size: int = 1, rope: int = ROPE, device: str = "cpu"
) -> Any:
    """SGLang's pool of MLA rows; slot 0 is its padding."""
    return MLATokenToKVPool(
        size=size, page_size=page_size, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=rope, layer_num=layers,
        device=device, enable_memory_saver=False,
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
    """SGLang's attention layer, as a model of absorbed MLA has it."""
    fields = {"num_heads": heads, "head_dim": LATENT + ROPE, "scaling": SCALE, "num_kv_heads": 1, "layer_id": 0}
    return RadixAttention(**(fields | {"v_head_dim": LATENT} | changes))


def verify_input(mask: torch.Tensor | None, bs: int, nodes: int, device: str = "cpu") -> Any:
    """What EAGLE brings to a verify forward of ``bs`` requests, without links between nodes, which no backend reads."""
    order = torch.arange(bs * nodes, device=device)
    return EagleVerifyInput(
        draft_token=order, custom_mask=mask, positions=torch.zeros_like(order), retrieve_index=order.view(bs, nodes),
        retrieve_next_token=torch.full_like(order, -1).view(bs, nodes),
        retrieve_next_sibling=torch.full_like(order, -1).view(bs, nodes), retrieve_cum_len=None, spec_steps=3, topk=2,
        draft_token_num=nodes, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


@contextmanager
def active(backend: Any) -> Iterator[None]:
    """What a forward pass runs inside of."""
    with forward_context(ForwardContext(attn_backend=backend)):
        yield


def backends(runner: Any) -> dict[str, Any]:
    """Kgen's backend as SGLang makes it, and the stock one."""
    return {"kgen": ATTENTION_BACKENDS["kgen"](runner), "stock": TritonAttnBackend(runner)}
