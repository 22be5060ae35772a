"""All ranks of a tensor-parallel group run the same kernels, or the server does not start."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from kgen.errors import PackError
from kgen.runtime import Pack
from kgen.runtime.manifest import encode

PATIENCE_SECONDS = 120
"""How long a rank waits for what the others say. SGLang's memory check, just before, has brought them together."""

Said = tuple[str, str]
"""What a rank runs, and why where that is SGLang's kernels."""

_meetings: Counter[str] = Counter()


def refuse_other_packs(pack: Pack, reason: str) -> None:
    """Compare what this rank runs with the others; raises PackError on every rank that asks, unless all run the same.

    ``reason`` is why this rank leaves attention to SGLang, if it does. Each rank writes into the store of the default
    process group and reads the others' words, so that a rank that never asks ends the wait in `PATIENCE_SECONDS`.
    """
    import torch

    if not torch.distributed.is_initialized():
        return
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    mine = ("SGLang's kernels", reason) if reason else (described(pack), "")
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
    check_agreement(exchanged(store, mine, group.ranks, torch.distributed.get_rank()))


def exchanged(store: Any, mine: Said, ranks: list[int], rank: int) -> dict[int, Said]:
    """What each of ``ranks`` says, by rank. Raises PackError that names those who say nothing."""
    group = "-".join(map(str, ranks))
    _meetings[group] += 1  # a server that makes several backends does so on all ranks
    keys = {other: f"kgen/{group}/{_meetings[group]}/{other}" for other in ranks}
    store.set(keys[rank], json.dumps(mine))
    try:
        store.wait(list(keys.values()), timedelta(seconds=PATIENCE_SECONDS))
    except RuntimeError as error:
        silent = _silent(store, keys, error)
        if silent:
            raise PackError(
                "kgen",
                f"some ranks have not said in {PATIENCE_SECONDS} s which kernels they would run",
                seen=f"nothing from {', '.join(silent)}",
                remedy="install kgen with a pack for all of them, and give all the same attention backend",
            ) from None
    return {other: tuple(json.loads(store.get(key))) for other, key in keys.items()}


def _silent(store: Any, keys: Mapping[int, str], waited: RuntimeError) -> list[str]:
    """The ranks whose words are not in the store. Raises PackError where it cannot be asked."""
    try:
        return [str(rank) for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:
        lost = str(waited).splitlines()[0]
        raise PackError("kgen", "the ranks' store is gone", seen=lost, remedy="see why the first rank ended") from None


def described(pack: Pack) -> str:
    """A pack by the digest of its manifest, which covers every file."""
    return f"pack {hashlib.sha256(encode(pack.manifest)).hexdigest()[:16]} of {pack.manifest.family}"


def check_agreement(ranks: Mapping[int, Said]) -> None:
    """Raises PackError that names what each rank runs, and why, unless all run the same; reasons may differ."""
    if len({runs for runs, _ in ranks.values()}) > 1:
        seen = "; ".join(f"rank {rank}: {runs}{why and f' ({why})'}" for rank, (runs, why) in ranks.items())
        raise PackError(
            "kgen", "ranks differ in the kernels they would run", seen=seen, remedy="give all the same pack"
        )
