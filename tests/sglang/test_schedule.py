"""One schedule a forward: the first layer on kgen makes it, the others keep it, and no forward keeps another's."""

from __future__ import annotations

import sglang_harness as harness  # first: it prepares triton  # isort: skip

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang_graphs import WARM_UPS, VerifyGraphs
from untuned_pack import untuned_pack

from kgen.runtime import PreparedCall
from kgen.sglang.plugin import BACKEND, enable
from kgen.sglang.tally import Tally

NODES, LAYERS = 5, 3
PREFIXES = (5, 0, 37)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return enable(untuned_pack("h8_p1"), None)


@pytest.fixture
def runner(tally: Tally) -> Iterator[Any]:
    tally.ran.clear()
    tally.left.clear()
    with harness.serving(nodes=NODES, layers=LAYERS) as made:
        yield made


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each call of a kernel was told about its schedule."""
    said: list[Any] = []
    call = PreparedCall.__call__

    def spy(self: PreparedCall, **arguments: Any) -> None:
        said.append(arguments.get("schedule"))
        call(self, **arguments)

    monkeypatch.setattr(PreparedCall, "__call__", spy)
    return said


def layers(**changes: Any) -> list[Any]:
    return [harness.make_layer(layer_id=index, **changes) for index in range(LAYERS)]


def run_layers(backend: Any, model: Sequence[Any], step: harness.Step) -> list[torch.Tensor]:
    with harness.active(backend):
        return [layer(step.q, step.k, step.v, step.batch).clone() for layer in model]


def eager(backend: Any, model: Sequence[Any], step: harness.Step) -> list[torch.Tensor]:
    with harness.active(backend):
        backend.init_forward_metadata(step.batch)
    return run_layers(backend, model, step)


def assert_right(runner: Any, step: harness.Step, outputs: Sequence[torch.Tensor]) -> None:
    real = len(step.prefixes) * NODES
    for index, output in enumerate(outputs):
        want = harness.attended_in_float64(runner, step, layer_id=index)
        torch.testing.assert_close(output[:real].double().view_as(want), want, atol=0.02, rtol=2**-7)


def test_the_first_layer_makes_it_and_each_forward_makes_its_own(runner: Any, schedules: list[Any]) -> None:
    ours = ATTENTION_BACKENDS[BACKEND](runner)
    for seed, prefixes in enumerate([PREFIXES, (37, 0, 5), (14, 14, 14), (60, 1)]):
        step = harness.make_step(runner, prefixes, NODES, seed)
        assert_right(runner, step, eager(ours, layers(), step))
        assert schedules == ["make", "keep", "keep"] * (seed + 1)


def test_layers_that_sglang_serves_are_passed_over(runner: Any, schedules: list[Any], tally: Tally) -> None:
    ours = ATTENTION_BACKENDS[BACKEND](runner)
    step, model = harness.make_step(runner, PREFIXES, NODES), layers()
    model[0].logit_cap = 30.0  # the first on kgen is the second
    outputs = eager(ours, model, step)
    assert schedules == ["make", "keep"]
    other = [*layers()[:1], harness.make_layer(heads=4, layer_id=1), *layers()[2:]]
    with harness.active(ours):
        ours.init_forward_metadata(step.batch)
        for layer in other:
            layer(step.q[:, : layer.tp_q_head_num].contiguous(), step.k, step.v, step.batch)
    assert schedules == ["make", "keep"] * 2
    assert set(tally.left) == {("attention", "logit cap"), ("attention", "head layout (4, 576, 512, 1)")}
    for index in (1, 2):
        want = harness.attended_in_float64(runner, step, layer_id=index)
        torch.testing.assert_close(outputs[index].double().view_as(want), want, atol=0.02, rtol=2**-7)


def test_another_hint_makes_it_again(runner: Any, schedules: list[Any]) -> None:
    """A hint may choose another variant, which would not take the schedule."""
    ours = ATTENTION_BACKENDS[BACKEND](runner)
    step, model = harness.make_step(runner, PREFIXES, NODES), layers()
    with harness.active(ours):
        ours.init_forward_metadata(step.batch)
    outputs = run_layers(ours, model[:1], step)
    step.batch.seq_lens_sum *= 64
    outputs += run_layers(ours, [*model[1:], model[0]], step)
    assert schedules == ["make", "make", "keep", "keep"]
    assert_right(runner, step, outputs[:LAYERS])


def test_a_call_that_is_refused_leaves_nothing_to_keep(runner: Any, schedules: list[Any], tally: Tally) -> None:
    ours = ATTENTION_BACKENDS[BACKEND](runner)
    step, model = harness.make_step(runner, PREFIXES, NODES), layers()
    memory = torch.zeros(step.q.numel() + 1, dtype=step.q.dtype)
    misplaced = memory[1:].view_as(step.q).copy_(step.q)
    with harness.active(ours):
        ours.init_forward_metadata(step.batch)
        for q, layer in zip((misplaced, step.q, step.q), model, strict=True):
            layer(q, step.k, step.v, step.batch)
        layer(misplaced, step.k, step.v, step.batch)
        layer(step.q, step.k, step.v, step.batch)
    assert schedules == ["make", "make", "keep", "keep", "make"]
    assert tally.ran["attention"] == 3


def test_graphs_and_eager_forwards_take_turns(runner: Any, schedules: list[Any]) -> None:
    """Each run of a graph makes its own; what an eager forward, or another graph, left is never kept."""
    ours, model = ATTENTION_BACKENDS[BACKEND](runner), layers()
    rows = torch.ones(2, 4 * NODES, 8, harness.LATENT + harness.ROPE, dtype=torch.bfloat16)

    def forward(batch: Any) -> list[torch.Tensor]:
        tokens = batch.batch_size * NODES
        q, k = rows[0, :tokens], rows[1, :tokens, :1].contiguous()
        return [layer(q, k, k[..., : harness.LATENT], batch) for layer in model]

    def check_eager(prefixes: Sequence[int], seed: int) -> None:
        step = harness.make_step(runner, prefixes, NODES, seed)
        assert_right(runner, step, eager(ours, model, step))

    check_eager(PREFIXES, 0)
    graphs = VerifyGraphs(runner, ours, forward, nodes=NODES, sizes=[4, 2])
    for seed, prefixes in enumerate([(30, 2), (9,), (64, 3, 3, 0), (1, 70, 8)], start=1):
        step = harness.make_step(runner, prefixes, NODES, seed)
        rows[0, : len(step.q)], rows[1, : len(step.k)] = step.q, step.k
        assert_right(runner, step, graphs(step.batch))
        check_eager(prefixes[::-1], seed + 9)
    assert schedules == ["make", "keep", "keep"] * (1 + 2 * WARM_UPS + 8)
