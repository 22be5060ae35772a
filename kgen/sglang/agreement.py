"""All ranks of a tensor-parallel group run the same kernels, or the server does not start."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kgen.errors import PackError
from kgen.runtime import Pack
from kgen.runtime.manifest import encode


def refuse_other_packs(pack: Pack, reason: str) -> None:
    """Compare what this rank runs with the others' over the CPU group; raises PackError on every rank if they differ.

    ``reason`` is why this rank leaves attention to SGLang, if it does. It waits for all ranks of the group.
    """
    import torch

    if not torch.distributed.is_initialized():
        return
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    gathered: list[str] = [""] * group.world_size
    torch.distributed.all_gather_object(gathered, described(pack, reason), group=group.cpu_group)
    check_agreement(gathered)


def described(pack: Pack, reason: str) -> str:
    """What a rank runs: the digest of its pack's manifest, which covers every file, or why it runs nothing."""
    digest = hashlib.sha256(encode(pack.manifest)).hexdigest()
    return f"SGLang's kernels ({reason})" if reason else f"pack {digest[:16]} of {pack.manifest.family}"


def check_agreement(ranks: Sequence[str]) -> None:
    """Raises PackError that names what each rank runs, unless all run the same."""
    if len(set(ranks)) > 1:
        seen = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(ranks))
        raise PackError(
            "kgen", "ranks differ in the kernels they would run", seen=seen, remedy="give all the same pack"
        )
