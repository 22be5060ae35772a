"""What else verifies drafts over an absorbed-MLA cache: SGLang's Triton extend kernel, FlashInfer's paged MLA."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any, ClassVar, Literal

from kgen.bench.peers import Call, Peer, PeerInputs

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_EXTEND_MODULES = (  # newest first
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.srt.layers.attention.triton_ops.extend_attention",
)


class SglangExtend(Peer):
    """SGLang's Triton kernel for verifying on NVIDIA: a block a head and row tile, no split along the KV length."""

    name: ClassVar[str] = "sglang_extend"
    what: ClassVar[str] = "SGLang's Triton extend kernel, tree mask"
    family: ClassVar[str] = "verify_mla"
    output: ClassVar[str] = "out"
    computes: ClassVar[Literal["tree", "chain"]] = "tree"

    def missing(self, capability: tuple[int, int]) -> str:
        try:
            _extend_kernel()
        except ImportError as error:
            return f"cannot be imported: {error}"
        return ""

    def calls(self, inputs: PeerInputs) -> list[Call]:
        kernel, given = _extend_kernel(), inputs.tensors
        latent, nodes = int(inputs.layout["latent"]), inputs.point["nodes"]
        draft, slots = given["draft_kv"].to(given["q"].dtype).unsqueeze(1), given["kv_indices"].long()
        mask, mask_indptr = _full_mask(inputs)
        scales = {name: 1.0 for name in ("k_scale", "v_scale") if name in inspect.signature(kernel).parameters}

        def call(pool: Any) -> None:
            kernel(
                given["q"], draft, draft[..., :latent], inputs.out, pool, pool[..., :latent], given["qo_indptr"],
                given["kv_indptr"], slots, mask, True, mask_indptr, nodes, **scales,
                sm_scale=float(inputs.layout["scale_dim"]) ** -0.5,
            )  # fmt: skip

        return [partial(call, copy["kv_pool"].unsqueeze(1)) for copy in inputs.streamed]


def _extend_kernel() -> Any:
    """SGLang's function, wherever this version has it. Raises ImportError."""
    for name in _EXTEND_MODULES[:-1]:
        try:
            return importlib.import_module(name).extend_attention_fwd
        except ImportError:
            continue
    return importlib.import_module(_EXTEND_MODULES[-1]).extend_attention_fwd


def _full_mask(inputs: PeerInputs) -> tuple[Any, Any]:
    """SGLang's mask: uint8, [nodes, prefix + nodes] of every request one after the other, and where each starts."""
    import torch

    batch, nodes, prefix = (inputs.point[axis] for axis in ("batch", "nodes", "prefix"))
    words = inputs.tensors["tree_mask"]
    bits = torch.arange(nodes, device=words.device)
    visible = (words[:, bits // 32] >> (bits % 32)) & 1
    full = torch.ones((batch * nodes, prefix + nodes), dtype=torch.uint8, device=words.device)
    full[:, prefix:] = visible.to(torch.uint8)
    starts = torch.arange(batch + 1, dtype=torch.int64, device=words.device) * nodes * (prefix + nodes)
    return full.reshape(-1), starts


class FlashInferMla(Peer):
    """FlashInfer's paged MLA attention, for causal chains: it has no tree mask."""

    family: ClassVar[str] = "verify_mla"
    output: ClassVar[str] = "out"
    computes: ClassVar[Literal["tree", "chain"]] = "chain"
    backend: ClassVar[str]

    def missing(self, capability: tuple[int, int]) -> str:
        if self.backend == "fa3" and capability[0] != 9:
            return f"needs wgmma, which compute capability {capability[0]}.{capability[1]} lacks"
        try:
            importlib.import_module("flashinfer.mla")
        except ImportError as error:
            return f"cannot be imported: {error}"
        return ""

    def calls(self, inputs: PeerInputs) -> list[Call]:
        import torch

        given, layout = inputs.tensors, inputs.layout
        latent, rope = int(layout["latent"]), int(layout["rope"])
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=given["q"].device)
        wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            workspace, backend=self.backend
        )
        indices, indptr = _with_drafts(inputs)
        wrapper.plan(
            given["qo_indptr"], indptr, indices, indptr.diff().to(torch.int32), int(layout["heads"]), latent, rope,
            1, True, float(layout["scale_dim"]) ** -0.5, given["q"].dtype, given["kv_pool"].dtype,
        )  # fmt: skip
        q_latent, q_rope = given["q"][..., :latent].contiguous(), given["q"][..., latent:].contiguous()

        def call(pool: Any) -> None:
            wrapper.run(q_latent, q_rope, pool[..., :latent], pool[..., latent:], out=inputs.out)

        pools = [torch.cat([copy["kv_pool"], given["draft_kv"]]).unsqueeze(1) for copy in inputs.streamed]
        return [partial(call, pool) for pool in pools]


def _with_drafts(inputs: PeerInputs) -> tuple[Any, Any]:
    """int32 slots [batch * (prefix + nodes)], drafts behind the pool's end, and int32 [batch + 1] where each starts."""
    import torch

    batch, nodes, prefix = (inputs.point[axis] for axis in ("batch", "nodes", "prefix"))
    pool, slots = inputs.tensors["kv_pool"], inputs.tensors["kv_indices"].reshape(batch, prefix)
    drafts = torch.arange(batch * nodes, device=pool.device).reshape(batch, nodes) + pool.shape[0]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=pool.device) * (prefix + nodes)
    return torch.cat([slots, drafts], dim=1).to(torch.int32).reshape(-1), starts


class FlashInferFa2(FlashInferMla):
    """Its mma.sync kernel, which takes up to 227 KB of shared memory where there is so much."""

    name: ClassVar[str] = "flashinfer_fa2"
    what: ClassVar[str] = "FlashInfer's paged MLA, fa2, causal chain"
    backend: ClassVar[str] = "fa2"


class FlashInferFa3(FlashInferMla):
    """Its wgmma kernel."""

    name: ClassVar[str] = "flashinfer_fa3"
    what: ClassVar[str] = "FlashInfer's paged MLA, fa3 (wgmma), causal chain"
    backend: ClassVar[str] = "fa3"


PEERS: tuple[Peer, ...] = (SglangExtend(), FlashInferFa2(), FlashInferFa3())
