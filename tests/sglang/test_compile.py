"""SGLang's ``--enable-torch-compile``: it compiles a model's forward before it captures graphs of verify batches."""

from __future__ import annotations

import sglang_harness as harness  # first: it prepares triton


import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from untuned_pack import untuned_pack

from kgen.sglang import plugin
from kgen.sglang.tally import Tally

NODES = 3


@pytest.fixture(scope="module")
def tally() -> Tally:
    return plugin.enable(untuned_pack("h8_p1"), None)


@pytest.mark.parametrize("cap", [0.0, 30.0], ids=["served", "left to SGLang"])
def test_a_compiled_forward_counts_and_computes_each_time(tally: Tally, cap: float) -> None:
    """Nothing of kgen is traced: what it asks of a batch would become constants, or guards that compile it anew."""
    torch.compiler.reset()
    with harness.serving(nodes=NODES, layers=2) as runner:
        ours, stock = ATTENTION_BACKENDS[plugin.BACKEND](runner), TritonAttnBackend(runner)
        layers = [harness.make_layer(layer_id=index, logit_cap=cap) for index in range(2)]

        def forward(step: harness.Step) -> torch.Tensor:
            first = layers[0](step.q, step.k, step.v, step.batch)
            second: torch.Tensor = layers[1](step.q + first.mean() / 8, step.k, step.v, step.batch)
            return second

        compiled = torch.compile(forward, backend="eager")
        tally.ran.clear()
        tally.left.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed, prefixes in enumerate([(5, 2), (3, 1)]):
                step = harness.make_step(runner, prefixes, NODES, seed)
                with harness.active(ours):
                    ours.init_forward_metadata(step.batch)
                    found = compiled(step)
                with harness.active(stock):
                    stock.init_forward_metadata(step.batch)
                    expected = forward(step)
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert tally.ran["attention"] == (0 if cap else 4)
    assert tally.left == ({("attention", "logit cap"): 4} if cap else {})
