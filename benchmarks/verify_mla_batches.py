"""Times a verify_mla pack on large and ragged batches through kgen.runtime, on a GPU; compares outputs with float64.

    python benchmarks/verify_mla_batches.py --pack DIR --json results.json

Most batches in serving are no power of two, and their requests are not equally long. Blocks should end together all the
same: *time / floor* is over the larger of bytes / bandwidth and operations / mma rate. A captured graph has a call for
each of several sets of KV rows, so that rows are cold; the schedule is there already. Exits 1 if an output is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kgen.cli.options import shipped_pack
from kgen.family import Layout
from kgen.model import floor_us
from kgen.resources import SPECS
from kgen.runtime import Pack, load_pack, prepare
from kgen.runtime.manifest import DIGEST_FILE
from kgen.spec import load_spec
from kgen.targets import Target

SPEC = load_spec(SPECS / "verify_mla.yaml")
COLD_BYTES = 160 << 20  # of KV rows between two uses of one: over twice the L2 cache of an H200
REPLAYS = 7
TOLERANCE = 5e-3  # relative L2 error
BATCHES: dict[str, tuple[int, list[int]]] = {  # nodes, and prefixes
    "16 equal": (16, [4096] * 16),
    "24 equal": (16, [4096] * 24),
    "40 equal": (16, [4096] * 40),
    "48 equal": (16, [4096] * 48),
    "80 equal": (16, [2048] * 80),
    "40 equal, one node": (1, [4096] * 40),
    "one of 16 is 100 times longer": (16, [32000] + [320] * 15),
    "one of 64 is 100 times longer": (16, [320] * 63 + [32000]),
    "one of 64 is 100 times longer, one node": (1, [32000] + [320] * 63),
    "40, from 205 to 8192": (16, [8192 * i // 40 for i in range(1, 41)]),
    "64, from 128 to 8192, one node": (1, [128 * i for i in range(1, 65)]),
}


@dataclass(frozen=True)
class Batch:
    """Tensors of a batch: q [tokens, heads, 576], the pool, slots of each set of KV rows [sets, keys], chain masks."""

    q: Any
    pool: Any
    draft: Any
    slots: Any
    kv_indptr: Any
    qo_indptr: Any
    out: Any

    @classmethod
    def make(cls, layout: Layout, nodes: int, prefixes: Sequence[int]) -> Batch:
        """Random numbers, and random slots that no two sets share."""
        generator = torch.Generator("cuda").manual_seed(0)
        heads, latent, width = int(layout["heads"]), int(layout["latent"]), int(layout["latent"]) + int(layout["rope"])
        keys, tokens = sum(prefixes), nodes * len(prefixes)
        sets = max(1, min(8, -(-COLD_BYTES // (keys * width * 2))))

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).bfloat16()

        order = torch.randperm(keys * sets, generator=generator, device="cuda", dtype=torch.int64).int()
        return cls(
            normal(tokens, heads, width), normal(keys * sets, width), normal(tokens, width), order.view(sets, keys),
            torch.tensor([0, *prefixes], device="cuda").cumsum(0).int(),
            torch.arange(0, tokens + 1, nodes, device="cuda", dtype=torch.int32),
            torch.empty((tokens, heads, latent), device="cuda", dtype=torch.bfloat16),
        )  # fmt: skip

    def arguments(self, index: int) -> dict[str, Any]:
        """Of a call over set ``index``."""
        return {
            "q": self.q, "kv_pool": self.pool, "draft_kv": self.draft, "kv_indices": self.slots[index],
            "kv_indptr": self.kv_indptr, "qo_indptr": self.qo_indptr, "draft_slots": None, "tree_mask": None,
            "out": self.out, "lse": None,
        }  # fmt: skip

    def error(self, layout: Layout, request: int, index: int) -> float:
        """Relative L2 error of a request's rows, over set ``index``."""
        first, last = self.qo_indptr[request : request + 2].tolist()
        begin, end = self.kv_indptr[request : request + 2].tolist()
        rows = torch.cat([self.pool[self.slots[index, begin:end]], self.draft[first:last]]).double()
        score = torch.einsum("nhd,kd->nhk", self.q[first:last].double(), rows) / math.sqrt(int(layout["scale_dim"]))
        hidden = torch.ones((last - first, len(rows)), device="cuda").triu(end - begin + 1).bool()
        weight = score.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        expected = weight @ rows[:, : int(layout["latent"])]
        return float((self.out[first:last].double() - expected).norm() / expected.norm())


def time_us(call: Any, batch: Batch) -> list[float]:
    """Of a call, in each replay."""
    sets = len(batch.slots)
    call(**batch.arguments(0), schedule="make")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            call(**batch.arguments(index), schedule="keep")
    for _ in range(20):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / sets)
    return sorted(times)


def measure(pack: Pack, target: Target, layout_name: str, name: str) -> dict[str, Any]:
    """One line of the table."""
    layout, (nodes, prefixes) = SPEC.layout(layout_name), BATCHES[name]
    capacity = {"batch": len(prefixes), "nodes": nodes, "prefix": max(prefixes)}
    call = prepare(pack, family="verify_mla", layout=layout_name, capacity=capacity, device="cuda:0", checked=False)
    batch = Batch.make(layout, nodes, prefixes)
    times = time_us(call, batch)
    works = [SPEC.family.work(layout, {"batch": 1, "nodes": nodes, "prefix": prefix}) for prefix in prefixes]
    floor = floor_us(target, flop=sum(work.flop for work in works), bytes_moved=sum(work.bytes for work in works))
    ends = {0, prefixes.index(max(prefixes)), prefixes.index(min(prefixes)), len(prefixes) - 1}
    return {
        "layout": layout_name,
        "batch": name,
        "nodes": nodes,
        "prefixes": prefixes,
        "time_us": times[len(times) // 2],
        "time_us_min": times[0],
        "time_us_max": times[-1],
        "floor_us": floor,
        "rel_error": max(batch.error(layout, request, len(batch.slots) - 1) for request in ends),
        "variant": call.last.variant,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=shipped_pack("verify_mla"))
    parser.add_argument("--target", default="sm_90", help="whose rates the floor is of")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    pack, target = load_pack(arguments.pack), SPEC.target(arguments.target)
    print("| batch | nodes | us | time / floor | error | variant |\n|---|---|---|---|---|---|")
    results = []
    for name in BATCHES:
        found = measure(pack, target, "h8_p1", name)
        results.append(found)
        over = found["time_us"] / found["floor_us"]
        cells = (
            f"{found['nodes']} | {found['time_us']:.1f} | {over:.2f} | {found['rel_error']:.1e} | {found['variant']}"
        )
        print(f"| {name} | {cells} |", flush=True)
    if arguments.json:
        about = {"device": torch.cuda.get_device_name(), "date": datetime.now(UTC).date().isoformat()}
        about |= {"target": arguments.target, "pack": (arguments.pack / DIGEST_FILE).read_text().split()[0]}
        arguments.json.write_text(json.dumps(about | {"results": results}, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(any(found["rel_error"] > TOLERANCE for found in results))


if __name__ == "__main__":
    main()
