"""SGLang's own test kit for MLA backends, run on kgen: what it asks of any backend, and that kgen's kernel answered."""

from __future__ import annotations

import sglang_harness  # first: it prepares triton  # isort: skip  # noqa: F401

import unittest
from functools import partial

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify

from kgen.sglang.plugin import BACKEND, checked_pack, enable
from kgen.sglang.tally import Tally


@pytest.fixture(scope="module")
def tally() -> Tally:
    return enable(checked_pack("verify_mla"), None)


@pytest.fixture(autouse=True)
def _skips_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit skips where a backend's constructor raises; here that is a failure."""

    def fail(self: unittest.TestCase, reason: str) -> None:
        pytest.fail(reason)

    monkeypatch.setattr(unittest.TestCase, "skipTest", fail)


def keywords() -> dict[str, object]:
    return {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.bfloat16, "device": "cpu"}


@pytest.mark.parametrize("case", mla.make_mla_cases(BACKEND), ids=lambda case: case.name)
def test_extend_and_decode(tally: Tally, case: mla.MLAAttentionCase) -> None:
    tally.ran.clear()
    mla.run_mla_attention_case(unittest.TestCase(), case, **keywords())
    assert tally.ran["attention"] == 0  # SGLang's own kernels serve these


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kind", ["eagle", "ngram", "frozen_kv_mtp"])
def test_verify(tally: Tally, topk: int, page_size: int, kind: str) -> None:
    tally.ran.clear()
    case = mla.MLAAttentionCase("verify", BACKEND, ForwardMode.TARGET_VERIFY, 8, page_size, (5, 0, 17), (3, 3, 3))
    verify.run_mla_eagle_verify_case(unittest.TestCase(), case, topk=topk, spec_kind=kind, **keywords())
    assert tally.ran["attention"] == 1


@pytest.mark.parametrize(("topk", "kind"), [(1, "eagle"), (2, "eagle"), (1, "dflash"), (2, "ngram")])
def test_verify_in_a_graph_with_padding(tally: Tally, monkeypatch: pytest.MonkeyPatch, topk: int, kind: str) -> None:
    # The kit's graph cases write the prefix in order, whatever the layout of the batch: stock fails on others too.
    build = partial(verify.build_mla_attention_fixture, loc_layout="contiguous")
    monkeypatch.setattr(verify, "build_mla_attention_fixture", build)
    tally.ran.clear()
    case = mla.MLAAttentionCase("verify", BACKEND, ForwardMode.TARGET_VERIFY, 8, 1, (5, 0, 17), (3, 3, 3))
    verify.run_mla_eagle_verify_cuda_graph_case(unittest.TestCase(), case, topk=topk, spec_kind=kind, **keywords())
    assert tally.ran["attention"] == 3  # eager, capture, replay
