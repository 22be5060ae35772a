"""Tree verify through SGLang's classes: kgen's kernels beside the stock Triton backend on the same batch."""

from __future__ import annotations

import sglang_harness as harness  # first: it prepares triton  # isort: skip

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.score_mod import relative_bias_score_mod
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang_graphs import VerifyGraphs

from kgen.errors import InputError
from kgen.family import families
from kgen.runtime import Pack
from kgen.runtime.backends import CudaBackend, EmulatorBackend
from kgen.sglang import attend
from kgen.sglang.plugin import BACKEND, checked_pack, enable
from kgen.sglang.suitable import unsuitable_layer, unsuitable_server
from kgen.sglang.tally import Tally

NODES = 7
PREFIXES = (5, 0, 37)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return enable(checked_pack("verify_mla"), None)


@pytest.fixture
def runner(tally: Tally) -> Iterator[Any]:
    tally.ran.clear()
    tally.left.clear()
    with harness.serving(nodes=NODES) as made:
        yield made


def backends(runner: Any) -> tuple[Any, Any]:
    return ATTENTION_BACKENDS[BACKEND](runner), ATTENTION_BACKENDS["triton"](runner)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """bf16 results, from P rounded to bf16, on both sides; an ulp is up to 2**-7 of a value."""
    torch.testing.assert_close(got, want, atol=0.02, rtol=2**-7)


def ran(tally: Tally) -> int:
    return tally.ran["attention"]


