"""The model of random weights in benchmarks/sglang_tokens.py: its tokens are decided, a small fault changes them."""

from __future__ import annotations

import sglang_harness  # noqa: F401 - first: it prepares triton  # isort: skip

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_server import STOCK_MOVE
from sglang_tokens import drawn
from untuned_pack import untuned_pack

from kgen.sglang import backend, plugin, tree_bits
from kgen.sglang.kv_moves import KvMoves

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Decodes on both backends, with kgen's moves in kgen's turn."""
    plugin.enable(untuned_pack("h8_p1"), plugin.checked_pack("kv_defrag"))
    ((_, mover, *_),) = HookRegistry._hooks[plugin.MOVE]
    HookRegistry.reset()
    monkeypatch.setattr(MLATokenToKVPool, "move_kv_cache", lambda pool, to, of: mover(STOCK_MOVE, pool, to, of))
    return lambda: drawn(argparse.Namespace(small=True, device="cpu", steps=None, seed=0))


def leave_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the rows that a step moves stays behind."""
    move = KvMoves.__call__

    def some(self: Any, original: Any, pool: Any, to: torch.Tensor, of: torch.Tensor) -> None:
        (moving,) = (to != of).nonzero(as_tuple=True)
        kept = torch.ones(len(to), dtype=torch.bool)
        kept[moving[-1:]] = False
        move(self, original, pool, to[kept], of[kept])

    monkeypatch.setattr(KvMoves, "__call__", some)


def flip_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child of each root does not see it."""

    def flipped(tree: Any, words: torch.Tensor, *, nodes: int) -> None:
        tree_bits.pack_words(tree, words, nodes=nodes)
        words[1::nodes] ^= 1

    monkeypatch.setattr(backend, "pack_words", flipped)


def test_all_decode_what_float32_attention_does(tokens: Callable[[], dict[str, Any]]) -> None:
    found = tokens()
    assert not found["faults"]
    assert found["agreed_tokens"]["kgen"] >= 20
    assert found["distinct_tokens"] > 15


@pytest.mark.parametrize("plant", [leave_a_row, flip_a_bit])
def test_a_fault_changes_tokens(
    tokens: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    found = tokens()
    assert found["agreed_tokens"]["kgen"] < found["agreed_tokens"]["stock"]
    assert not any(fault.startswith("stock: ") for fault in found["faults"])
