"""Tree masks of SGLang to the words that kgen's kernels read, on the device: static shapes, no allocation, no sync.

SGLang has two layouts. *Full*: for each request a row-major [nodes, prefix + nodes], one after the other; *tree only*:
[batch, nodes, nodes]. Both have one byte a cell, where what is not 0 is visible. The prefix part is never read, as in
SGLang's own kernels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kgen.runtime import mask_words

BLOCK = 64
"""Columns of the tree that one program copies at a time."""


@triton.jit(do_not_specialize=["cells"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy_tree_part(full, mask_indptr, kv_indptr, tree, cells, nodes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    request = row // nodes
    prefix = (tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)).to(tl.int64)
    start = tl.load(mask_indptr + request) + (row % nodes) * (prefix + nodes) + prefix
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < nodes
    visible = tl.load(full + start + column, inside & (start + column < cells), other=0)
    tl.store(tree + row.to(tl.int64) * nodes + column, visible, inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pack_words(tree, words, nodes, count):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    bit = tl.arange(0, 32)
    column = word * 32 + bit
    visible = tl.load(tree + row * nodes + column, column < nodes, other=0)
    tl.store(words + row * count + word, tl.sum((visible != 0).to(tl.int32) << bit, axis=0))


def copy_tree_part(full: Any, mask_indptr: Any, kv_indptr: Any, tree: Any, *, batch: int, nodes: int) -> None:
    """The tree part of a full mask (bool or uint8, flat) to ``tree`` (uint8 [>= batch * nodes * nodes]).

    ``mask_indptr`` (int64 [> batch]) says where each request's cells start; ``kv_indptr`` [> batch] sums up prefixes.
    """
    if batch:
        cells = full.view(dtype=tree.dtype)
        grid = (batch * nodes, triton.cdiv(nodes, BLOCK))
        _copy_tree_part[grid](cells, mask_indptr, kv_indptr, tree, cells.numel(), nodes, block=BLOCK)


def pack_words(tree: Any, words: Any, *, nodes: int) -> None:
    """Tree-only cells to ``words`` (int32 [rows, count]): bit j % 32 of word j // 32 is cell j of the row."""
    rows, count = words.shape
    if rows:
        _pack_words[rows, count](tree, words, nodes, count)


def compile_for(tree: Any, words: Any, *, mask_indptr: Any, kv_indptr: Any, nodes: int) -> None:
    """Run both kernels once on a server's buffers, at its start: no request and no graph waits for their compiler.

    ``tree`` and ``words`` (flat, of a request at least) and both sums, zeros here, are those of later calls.
    """
    copy_tree_part(tree.clone(), mask_indptr, kv_indptr, tree, batch=1, nodes=nodes)
    pack_words(tree, words[: nodes * mask_words(nodes)].view(nodes, -1), nodes=nodes)
