"""Which servers, layers and scales of K and V kgen's verify kernels are for, and why not where they are not."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_exec

KV_DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
"""Dtypes of KV pools, and what layouts call them."""


def unsuitable_server(backend: Any, model_runner: Any) -> str:
    """Why a server's verify is none for kgen, or nothing; ``backend`` is a `TritonAttnBackend` of it."""
    pool = model_runner.token_to_kv_pool
    dtype = getattr(pool, "dtype", None)  # pools of hybrid models have several
    stored_as = {dtype, torch.uint8} if dtype == torch.float8_e4m3fn else {dtype}
    reasons = {
        "the model has no MLA": not backend.use_mla,
        "this is a draft model": backend.is_draft_runner or backend.skip_prefill,
        "there is no speculative decoding": not backend.num_draft_tokens,
        f"the KV cache is {dtype}, not bfloat16 or float8_e4m3fn": dtype not in KV_DTYPES
        or getattr(pool, "store_dtype", dtype) not in stored_as,
        f"the model is {model_runner.dtype}, not bfloat16": model_runner.dtype != torch.bfloat16,
        "deterministic inference": backend.enable_deterministic,
        "decode context parallelism": backend.dcp_size > 1,
        "sliding window": (backend.sliding_window_size or 0) > 0 or backend.use_sliding_window_kv_pool,
        "diffusion model": backend.dllm_attention is not None,
        # It cuts masks by the layout over the prefix, which this backend does not ask for.
        "two-batch overlap": get_exec().overlap.enable_two_batch_overlap,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def unsuitable_layer(layer: Any, shape: tuple[int, int, int]) -> str:
    """Why a layer's verify is none for kgen, or nothing; ``shape`` is (heads, latent + rope, latent) as prepared."""
    found = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim, layer.tp_k_head_num
    reasons = {
        f"head layout {found}": found != (*shape, 1),
        "logit cap": bool(layer.logit_cap),
        "no one scale for K and V": kv_scale(layer) is None,
        "sliding window layer": layer.sliding_window_size is not None and layer.sliding_window_size > -1,
        "not causal self-attention": layer.is_cross_attention or layer.attn_type != AttentionType.DECODER,
        "temperature by length": layer.xai_temperature_len > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def kv_scale(layer: Any) -> float | None:
    """What the rows of a layer's pool are multiplied by when they are read; None where K and V differ in it.

    SGLang stores K / k_scale, V being its first columns, and reads K x k_scale and V x v_scale if a layer has both
    scales, else neither. Layers of a quantised checkpoint have both, 1.0 where it says nothing.
    """
    if layer.k_scale is None:
        return 1.0
    if layer.v_scale is None or layer.k_scale_float != layer.v_scale_float:
        return None
    scale: float = layer.k_scale_float
    return scale