def test_eager(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
    how = {"attention by default": 1, "verify by default": 1}  # a prefix of 14 was not tuned
    assert tally.ran == {"verify": 1, "attention": 1} | how
    assert not tally.left
    assert got.shape == want.shape
    assert_close(got, want)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_trees_and_ragged_prefixes(runner: Any, tally: Tally, seed: int) -> None:
    ours, stock = backends(runner)
    generator = torch.Generator().manual_seed(seed)
    prefixes = torch.randint(0, 60, (4,), generator=generator).tolist()
    step, layer = harness.make_step(runner, prefixes, NODES, seed), harness.make_layer()
    got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
    assert ran(tally) == 1
    assert_close(got, want)


def test_no_prefix_at_all(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, (0, 0), NODES), harness.make_layer()
    got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
    assert ran(tally) == 1
    assert_close(got, want)


def test_a_wrong_tree_is_seen(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    want = harness.eager(stock, layer, step)
    step.batch.spec_info.custom_mask = None
    chain = harness.eager(ours, layer, step)
    assert ran(tally) == 1
    assert (chain - want).abs().max() > 0.2


def test_flat_q_stored_kv_and_both_mask_dtypes(runner: Any, tally: Tally) -> None:
    ours, _ = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    want = harness.eager(ours, layer, step)
    assert torch.equal(runner.token_to_kv_pool.get_key_buffer(0)[step.batch.out_cache_loc], step.k)
    flat = harness.eager(ours, layer, step, q=step.q.flatten(1), k=step.k.clone(), save_kv_cache=False)
    stored = harness.eager(ours, layer, step, k=None, v=None, save_kv_cache=False)
    step.batch.spec_info.custom_mask = step.batch.spec_info.custom_mask.to(torch.uint8)
    as_bytes = harness.eager(ours, layer, step)
    for got in (flat, stored, as_bytes):
        assert torch.equal(got, want)
    assert ran(tally) == 4


def test_kv_stays_unwritten_where_sglang_says_so(runner: Any) -> None:
    ours, _ = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    before = runner.token_to_kv_pool.get_key_buffer(0).clone()
    harness.eager(ours, layer, step, save_kv_cache=False)
    assert torch.equal(runner.token_to_kv_pool.get_key_buffer(0), before)


def test_a_mask_of_the_tree_only(runner: Any, tally: Tally) -> None:
    ours, _ = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    want = harness.eager(ours, layer, step)
    step.batch.spec_info.custom_mask = torch.stack(step.trees).flatten()
    assert torch.equal(harness.eager(ours, layer, step), want)
    assert ours.verify_mask.mode.name == "QLEN_ONLY"
    ours.verify_mask.buffer.fill_(1)  # SGLang's tree builder writes into the buffer that it is given
    ours.verify_mask.buffer[: len(PREFIXES) * NODES * NODES] = torch.stack(step.trees).flatten()
    step.batch.spec_info.custom_mask = ours.verify_mask.buffer
    assert torch.equal(harness.eager(ours, layer, step), want)
    assert ran(tally) == 3


def test_a_chain_has_no_mask(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    step.batch.spec_info.custom_mask = None
    got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
    assert ran(tally) == 1
    assert_close(got, want)


def test_more_nodes_than_a_mask_word(tally: Tally) -> None:
    tally.ran.clear()
    with harness.serving(nodes=40, max_bs=2) as runner:
        ours, stock = backends(runner)
        step, layer = harness.make_step(runner, (3, 20), 40), harness.make_layer()
        got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
        assert ran(tally) == 1
    assert_close(got[:32], want[:32])
    reference = harness.attended_in_float64(runner, step)
    assert_close(got.double().view_as(reference), reference)


def test_the_reference_agrees(runner: Any) -> None:
    ours, _ = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    got = harness.eager(ours, layer, step).view(-1, 8, harness.LATENT)
    assert_close(got.double(), harness.attended_in_float64(runner, step))


def test_a_graph_is_replayed_with_other_lengths_masks_and_padding(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    layer = harness.make_layer()
    dummy = harness.make_step(runner, (1, 1, 1, 1), NODES)
    dummy.batch.spec_info.custom_mask = torch.ones(4 * (1 + NODES) * NODES + 13, dtype=torch.bool)
    dummy.batch.spec_info.draft_token = None
    ours.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
    harness.graph_forward(ours, layer, dummy, capture=True)
    addresses = [tensor.data_ptr() for tensor in graph_tensors(ours)]
    for seed, (prefixes, padded, masked) in enumerate(
        [((5, 0, 37, 20), 0, True), ((30, 2), 2, True), ((9, 9, 9), 1, False), ((64,), 3, True)], start=1
    ):
        step = harness.make_step(runner, prefixes, NODES, seed, padded=padded)
        if not masked:
            step.batch.spec_info.custom_mask = None
        got = harness.graph_forward(ours, layer, step)
        assert [tensor.data_ptr() for tensor in graph_tensors(ours)] == addresses
        real = len(prefixes) * NODES
        alone = harness.make_step(runner, prefixes, NODES, seed)
        if not masked:
            alone.batch.spec_info.custom_mask = None
        want = harness.eager(stock, layer, alone)
        assert_close(got[:real], want[:real])
    assert ran(tally) == 5
    assert tally.ran["verify"] == tally.ran["verify by default"] == 4  # what is captured is no forward
    assert not tally.left


def graph_tensors(backend: Any) -> list[Any]:
    metadata = backend.forward_metadata
    return [metadata.kv_indptr, metadata.kv_indices, metadata.qo_indptr, backend._tree_mask, backend.verify_mask.buffer]


def test_a_replay_with_the_mask_written_in_place(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    layer = harness.make_layer()
    ours.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
    harness.graph_forward(ours, layer, harness.make_step(runner, (1,) * 4, NODES), capture=True)
    step = harness.make_step(runner, (11, 3, 8, 0), NODES, 5)
    want = harness.eager(stock, layer, step)
    ours.verify_mask.buffer.copy_(torch.stack(step.trees).flatten())
    step.batch.spec_info.custom_mask = ours.verify_mask.buffer
    assert_close(harness.graph_forward(ours, layer, step), want)
    assert ran(tally) == 2


@pytest.mark.parametrize("tokens", [3, 9])  # a request, fewer and more than a tree has nodes
@pytest.mark.parametrize("full", [True, False], ids=["full mask", "tree only"])
def test_a_replay_after_a_prefill_takes_its_own_tree(runner: Any, tally: Tally, tokens: int, full: bool) -> None:
    ours, stock = backends(runner)
    prefill = prefill_batch(runner, tokens)
    step, layer = harness.make_step(runner, (11, 3, 8, 0), NODES, 5), harness.make_layer()
    want = harness.eager(stock, layer, step)
    graphs = VerifyGraphs(runner, ours, lambda batch: layer(step.q, step.k, step.v, batch), nodes=NODES, sizes=[4])
    with harness.active(ours):
        ours.init_forward_metadata(prefill)
    if not full:
        step.batch.spec_info.custom_mask = torch.stack(step.trees).flatten()
    assert_close(graphs(step.batch), want)
    assert tally.ran["verify"] == 1
    assert not tally.left


def prefill_batch(runner: Any, tokens: int) -> Any:
    """SGLang's batch of two requests that each prefill ``tokens`` tokens behind six."""
    batch = harness.make_step(runner, (6 + tokens, 6 + tokens), tokens).batch
    batch.forward_mode, batch.spec_info = ForwardMode.EXTEND, None
    batch.extend_prefix_lens, batch.extend_seq_lens = torch.full((2,), 6), torch.full((2,), tokens)
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [6, 6], [tokens, tokens]
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def test_graph_buffers_are_sized_by_the_batch(runner: Any) -> None:
    ours, stock = backends(runner)
    for backend in (ours, stock):
        backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
    assert ours.cuda_graph_attn_logits.shape[0] == 4
    assert stock.cuda_graph_attn_logits.shape[0] == 4 * NODES
    assert ours.cuda_graph_kv_indices.numel() == 4 * 96
    assert ours.verify_mask.buffer.numel() == 4 * NODES * NODES
    assert ours.num_draft_tokens == NODES


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(tally: Tally, page_size: int) -> None:
    tally.ran.clear()
    with harness.serving(nodes=NODES, page_size=page_size) as runner:
        ours, stock = backends(runner)
        step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
        got, want = harness.eager(ours, layer, step), harness.eager(stock, layer, step)
        assert ran(tally) == 1
        assert ours._attention.layout_name == ("h8_p64" if page_size == 64 else "h8_p1")
    assert_close(got, want)


@pytest.mark.parametrize("reason", ["logit cap", "sinks", "no one scale for K and V", "score_mod", "aux_tensors"])
def test_calls_that_go_to_sglang(runner: Any, tally: Tally, reason: str) -> None:
    ours, stock = backends(runner)
    step = harness.make_step(runner, PREFIXES, NODES)
    layer = harness.make_layer(logit_cap=30.0 if reason == "logit cap" else 0.0)
    aux = [torch.ones(len(PREFIXES) * NODES, 8, 4)]
    extras: dict[str, Any] = {
        "sinks": {"sinks": torch.ones(8)},
        "score_mod": {"score_mod": relative_bias_score_mod, "aux_tensors": aux},
        "aux_tensors": {"aux_tensors": aux},
    }.get(reason, {})
    if reason.startswith("no one scale"):
        layer.k_scale, layer.k_scale_float = torch.tensor(2.0), 2.0
    full = step.batch.spec_info.custom_mask
    step.batch.spec_info.custom_mask = torch.stack(step.trees).flatten()  # the stock kernel needs one over the prefix
    from_tree = harness.eager(ours, layer, step, **extras)
    step.batch.spec_info.custom_mask = full
    assert torch.equal(harness.eager(ours, layer, step, **extras), from_tree)
    assert torch.equal(harness.eager(stock, layer, step, **extras), from_tree)
    plain = harness.eager(stock, harness.make_layer(), step)
    changes_nothing = reason in ("aux_tensors", "no one scale for K and V")  # what is read then has no scale
    assert torch.equal(from_tree, plain) == changes_nothing
    assert tally.left == {("attention", reason): 2}
    assert ran(tally) == 0


def scales(k: float, v: float) -> dict[str, Any]:
    """What SGLang's loader leaves in the layers of a quantised checkpoint."""
    return {"k_scale": torch.tensor(k), "k_scale_float": k, "v_scale": torch.tensor(v), "v_scale_float": v}


@pytest.mark.parametrize(
    ("made", "changed", "reason"),
    [
        ({}, {}, ""),
        ({"head_dim": 192, "v_head_dim": 128}, {}, "head layout (8, 192, 128, 1)"),
        ({"logit_cap": 30.0}, {}, "logit cap"),
        ({}, {"k_scale": torch.tensor(2.0)}, "no one scale for K and V"),
        ({}, scales(2.0, 3.0), "no one scale for K and V"),
        ({}, scales(2.0, 2.0), ""),
        ({}, {"sliding_window_size": 128}, "sliding window layer"),
        ({}, {"is_cross_attention": True}, "not causal self-attention"),
        ({}, {"attn_type": AttentionType.ENCODER_ONLY}, "not causal self-attention"),
        ({}, {"xai_temperature_len": 1024}, "temperature by length"),
    ],
)
def test_layers_that_go_to_sglang(runner: Any, made: dict[str, Any], changed: dict[str, Any], reason: str) -> None:
    ours, _ = backends(runner)
    layer = harness.make_layer(**made)
    for name, value in changed.items():
        setattr(layer, name, value)
    assert unsuitable_layer(layer, ours._attention.shape) == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"use_mla": False}, "the model has no MLA"),
        ({"is_draft_runner": True}, "this is a draft model"),
        ({"skip_prefill": True}, "this is a draft model"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"sliding_window_size": 128}, "sliding window"),
        ({"use_sliding_window_kv_pool": True}, "sliding window"),
        ({"dllm_attention": object()}, "diffusion model"),
    ],
)
def test_models_that_go_to_sglang(runner: Any, changed: dict[str, Any], reason: str) -> None:
    ours, _ = backends(runner)
    for name, value in changed.items():
        setattr(ours, name, value)
    assert unsuitable_server(ours, runner) == reason


