"""The kernels of others in a bench: what they are given, what counts as a time, and what absence looks like.

SGLang and FlashInfer are played by modules of their calling conventions that compute attention in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from mla_packs import shipped_spec

from kgen.bench.mla_peers import PEERS, FlashInferFa2, FlashInferFa3, SglangExtend
from kgen.bench.peers import Call, Peer, PeerTime, Timer, time_peers

SPEC = shipped_spec()
TARGET = SPEC.targets["sm_90"]
POINT = {"batch": 2, "nodes": 5, "prefix": 37}


class PretendedTimer(Timer):
    """A CPU on which a call takes 3, 1, 2 us; the cache is so large that one copy of the pool does not fill it."""

    device = "cpu"
    l2_bytes = 500_000
    free_bytes = 1 << 40

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def samples_us(self, calls: Sequence[Call], rounds: int) -> list[float]:
        for call in calls:
            call()
        self.calls.append((len(calls), rounds))
        return [3.0, 1.0, 2.0]


def attend(q: Any, keys: Any, visible: Any, scale: float) -> Any:
    """q [nodes, heads, 576], keys [keys, 576], visible [nodes, keys] -> [nodes, heads, 512]."""
    score = torch.einsum("nhd,kd->nhk", q.float(), keys.float()) * scale
    weight = score.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("nhk,kd->nhd", weight, keys[:, :512].float()).to(torch.bfloat16)


def extend_attention_fwd(
    q_extend: Any, k_extend: Any, v_extend: Any, o_extend: Any, k_buffer: Any, v_buffer: Any, qo_indptr: Any,
    kv_indptr: Any, kv_indices: Any, custom_mask: Any, is_causal: bool, mask_indptr: Any, max_len_extend: int,
    k_scale: float, v_scale: float, sm_scale: float | None = None,
) -> None:  # fmt: skip
    assert (k_scale, v_scale, is_causal, max_len_extend) == (1.0, 1.0, True, 5)
    assert v_extend.data_ptr() == k_extend.data_ptr()
    assert v_buffer.data_ptr() == k_buffer.data_ptr()
    assert kv_indices.dtype == mask_indptr.dtype == torch.int64
    for request in range(len(qo_indptr) - 1):
        first, last = int(qo_indptr[request]), int(qo_indptr[request + 1])
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        keys = torch.cat([k_buffer[slots, 0], k_extend[first:last, 0]])
        mask = custom_mask[int(mask_indptr[request]) : int(mask_indptr[request + 1])]
        visible = mask.reshape(last - first, len(keys)).bool()
        o_extend[first:last] = attend(q_extend[first:last], keys, visible, sm_scale or 0.0)


def without_scales(*thirteen: Any, sm_scale: float | None = None) -> None:
    """The signature of older versions."""
    assert len(thirteen) == 13
    kernel: Callable[..., None] = extend_attention_fwd
    kernel(*thirteen, 1.0, 1.0, sm_scale=sm_scale)


class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace: Any, backend: str) -> None:
        assert workspace.numel() == 128 << 20
        self.backend = backend

    def plan(self, *words: Any) -> None:
        assert words[4:9] == (8, 512, 64, 1, True)
        assert all(word.dtype == torch.int32 for word in words[:4])
        self.starts, self.indptr, self.indices, self.lengths, self.scale = *words[:4], words[9]

    def run(self, q_latent: Any, q_rope: Any, latent: Any, rope: Any, out: Any) -> None:
        q, pool = torch.cat([q_latent, q_rope], -1), torch.cat([latent, rope], -1)
        for request, length in enumerate(self.lengths.tolist()):
            first, last = int(self.starts[request]), int(self.starts[request + 1])
            keys = pool[self.indices[int(self.indptr[request]) :][:length].long(), 0]
            visible = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
            out[first:last] = attend(q[first:last], keys, visible, self.scale)


def put(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module, with the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:count]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(content)


def timed(peer: Peer, timer: Timer | None = None, layout: str = "h8_p1") -> PeerTime:
    [found] = time_peers(SPEC, [peer], timer or PretendedTimer(), TARGET, [(layout, POINT)])
    return found


@pytest.mark.parametrize("layout", ["h8_p1", "h8_p64"])
@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        ("sglang.kernels.ops.attention.extend_attention", extend_attention_fwd),
        ("sglang.srt.layers.attention.triton_ops.extend_attention", without_scales),
    ],
)
def test_sglang_gets_the_tree(
    module: str, kernel: Callable[..., None], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, module, extend_attention_fwd=kernel)
    timer = PretendedTimer()
    found = timed(SglangExtend(), timer, layout)
    assert (found.reason, found.time_us, found.time_us_min, found.time_us_max) == ("", 2.0, 1.0, 3.0)
    assert 0 < (found.relative_error or 0) < 5e-3
    [(copies, rounds)] = timer.calls
    assert copies > 1
    assert copies * rounds >= 20


def test_flashinfer_gets_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    for peer in (FlashInferFa2(), FlashInferFa3()):
        found = timed(peer)
        assert (found.peer, found.reason, found.time_us) == (peer.name, "", 2.0)


def test_a_peer_that_computes_something_else_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    monkeypatch.setattr(FlashInferFa2, "computes", "tree")
    found = timed(FlashInferFa2())
    assert found.time_us is None
    assert found.reason.startswith("wrong result: out of batch=2,nodes=5,prefix=37")


def test_a_peer_that_raises_is_a_result_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such\nkernel")

    put(monkeypatch, "sglang.kernels.ops.attention.extend_attention", extend_attention_fwd=refuse)
    put(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    peers = [SglangExtend(), FlashInferFa2()]
    first, second = time_peers(SPEC, peers, PretendedTimer(), TARGET, [("h8_p1", POINT)])
    assert (first.time_us, first.reason) == (None, "RuntimeError: no such kernel")
    assert second.time_us == 2.0


def test_what_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = {peer.name: peer.missing((9, 0)) for peer in PEERS}
    assert all(why.startswith("cannot be imported: ") for why in missing.values())
    put(monkeypatch, "flashinfer.mla")
    assert [FlashInferFa3().missing((12, 0)), FlashInferFa3().missing((9, 0)), FlashInferFa2().missing((12, 0))] == [
        "needs wgmma, which compute capability 12.0 lacks", "", "",
    ]  # fmt: skip
