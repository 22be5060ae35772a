"""What dispatch costs on the host: a lookup, and a whole call without its kernels. Prints nanoseconds.

Run from the checkout: ``python benchmarks/dispatch.py [PACK]``. Without a pack it makes a table of 3 x 4 x 3 points.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kgen.runtime import Dispatcher, PreparedCall, Table, load_pack
from kgen.runtime.manifest import PackedBucket, PackedLayout

AXES = {"batch": (1, 4, 16), "nodes": (1, 8, 16, 64), "prefix": (4096, 16384, 65536)}
LAYOUT: dict[str, int | str] = {"heads": 8, "latent": 512, "rope": 64, "scale_dim": 192}
CALLS, REPEATS = 20_000, 5


def nanoseconds(call: Callable[[], object]) -> float:
    """The least mean time of one call."""
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e9


def small_table() -> Table:
    """A table over `AXES` with two variants."""
    points = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    buckets = tuple(PackedBucket(point, f"v{i % 2}", "measured", 1.0, ()) for i, point in enumerate(points))
    return Table("sm_120", "sm_120", "layout", PackedLayout(LAYOUT, AXES, "v0", "v0", buckets))


def packed_table(path: str) -> Table:
    """The first table of a pack."""
    manifest = load_pack(path).manifest
    target, layouts = next(iter(manifest.dispatch.items()))
    return Dispatcher(manifest.targets, manifest.dispatch, path).table(target, next(iter(layouts)))


class NoLaunch:
    """A backend that launches nothing."""

    sms = 132

    def __init__(self, params_bytes: int) -> None:
        self.arguments = memoryview(bytearray(params_bytes))

    def load(self, *_: object) -> None:
        """Nothing to load."""

    def resident_blocks(self, source: str) -> int:
        """One."""
        return 1

    def run(self, source: str, launches: Sequence[Any], regions: Sequence[Any]) -> None:
        """Nothing to launch."""


def time_call() -> float:
    """A verify_mla call on CPU tensors whose kernels are left out."""
    import torch

    from kgen.family import find_family
    from kgen.resources import find_spec
    from kgen.runtime.launch import DTYPES
    from kgen.runtime.tensors import TensorChecker
    from kgen.spec import load_spec

    family, capacity, device = find_family("verify_mla", "family"), {axis: AXES[axis][-1] for axis in AXES}, "cpu"
    candidate = load_spec(find_spec("verify_mla")).default
    variant = SimpleNamespace(candidate=candidate, source="source")
    pack: Any = SimpleNamespace(manifest=SimpleNamespace(variants={"v0": variant, "v1": variant}))
    binding = family.binding(LAYOUT, capacity)
    dtypes = {name: getattr(torch, name) for name in DTYPES}
    call = PreparedCall(
        table=small_table(), family=family, binding=binding,
        checker=TensorChecker(binding.rules, torch.device(device), dtypes),
        backend=NoLaunch(family.params.size_bytes), capacity=capacity, checked=False,
    )  # fmt: skip
    call.prepare(pack, family, torch, device)
    tokens = 4 * 16
    tensors = {
        "q": torch.zeros(tokens, 8, 576, dtype=torch.bfloat16),
        "kv_pool": torch.zeros(64, 1, 576, dtype=torch.bfloat16),
        "draft_kv": torch.zeros(tokens, 1, 576, dtype=torch.bfloat16),
        "kv_indices": torch.zeros(64, dtype=torch.int64),
        "kv_indptr": torch.zeros(5, dtype=torch.int32),
        "qo_indptr": torch.zeros(5, dtype=torch.int64),
        "tree_mask": torch.zeros(tokens, 1, dtype=torch.int32),
        "out": torch.zeros(tokens, 8, 512, dtype=torch.bfloat16),
    }
    return nanoseconds(lambda: call(**tensors, nodes=16, hint={"prefix": 16384}))


def main() -> None:
    """Print one line a case."""
    table = packed_table(sys.argv[1]) if len(sys.argv) > 1 else small_table()
    exact = tuple(values[0] for values in table.packed.axes.values())
    for name, values in (("exact", exact), ("near", tuple(v + 1 for v in exact)), ("far", (10**6,) * len(exact))):
        took_ns = nanoseconds(partial(table.match, values))
        print(f"match, {name} ({table.match(values).how}): {took_ns:.0f} ns")
    point = dict(zip(table.axes, exact, strict=True))
    print(f"lookup by axis name: {nanoseconds(partial(table.lookup, point)):.0f} ns")
    print(f"verify_mla call without its kernels: {time_call():.0f} ns")


if __name__ == "__main__":
    main()