def test_more_requests_than_were_prepared_go_to_sglang(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    ours._attention.batch = len(PREFIXES) - 1
    assert torch.equal(harness.eager(ours, layer, step), harness.eager(stock, layer, step))
    assert tally.left == {("attention", f"more than 2 requests or {NODES} nodes"): 1}


def test_a_graph_of_more_nodes_than_were_prepared_for_is_refused_at_capture(runner: Any) -> None:
    ours, _ = backends(runner)
    ours.init_cuda_graph_state(max_bs=2, max_num_tokens=2 * NODES)
    wider = harness.make_step(runner, (1, 1), NODES + 2)
    with pytest.raises(InputError, match=f"a CUDA graph: has more nodes than verify was prepared for, 9 of {NODES}"):
        harness.graph_forward(ours, harness.make_layer(), wider, capture=True)


def test_an_eager_batch_of_more_nodes_than_were_prepared_for_goes_to_sglang(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    wider, layer = harness.make_step(runner, PREFIXES, NODES + 2), harness.make_layer()
    assert torch.equal(harness.eager(ours, layer, wider), harness.eager(stock, layer, wider))
    assert tally.left == {("attention", f"more than 4 requests or {NODES} nodes"): 1}


def test_two_layers_of_one_number_are_told_apart(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, capped = harness.make_step(runner, PREFIXES, NODES), harness.make_layer(logit_cap=1.0)
    harness.eager(ours, harness.make_layer(), step)
    assert torch.equal(harness.eager(ours, capped, step), harness.eager(stock, capped, step))
    assert ran(tally) == 1


def test_a_tensor_that_is_refused_gives_one_reason_wherever_it_lies(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    want, kept = harness.eager(stock, layer, step), []
    for shift in range(3):
        memory = torch.zeros(step.q.numel() + 64 * shift + 1, dtype=step.q.dtype)
        q = memory[1 : 1 + step.q.numel()].view_as(step.q).copy_(step.q)
        kept.append(memory)
        assert torch.equal(harness.eager(ours, layer, step, q=q), want)
    ((_, reason),) = tally.left
    assert reason.startswith("q ")


@pytest.mark.parametrize("prefixes", [(5, 20), (NODES,)])
@pytest.mark.parametrize("full", [False, True])
def test_an_eager_batch_may_be_padded(runner: Any, tally: Tally, prefixes: Sequence[int], full: bool) -> None:
    """Masks are of the requests that are there. One of these covers as many cells as a tree-only mask of all rows."""
    ours, stock = backends(runner)
    layer, rows = harness.make_layer(), len(prefixes) * NODES
    want = harness.eager(stock, layer, harness.make_step(runner, prefixes, NODES, 3))
    step = harness.make_step(runner, prefixes, NODES, 3, padded=1)
    if not full:
        step.batch.spec_info.custom_mask = torch.stack(step.trees[: len(prefixes)]).flatten()
    assert_close(harness.eager(ours, layer, step)[:rows], want)
    assert ran(tally) == 1
    capped = harness.make_layer(logit_cap=30.0)
    alone = harness.make_step(runner, prefixes, NODES, 3)
    assert torch.equal(harness.eager(ours, capped, step)[:rows], harness.eager(stock, capped, alone))


def test_a_graph_makes_its_own_mask_for_a_layer_of_sglang(runner: Any) -> None:
    """A warm-up that was not recorded leaves nothing that the recorded run reads."""
    ours, _ = backends(runner)
    layer, step = harness.make_layer(logit_cap=30.0), harness.make_step(runner, (1, 1, 1), NODES)
    ours.init_cuda_graph_state(max_bs=3, max_num_tokens=3 * NODES)
    masks = []
    with harness.active(ours):
        ours.init_forward_metadata_out_graph(step.batch, in_capture=True)
        for _ in range(3):
            ours.init_forward_metadata_in_graph(step.batch)
            layer(step.q, step.k, step.v, step.batch)
            masks.append(ours._full_mask)
    assert len({id(mask) for mask in masks}) == 3


def test_a_layer_for_sglang_inside_a_graph(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    layer = harness.make_layer(logit_cap=30.0)
    ours.init_cuda_graph_state(max_bs=3, max_num_tokens=3 * NODES)
    harness.graph_forward(ours, layer, harness.make_step(runner, (1, 1, 1), NODES), capture=True)
    step = harness.make_step(runner, PREFIXES, NODES, 4)
    want = harness.eager(stock, layer, step)
    assert torch.equal(harness.graph_forward(ours, layer, step), want)
    assert ran(tally) == 0


def test_decode_and_prefill_are_the_stock_ones(runner: Any, tally: Tally) -> None:
    ours, stock = backends(runner)
    layer = harness.make_layer()
    step = harness.make_step(runner, (6, 9), 1)
    batch = step.batch
    batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
    batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens + 1
    batch.seq_lens_sum += 2
    runner.kv_index_translator.bind_own_plan(batch)
    decoded = [harness.eager(backend, layer, step) for backend in (ours, stock)]
    assert torch.equal(*decoded)
    batch.forward_mode = ForwardMode.EXTEND
    batch.extend_prefix_lens = batch.seq_lens - 1
    batch.extend_seq_lens = torch.ones(2, dtype=torch.int64)
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = batch.extend_prefix_lens.tolist(), [1, 1]
    runner.kv_index_translator.bind_own_plan(batch)
    extended = [harness.eager(backend, layer, step) for backend in (ours, stock)]
    assert torch.equal(*extended)
    assert tally.left == {("attention", "extend is no verify"): 1}
    assert ran(tally) == 0


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"heads": 12}, "no head layout"),
        ({"dtype": torch.float16}, "the KV cache is torch.float16, not bfloat16 or float8_e4m3fn"),
        ({"kv_dtype": torch.float8_e5m2}, "the KV cache is torch.float8_e5m2, not bfloat16 or float8_e4m3fn"),
        ({"heads": 12, "kv_dtype": torch.float8_e4m3fn}, "'dtype': 'e4m3'"),
        ({"enable_deterministic_inference": True}, "deterministic inference"),
        ({"speculative_num_draft_tokens": None}, "there is no speculative decoding"),
    ],
)
def test_servers_that_stay_with_sglang(tally: Tally, server: dict[str, Any], reason: str) -> None:
    tally.left.clear()
    with harness.serving(nodes=NODES, **server) as runner:
        ours, _ = backends(runner)
        assert ours._attention is None
    ((kind, said),) = tally.left
    assert kind == "attention"
    assert reason in said


def test_a_server_of_overlapping_batches_stays_with_sglang(tally: Tally) -> None:
    tally.left.clear()
    with harness.serving(nodes=NODES) as runner, get_exec().overlap.override(enable_two_batch_overlap=True):
        assert backends(runner)[0]._attention is None
    assert tally.left == {("attention", "two-batch overlap"): 1}


def too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SimpleNamespace(_device=SimpleNamespace(shared_bytes_per_block=49152))

    def load(_: EmulatorBackend, pack: Pack, sources: Sequence[str], __: str) -> None:
        for source in sources:
            CudaBackend._require_shared(gpu, pack.where, pack.manifest.sources[source], "sm_120")

    monkeypatch.setattr(EmulatorBackend, "load", load)


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nProcess 17 has 90 GiB in use.")

    monkeypatch.setattr(attend, "prepare", prepare)


def newer_kgen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(families()["verify_mla"]), "plan_version", 99)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (newer_kgen, "is for another kgen, which launches verify_mla differently, kgen "),
        (no_memory, "no memory for the workspace"),
        (too_little_shared_memory, " B of shared memory a block, this GPU has 49152 B; tune and emit a pack for this"),
    ],
)
def test_a_pack_that_this_server_cannot_run(
    runner: Any, tally: Tally, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    spoil(monkeypatch)
    ours, stock = backends(runner)
    ((kind, said),) = tally.left
    assert kind == "attention"
    assert reason in said
    assert "\n" not in said  # it is logged as one line, and a label of metrics
    step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
    assert torch.equal(harness.eager(ours, layer, step), harness.eager(stock, layer, step))
    assert ran(tally) == 0


def test_a_server_that_stays_with_sglang_verifies_as_before(tally: Tally) -> None:
    with harness.serving(nodes=NODES, dtype=torch.float16) as runner:
        ours, stock = backends(runner)
        step, layer = harness.make_step(runner, PREFIXES, NODES), harness.make_layer()
        assert torch.equal(harness.eager(ours, layer, step), harness.eager(stock, layer, step))
        for backend in (ours, stock):
            backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
        assert ours.cuda_graph_attn_logits.shape == stock.cuda_graph_attn_logits.shape
        assert type(ours.verify_mask.buffer) is type(stock.verify_mask.buffer)


def test_a_capture_holds_what_was_verified(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "capture.jsonl"
    monkeypatch.setenv("KGEN_CAPTURE", str(path))
    ours, _ = backends(runner)
    harness.eager(ours, harness.make_layer(), harness.make_step(runner, PREFIXES, NODES))
    ours.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
    harness.graph_forward(ours, harness.make_layer(), harness.make_step(runner, (1,) * 4, NODES), capture=True)
    harness.graph_forward(ours, harness.make_layer(), harness.make_step(runner, (30, 2), NODES, padded=2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prefixes"] for line in lines] == [list(PREFIXES), [30, 2]]
    assert {(line["layout"], line["nodes"]) for line in lines} == {("h8_p1", NODES)}
