"""Boolean tree masks to the words that kernels read. Done once a step, when a draft tree becomes known."""

from __future__ import annotations

from typing import Any

from kgen.errors import TensorError

WORD_BITS = 32


def mask_words(nodes: int) -> int:
    """Words that a row needs for ``nodes`` nodes."""
    return max(1, -(-nodes // WORD_BITS))


def pack_tree_mask(visible: Any, words: int | None = None) -> Any:
    """Bool tensor [..., tokens, nodes] (or any dtype, nonzero is visible) to int32 [..., tokens, words] on its device.

    Bit ``j % 32`` of word ``j // 32`` of a row says that the node sees node ``j`` of its request. ``words`` may be more
    than `mask_words`. Raises TensorError if it is less, or if ``visible`` has no two dimensions.
    """
    import torch

    if visible.dim() < 2:
        raise TensorError("visible", "must have shape [..., tokens, nodes]", seen=f"has {list(visible.shape)}")
    nodes = visible.shape[-1]
    count = mask_words(nodes) if words is None else words
    if count < mask_words(nodes):
        raise TensorError("words", f"is too few for {nodes} nodes", seen=str(count))
    bits = torch.zeros((*visible.shape[:-1], count * WORD_BITS), dtype=torch.int64, device=visible.device)
    bits[..., :nodes] = visible != 0
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=visible.device) << torch.arange(
        WORD_BITS, device=visible.device
    )
    packed = (bits.reshape(*visible.shape[:-1], count, WORD_BITS) * weights).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32)
