"""Moves of KV rows: kgen's hook and SGLang's own method leave the same bytes."""

from __future__ import annotations

import sglang_harness as harness  # first: it prepares triton  # isort: skip

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from kgen.sglang import kv_moves
from kgen.sglang.kv_moves import MOST_ROWS, USUAL_ROWS, KvMoves
from kgen.sglang.plugin import checked_pack
from kgen.sglang.tally import Tally

ORIGINAL = MLATokenToKVPool.move_kv_cache
LAYERS = 3


def filled_pool(dtype: torch.dtype, rope: int = harness.ROPE, seed: int = 0) -> Any:
    pool = harness.make_pool(60, LAYERS, dtype, rope=rope)
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.kv_buffer:
        layer.view(torch.uint8).random_(0, 256, generator=generator)
    return pool


def hook() -> tuple[KvMoves, Tally]:
    tally = Tally()
    return KvMoves(checked_pack("kv_defrag"), tally), tally


def contents(pool: Any) -> torch.Tensor:
    return torch.stack([layer.view(torch.uint8) for layer in pool.kv_buffer])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("target", "source"),
    [
        ([5, 6, 7], [20, 31, 6]),  # 6 is source and target
        ([1, 2, 3, 0, 0], [2, 3, 1, 0, 0]),  # a cycle, and SGLang's padding
        ([9], [9]),
    ],
)
def test_both_leave_the_same_bytes(
    dtype: torch.dtype, index: torch.dtype, target: list[int], source: list[int]
) -> None:
    moves, tally = hook()
    ours, theirs = filled_pool(dtype), filled_pool(dtype)
    slots = torch.tensor(target, dtype=index), torch.tensor(source, dtype=index)
    moves(ORIGINAL, ours, *slots)
    ORIGINAL(theirs, *slots)
    assert torch.equal(contents(ours), contents(theirs))
    assert tally.ran["a KV move"] == 1
    assert not tally.left


def test_a_pool_keeps_its_call_until_its_tensors_change() -> None:
    moves, tally = hook()
    pool = filled_pool(torch.bfloat16)
    slots = torch.tensor([[4, 5]]), torch.tensor([[8, 9]])
    moves(ORIGINAL, pool, *slots)
    known = moves._movers[pool]
    moves(ORIGINAL, pool, *slots)
    assert moves._movers[pool] is known
    pool.kv_buffer = filled_pool(torch.bfloat16, seed=1).kv_buffer
    expected = contents(pool)[2][8].clone()
    moves(ORIGINAL, pool, *slots)
    assert torch.equal(contents(pool)[2][4], expected)
    assert tally.ran["a KV move"] == 3


def test_rows_that_the_pack_lacks_and_long_lists_go_to_sglang() -> None:
    moves, tally = hook()
    ours, theirs = filled_pool(torch.bfloat16, rope=32), filled_pool(torch.bfloat16, rope=32)
    slots = torch.tensor([5]), torch.tensor([6])
    moves(ORIGINAL, ours, *slots)
    ORIGINAL(theirs, *slots)
    assert torch.equal(contents(ours), contents(theirs))
    ((_, reason),) = tally.left
    assert "no head layout {'row_bytes': 1088, 'moves': 'any'}" in reason
    many = torch.zeros(USUAL_ROWS + 1, dtype=torch.int64)
    moves(ORIGINAL, filled_pool(torch.bfloat16), many, many)
    assert tally.left["a KV move", f"more than {USUAL_ROWS} rows"] == 1
    assert tally.ran["a KV move"] == 0


@pytest.mark.parametrize(("expected", "rows"), [(6, 6), (700, 700), (64000, MOST_ROWS)])
def test_the_capacity_is_the_servers(monkeypatch: pytest.MonkeyPatch, expected: int, rows: int) -> None:
    moves, tally = hook()
    ours, theirs = (harness.make_pool(2 * rows + 2, 2, torch.bfloat16) for _ in range(2))
    moves.expect(ours, expected)
    monkeypatch.setattr(kv_moves, "prepare", None)  # the pool's call is ready, whatever captures graphs from here on
    monkeypatch.setattr(kv_moves, "_is_capturing", lambda _: True)
    for pool in (ours, theirs):
        for layer in pool.kv_buffer:
            layer.view(torch.int16).copy_(torch.arange(layer.numel()).view(layer.shape) % 32749)
    target, source = torch.arange(1, rows + 1), torch.arange(1, rows + 1).flip(0) + rows // 2
    moves(ORIGINAL, ours, target, source)
    ORIGINAL(theirs, target, source)
    assert torch.equal(contents(ours), contents(theirs))
    mover = moves._movers[ours]
    assert isinstance(mover, kv_moves.PoolMover)
    assert (tally.ran["a KV move"], mover.call.capacity["rows"]) == (1, rows)
    longer = torch.ones(rows + 1, dtype=torch.int64)
    moves(ORIGINAL, ours, longer, longer)
    assert tally.left == {("a KV move", f"more than {rows} rows"): 1}


def test_a_pool_without_memory_for_the_workspace_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, tally = hook()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kv_moves, "prepare", full)
    ours, theirs = filled_pool(torch.bfloat16), filled_pool(torch.bfloat16)
    slots = torch.tensor([5]), torch.tensor([6])
    for _ in range(2):
        moves(ORIGINAL, ours, *slots)
        ORIGINAL(theirs, *slots)
    assert torch.equal(contents(ours), contents(theirs))
    assert tally.left == {("a KV move", "no memory for the workspace"): 2}


def test_moves_are_prepared_for_the_largest_server_of_a_process() -> None:
    moves, _ = hook()
    pool, of_heads = filled_pool(torch.bfloat16), object()  # a pool whose moves the hook is not for
    assert moves.rows == USUAL_ROWS
    for rows, most in ((80, 80), (1024, 1024), (16, 1024), (6400, MOST_ROWS)):
        moves.expect(pool, rows)
        moves.expect(of_heads, rows)
        mover = moves._movers[pool]
        assert isinstance(mover, kv_moves.PoolMover)
        assert moves.rows == mover.rows == most
    assert list(moves._movers) == [pool]


def test_a_pool_that_first_moves_inside_a_capture_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, tally = hook()
    monkeypatch.setattr(kv_moves, "_is_capturing", lambda _: True)
    moves(ORIGINAL, filled_pool(torch.bfloat16), torch.tensor([5]), torch.tensor([6]))
    assert tally.left == {("a KV move", "the first move of a pool is inside a graph capture"): 1}


def test_nothing_to_move() -> None:
    moves, tally = hook()
    none = torch.empty(0, dtype=torch.int64)
    moves(ORIGINAL, filled_pool(torch.bfloat16), none, none)
    assert not tally.ran
    assert not tally.left
