"""SGLang's own test kit for MLA backends on kgen: a part of `sglang_h200.py`."""

from __future__ import annotations

import argparse
import unittest
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify
from sglang_server import LATENT, ROPE, backends, serving


def kit_part(options: argparse.Namespace) -> dict[str, Any]:
    """Its verify cases, eager and with graph metadata, of each kind of draft, topk and page size; skips are faults."""
    faults, ran = [], 0
    # The kit's graph cases write the prefix in order, whatever the layout of the batch: stock fails on others too.
    contiguous = partial(verify.build_mla_attention_fixture, loc_layout="contiguous")
    scattered = verify.build_mla_attention_fixture
    common = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "dtype": torch.bfloat16, "device": options.device}
    for page_size in (1,) if options.small else (1, 16):
        case = mla.MLAAttentionCase("verify", "kgen", ForwardMode.TARGET_VERIFY, 8, page_size, (5, 0, 17), (3, 3, 3))
        for kind, topk in (
            [("eagle", 2)] if options.small else [("eagle", 1), ("eagle", 2), ("ngram", 2), ("dflash", 1)]
        ):
            for run, build in (
                (verify.run_mla_eagle_verify_case, scattered),
                (verify.run_mla_eagle_verify_cuda_graph_case, contiguous),
            ):
                ran += 1
                verify.build_mla_attention_fixture = build
                try:
                    run(unittest.TestCase(), case, topk=topk, spec_kind=kind, **common)
                except (AssertionError, unittest.SkipTest) as error:
                    faults.append(f"{run.__name__} {kind} topk {topk} page {page_size}: {str(error)[:200]}")
    verify.build_mla_attention_fixture = scattered
    with serving(nodes=3, device=options.device) as runner:
        served = backends(runner)["kgen"].tally.ran["attention"]  # all backends of a process count in one
    if served < ran:
        faults.append(f"kgen's kernel served {served} calls in {ran} cases")
    return {"cases": ran, "faults": faults}
