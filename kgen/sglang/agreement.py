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
    gathered: list[tuple[str, str]] = [("", "")] * group.world_size
    mine = ("SGLang's kernels", reason) if reason else (described(pack), "")
    torch.distributed.all_gather_object(gathered, mine, group=group.cpu_group)
    check_agreement(gathered)


def described(pack: Pack) -> str:
    """A pack by the digest of its manifest, which covers every file."""
    return f"pack {hashlib.sha256(encode(pack.manifest)).hexdigest()[:16]} of {pack.manifest.family}"


def check_agreement(ranks: Sequence[tuple[str, str]]) -> None:
    """Raises PackError that names what each rank runs, and why, unless all run the same; reasons may differ."""
    if len({runs for runs, _ in ranks}) > 1:
        seen = "; ".join(f"rank {rank}: {runs}{why and f' ({why})'}" for rank, (runs, why) in enumerate(ranks))
        raise PackError(
            "kgen", "ranks differ in the kernels they would run", seen=seen, remedy="give all the same pack"
        )
