"""The attention backend: SGLang's Triton backend, but for the attention of draft trees that are being verified.

Read from and tested with SGLang 0.5.23. In TARGET_VERIFY ``seq_lens``, ``kv_indptr`` and ``kv_indices`` cover the
committed prefix only; the K/V of the tree are the arguments of ``forward_extend``, or in the pool at ``out_cache_loc``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from kgen.errors import InputError, KgenError, TensorError
from kgen.runtime import Pack, mask_words
from kgen.sglang.agreement import refuse_other_packs
from kgen.sglang.attend import VerifyAttention
from kgen.sglang.capture import WorkloadCapture
from kgen.sglang.metrics import metrics_of_server
from kgen.sglang.suitable import KV_DTYPES, kv_scale, unsuitable_layer, unsuitable_server
from kgen.sglang.tally import VERIFY, Answers, Tally
from kgen.sglang.tree_bits import compile_for, copy_tree_part, pack_words

KIND = "attention"


class KgenAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """Verify on a pack's kernels; all else, and what those do not cover, is `TritonAttnBackend`."""

    num_draft_tokens: Any
    forward_metadata: Any

    def __init__(self, model_runner: Any, pack: Pack, tally: Tally, skip_prefill: bool = False, **options: Any) -> None:
        super().__init__(model_runner, skip_prefill, **options)
        self.tally = tally
        tally.metrics = metrics_of_server()
        self._answers = Answers(tally)
        self._tree_mask: Any = None  # of this forward: int32 [tokens, words], or None for a chain
        self._full_mask: Any = None  # of this forward, for calls that go to SGLang
        self._attention: VerifyAttention | None = None
        reason = unsuitable_server(self, model_runner)
        if not reason:
            try:
                self._attention = self._prepare(model_runner, pack)
            except KgenError as error:
                reason = str(error)
            except torch.OutOfMemoryError:  # whose text has many lines, and other numbers each time
                reason = "no memory for the workspace"
        if reason:
            tally.left_to_sglang(KIND, reason)
        refuse_other_packs(pack, reason)

    def _prepare(self, model_runner: Any, pack: Pack) -> VerifyAttention:
        """The prepared call for this model, and the buffers of the tree mask. Raises KgenError."""
        config = model_runner.model_config
        attention = VerifyAttention(
            pack,
            heads=self.num_head,
            latent=config.kv_lora_rank,
            rope=config.qk_rope_head_dim,
            page_size=self.page_size,
            kv_dtype=KV_DTYPES[model_runner.token_to_kv_pool.dtype],
            capacity={
                "batch": self.req_to_token_pool.size,
                "nodes": self.num_draft_tokens,
                "prefix": self.max_context_len,
            },
            device=self.device,
        )
        batch, nodes = attention.batch, attention.nodes
        self._tree = torch.ones(batch * nodes * nodes, dtype=torch.uint8, device=self.device)
        self._words = torch.zeros(batch * nodes * mask_words(nodes), dtype=torch.int32, device=self.device)
        self._chain = torch.ones(nodes, nodes, dtype=torch.uint8, device=self.device).tril()
        compile_for(self._tree, self._words, mask_indptr=self.mask_indptr, kv_indptr=self.kv_indptr, nodes=nodes)
        self._capture = WorkloadCapture.from_environment(attention.layout_name)
        self._verify_mask = self._own_verify_mask(batch)
        return attention

    def _own_verify_mask(self, max_bs: int) -> VerifyMask:
        return VerifyMask(buffer=self._tree, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs, is_read=True)

    # Metadata, once a forward.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if self._attention is not None and max_bs > self._attention.batch:
            self.tally.left_to_sglang(KIND, f"graphs of {max_bs} requests, prepared for {self._attention.batch}")
            self._attention = None
        if self._attention is None:
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
            return
        # Verify takes neither decode's split buffers, which the base class sizes by tokens (gigabytes for large trees),
        # nor a mask over the prefix, which it makes where there are draft tokens; decode takes one token a request.
        nodes, self.num_draft_tokens = self.num_draft_tokens, None
        try:
            super().init_cuda_graph_state(max_bs, max_bs, *args, **kwargs)
        finally:
            self.num_draft_tokens = nodes
        self._verify_mask = self._own_verify_mask(max_bs)

    def _update_target_verify_buffers(
        self, plan: Any, bs: int, seq_lens: Any, spec_info: Any, req_pool_indices: Any
    ) -> Any:
        if self._attention is not None:  # the base class would copy a full mask over the buffer of the tree
            nodes = self._target_verify_num_tokens_per_req(spec_info)
            spec_info = SimpleNamespace(num_tokens_per_req=nodes, custom_mask=None)
        return super()._update_target_verify_buffers(plan, bs, seq_lens, spec_info, req_pool_indices)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if self._is_ours(forward_batch):
            self._begin_forward()
            self._answers.begin()
            mask = forward_batch.spec_info.custom_mask
            if mask is not None and self._attention_fits(forward_batch):
                self._take_tree(mask, forward_batch)
                self._pack(forward_batch)
            self._note_forward(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if not self._is_ours(forward_batch):
            return
        assert self._attention is not None
        if not self._attention_fits(forward_batch):
            wrong = "has more nodes than verify was prepared for"  # SGLang's mask buffer would not hold them either
            raise InputError("a CUDA graph", wrong, seen=f"{self._nodes(forward_batch)} of {self._attention.nodes}")
        spec_info, nodes = forward_batch.spec_info, self._nodes(forward_batch)
        mask = None if in_capture or spec_info is None else spec_info.custom_mask
        if mask is None:  # a capture's mask is a dummy of any size; a chain has none, but the graph reads the buffer
            rows = self._tree[: forward_batch.batch_size * nodes * nodes].view(-1, nodes, nodes)
            rows.copy_(self._chain[:nodes, :nodes].expand_as(rows))
        else:
            self._take_tree(mask, forward_batch)
        if in_capture:
            self._answers.begin(graph=forward_batch.batch_size)
        else:
            self._answers.replay(graph=forward_batch.batch_size)
            self._note_forward(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if self._is_ours(forward_batch):
            self._begin_forward()  # a graph has to make its own, whatever a run before it made
            self._pack(forward_batch)

    def _begin_forward(self) -> None:
        """Forget what layers of one forward share: masks, and how its work is dealt to blocks."""
        assert self._attention is not None
        self._full_mask, self._tree_mask = None, None
        self._attention.begin_forward()

    def _is_ours(self, forward_batch: Any) -> bool:
        return self._attention is not None and bool(forward_batch.forward_mode.is_target_verify())

    def _nodes(self, forward_batch: Any) -> int:
        """Nodes a request. Before a replay ``forward_metadata`` may still be that of a prefill in between."""
        return int(self._target_verify_num_tokens_per_req(forward_batch.spec_info))

    def _attention_fits(self, forward_batch: Any) -> bool:
        assert self._attention is not None
        nodes = self._nodes(forward_batch)
        return bool(forward_batch.batch_size <= self._attention.batch and nodes <= self._attention.nodes)

    def _requests(self, forward_batch: Any) -> int:
        """Requests of a batch that are not padding: those that have draft tokens."""
        tokens, batch = getattr(forward_batch.spec_info, "draft_token", None), int(forward_batch.batch_size)
        return batch if tokens is None else min(batch, tokens.numel() // self._nodes(forward_batch))

    def _take_tree(self, mask: Any, forward_batch: Any) -> None:
        """Bring the tree part of a mask, in either layout, to the front of the buffer."""
        if mask.data_ptr() == self._tree.data_ptr():  # SGLang wrote it in place
            return
        batch, nodes = self._requests(forward_batch), self._nodes(forward_batch)
        if self._has_tree_only(mask, forward_batch):
            self._tree[: mask.numel()].copy_(mask.view(-1))
        else:
            copy_tree_part(mask.view(-1), self.mask_indptr, self.kv_indptr, self._tree, batch=batch, nodes=nodes)

    def _has_tree_only(self, mask: Any, forward_batch: Any) -> bool:
        """Whether a mask has no cells over prefixes; one over empty prefixes is the same in both layouts.

        Padding has no cells in either, so a batch's padded size says nothing.
        """
        nodes = self._nodes(forward_batch)
        return bool(mask.numel() <= self._requests(forward_batch) * nodes * nodes)

    def _pack(self, forward_batch: Any) -> None:
        nodes = self._nodes(forward_batch)
        rows, count = forward_batch.batch_size * nodes, mask_words(nodes)
        self._tree_mask = self._words[: rows * count].view(rows, count)
        pack_words(self._tree, self._tree_mask, nodes=nodes)

    def _note_forward(self, forward_batch: Any) -> None:
        self.tally.did(VERIFY)
        self._capture.note(forward_batch, self._requests(forward_batch), self._nodes(forward_batch))

    # Attention, once a layer.

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Any:
        extras = {"sinks": sinks, "score_mod": score_mod, "aux_tensors": aux_tensors}
        if self._attention is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        return self._extend(q, k, v, layer, forward_batch, save_kv_cache, extras)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, extras: Mapping[str, Any]
    ) -> Any:
        """Run on kgen or leave to SGLang. Never traced: a trace takes what the host asks of a batch for constants."""
        reason = self._not_ours(k, v, layer, forward_batch, extras, save_kv_cache)
        if not reason:
            if k is not None and save_kv_cache:
                self._store(k, v, layer, forward_batch)
                save_kv_cache = False
            try:
                return self._attend(q, None if self._reads_pool_only(layer) else k, layer, forward_batch)
            except TensorError as error:  # before anything was launched
                reason = f"{error.where} {error.wrong}"
        self.tally.left_to_sglang(KIND, reason)
        with_mask = forward_batch.forward_mode.is_target_verify()
        kept = self.forward_metadata
        if with_mask:
            self.forward_metadata = replace(kept, custom_mask=self._mask_over_prefix(forward_batch))
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        finally:
            self.forward_metadata = kept

    def _reads_pool_only(self, layer: Any) -> bool:
        """Whether the rows of a layer's pool are not those of K, so that draft rows come from the pool like the others.

        SGLang's kernel takes draft rows as they are given; to the next steps they are what the pool has.
        """
        assert self._attention is not None
        return self._attention.kv_dtype != "bf16" or kv_scale(layer) != 1.0

    def _store(self, k: Any, v: Any, layer: Any, forward_batch: Any) -> None:
        """The same bytes as SGLang's."""
        stored = k if kv_scale(layer) == 1.0 else k / layer.k_scale
        self._set_kv_buffer(forward_batch, layer, KVWriteLoc.for_batch(forward_batch), stored, v)

    def _not_ours(
        self, k: Any, v: Any, layer: Any, forward_batch: Any, extras: Mapping[str, Any], save_kv_cache: bool
    ) -> str:
        """Why a call is SGLang's to serve, or nothing."""
        assert self._attention is not None
        if not forward_batch.forward_mode.is_target_verify():
            return f"{forward_batch.forward_mode.name.lower()} is no verify"
        if not self._attention_fits(forward_batch):
            return f"more than {self._attention.batch} requests or {self._attention.nodes} nodes"
        if (k is None) != (v is None):
            return "only one of K and V"
        given = [name for name, value in extras.items() if value is not None]
        if given:
            return given[0]
        reason = unsuitable_layer(layer, self._attention.shape)
        if not reason and k is not None and not save_kv_cache and self._reads_pool_only(layer):
            reason = "scaled or fp8 draft rows that are not in the pool"
        return reason

    def _attend(self, q: Any, k: Any, layer: Any, forward_batch: Any) -> Any:
        """[rows of q, heads * latent]; rows beyond the batch's tokens, which SGLang pads with, stay unwritten."""
        assert self._attention is not None
        metadata, (heads, head_dim, latent) = self.forward_metadata, self._attention.shape
        tokens = forward_batch.batch_size * metadata.max_extend_len
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty((q.shape[0], heads * latent))
        self._attention(
            q=q.view(-1, heads, head_dim)[:tokens],
            kv_pool=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            kv_indptr=metadata.kv_indptr,
            kv_indices=metadata.kv_indices,
            qo_indptr=metadata.qo_indptr,
            draft_kv=None if k is None else k.view(-1, 1, head_dim)[:tokens].contiguous(),
            draft_slots=forward_batch.out_cache_loc[:tokens] if k is None else None,
            tree_mask=self._tree_mask,
            out=out.view(-1, heads, latent)[:tokens],
            scale=layer.scaling,
            kv_scale=kv_scale(layer),
            nodes=metadata.max_extend_len,
            prefix=self._attention.expected_prefix(forward_batch),
        )
        self.tally.did(KIND)
        self.tally.did(KIND, self._attention.how)
        self._answers.answered(self._attention.how)
        return out

    def _mask_over_prefix(self, forward_batch: Any) -> Any:
        """This forward's mask in the full layout, for the Triton kernel, which never reads its prefix part."""
        metadata = self.forward_metadata
        mask, batch, nodes = metadata.custom_mask, forward_batch.batch_size, metadata.max_extend_len
        if mask is None:
            return None
        in_place = mask.data_ptr() == self._tree.data_ptr()
        if not in_place and not self._has_tree_only(mask, forward_batch):
            return mask
        if self._full_mask is None:
            trees = batch if in_place else mask.numel() // (nodes * nodes)
            column = torch.arange(nodes, device=mask.device)
            prefix = (metadata.kv_indptr[1:] - metadata.kv_indptr[:-1]).long()[:trees, None, None]
            start = metadata.mask_indptr[:trees, None, None] + column[:, None] * (prefix + nodes) + prefix
            size = batch * nodes * (self.max_context_len + nodes)
            self._full_mask = torch.empty(size, dtype=mask.dtype, device=mask.device)
            self._full_mask[start + column] = mask.view(-1)[: trees * nodes * nodes].view(trees, nodes, nodes)
        return self._full_mask
