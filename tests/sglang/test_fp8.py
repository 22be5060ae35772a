"""Pools in fp8 (e4m3) and scales of K and V: kgen beside the stock backend, both beside float64.

The stock kernel multiplies Q and P in fp8 with the prefix, and takes draft rows as the model gave them, in bf16. kgen's
multiplies Q and P in 16 bits, and reads draft rows from the pool, where every later step finds them.
"""

from __future__ import annotations

import sglang_harness as harness  # first: it prepares triton  # isort: skip

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from untuned_pack import untuned_pack

from kgen.runtime import Pack
from kgen.sglang.plugin import BACKEND, enable
from kgen.sglang.suitable import kv_scale

NODES = 7
PREFIXES = (5, 0, 37)
BOUND = 5e-3  # relative L2: the tolerance that the spec proves variants within
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def packs() -> dict[torch.dtype, Pack]:
    return {E4M3: untuned_pack("h8_p1_e4m3"), torch.bfloat16: untuned_pack("h8_p1")}


class Server:
    """A runner with both backends."""

    def __init__(self, runner: Any, pack: Pack) -> None:
        self.runner, self.tally = runner, enable(pack, None)
        self.ours, self.stock = ATTENTION_BACKENDS[BACKEND](runner), ATTENTION_BACKENDS["triton"](runner)

    def rows(self) -> torch.Tensor:
        kept: torch.Tensor = self.runner.token_to_kv_pool.kv_buffer[0].clone()
        return kept


@pytest.fixture
def fp8(packs: dict[torch.dtype, Pack]) -> Iterator[Server]:
    with harness.serving(nodes=NODES, kv_dtype=E4M3) as runner:
        yield Server(runner, packs[E4M3])


@pytest.fixture
def bf16(packs: dict[torch.dtype, Pack]) -> Iterator[Server]:
    with harness.serving(nodes=NODES) as runner:
        yield Server(runner, packs[torch.bfloat16])


def scaled_layer(k: float | None, v: float | None) -> Any:
    """A layer as SGLang's loader leaves it with these scales."""
    layer = harness.make_layer()
    for name, scale in (("k_scale", k), ("v_scale", v)):
        setattr(layer, name, None if scale is None else torch.tensor(scale))
        setattr(layer, f"{name}_float", scale)
    return layer


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.double().view_as(want) - want).norm() / want.norm())


@pytest.mark.parametrize("scale", [None, 1.0, 0.5, 0.37])
def test_kgen_is_near_to_float64_and_stock_not_far(fp8: Server, scale: float | None) -> None:
    step, layer = harness.make_step(fp8.runner, PREFIXES, NODES), scaled_layer(scale, scale)
    got = harness.eager(fp8.ours, layer, step)
    written = fp8.rows()
    want = harness.attended_in_float64(fp8.runner, step, scale=scale or 1.0)
    step = harness.make_step(fp8.runner, PREFIXES, NODES)
    theirs = harness.eager(fp8.stock, layer, step)
    assert torch.equal(written, fp8.rows())
    want_theirs = harness.attended_in_float64(fp8.runner, step, scale=scale or 1.0, drafts_as_given=True)
    assert fp8.tally.ran["attention"] == 1
    assert not fp8.tally.left
    assert error(got, want) < BOUND
    assert error(theirs, want_theirs) < 0.1  # what stock rounds Q and P by, and no more: the batch is the same one


def test_given_and_stored_rows_are_the_same(fp8: Server) -> None:
    step, layer = harness.make_step(fp8.runner, PREFIXES, NODES), harness.make_layer()
    given = harness.eager(fp8.ours, layer, step)
    assert torch.equal(harness.eager(fp8.ours, layer, step, k=None, v=None, save_kv_cache=False), given)
    assert fp8.tally.ran["attention"] == 2


def test_a_graph_is_replayed_with_other_lengths_and_padding(fp8: Server) -> None:
    layer = scaled_layer(0.5, 0.5)
    fp8.ours.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * NODES)
    harness.graph_forward(fp8.ours, layer, harness.make_step(fp8.runner, (1,) * 4, NODES), capture=True)
    for seed, (prefixes, padded) in enumerate([((30, 2), 2), ((64,), 3), ((9, 0, 41, 3), 0)]):
        step = harness.make_step(fp8.runner, prefixes, NODES, seed, padded=padded)
        got = harness.graph_forward(fp8.ours, layer, step)[: len(prefixes) * NODES]
        assert error(got, harness.attended_in_float64(fp8.runner, step, scale=0.5)) < BOUND
    assert fp8.tally.ran["attention"] == 4


@pytest.mark.parametrize(
    ("k", "v", "reason"),
    [
        (0.5, 0.25, "no one scale for K and V"),
        (0.5, None, "no one scale for K and V"),  # SGLang stores K / 0.5 and reads it as it is
        (None, None, "scaled or fp8 draft rows that are not in the pool"),
    ],
)
def test_what_goes_to_sglang(fp8: Server, k: float | None, v: float | None, reason: str) -> None:
    layer, saved = scaled_layer(k, v), k is not None
    outputs = []
    for backend in (fp8.ours, fp8.stock):
        step = harness.make_step(fp8.runner, PREFIXES, NODES)
        outputs.append(harness.eager(backend, layer, step, save_kv_cache=saved))
    assert torch.equal(*outputs)
    assert fp8.tally.left == {("attention", reason): 1}


def test_a_pack_without_the_layout_leaves_an_fp8_server_to_sglang(packs: dict[torch.dtype, Pack]) -> None:
    with harness.serving(nodes=NODES, kv_dtype=E4M3) as runner:
        server = Server(runner, packs[torch.bfloat16])
    ((_, reason),) = server.tally.left
    assert "no head layout {'heads': 8, 'latent': 512, 'rope': 64, 'dtype': 'e4m3', 'page_size': 1}" in reason


def test_unit_scales_change_nothing(bf16: Server) -> None:
    """Every layer of a quantised checkpoint has scales, and bf16 pools with them."""
    step = harness.make_step(bf16.runner, PREFIXES, NODES)
    plain = harness.eager(bf16.ours, harness.make_layer(), step)
    assert torch.equal(harness.eager(bf16.ours, scaled_layer(1.0, 1.0), step), plain)
    assert torch.equal(harness.eager(bf16.ours, scaled_layer(1.0, 1.0), step, save_kv_cache=False), plain)
    assert bf16.tally.ran["attention"] == 3
    assert not bf16.tally.left


def test_a_scaled_bf16_pool(bf16: Server) -> None:
    layer, step = scaled_layer(0.37, 0.37), harness.make_step(bf16.runner, PREFIXES, NODES)
    got = harness.eager(bf16.ours, layer, step)
    written = bf16.rows()
    want = harness.attended_in_float64(bf16.runner, step, scale=0.37)
    step = harness.make_step(bf16.runner, PREFIXES, NODES)
    theirs = harness.eager(bf16.stock, layer, step)
    assert torch.equal(written, bf16.rows())
    assert bf16.tally.ran["attention"] == 1
    assert error(got, want) < BOUND
    assert error(theirs, want) < BOUND


@pytest.mark.parametrize(("k", "v", "scale"), [(None, None, 1.0), (None, 2.0, 1.0), (0.5, 0.5, 0.5), (0.5, None, None)])
def test_the_scale_of_a_layer(k: float | None, v: float | None, scale: float | None) -> None:
    assert kv_scale(scaled_layer(k, v)) == scale
