"""Times KV moves and map rewrites on a GPU, beside PyTorch and a plain copy, and attention over moved slots.

    python benchmarks/kv_defrag.py --json benchmarks/results/kv_defrag_h200.json

Every move and rewrite is first compared with what PyTorch computes. Times are medians of CUDA-graph replays, in
microseconds a call; a graph holds several calls on other slots, so that rows are not found in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kgen.cli.options import shipped_pack
from kgen.runtime import PointerTable, PreparedCall, load_pack, prepare

LAYERS, COLUMNS, SLOTS = 61, 576, 32768  # DeepSeek-V3 in bf16: rows of 1152 bytes, a pool of 2.3 GB
ROW_BYTES = COLUMNS * 2
REPLAYS = 21
Step = Callable[[], None]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--move-pack", type=Path, default=shipped_pack("kv_defrag"))
    parser.add_argument("--remap-pack", type=Path, default=shipped_pack("slot_remap"))
    parser.add_argument("--attention-pack", type=Path, default=shipped_pack("verify_mla"))
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).date().isoformat(),
        "protocol": __doc__,
        "copy_gb_s": copy_gb_s(1 << 30),
    }
    print(f"{found['device']}: copy {found['copy_gb_s']:.0f} GB/s read + write")
    pool = [torch.randn(SLOTS, 1, COLUMNS, device="cuda").to(torch.bfloat16) for _ in range(LAYERS)]
    found["moves"] = [large_move(arguments.move_pack, pool, *case) for case in MOVES]
    found["accept"] = accept_move(arguments.move_pack, pool)
    del pool
    found["remap"] = [remap(arguments.remap_pack, scattered) for scattered in (True, False)]
    found["attention"] = [attention(arguments.attention_pack, *case) for case in ATTENTION]
    if arguments.json:
        arguments.json.parent.mkdir(exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def graph_of(steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    """The steps in one graph, run twice."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def times_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: Sequence[int]) -> list[dict[str, float]]:
    """Median, fastest and slowest microseconds a call of each graph, replayed in turn."""
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPLAYS):
        for graph, count, mine in zip(graphs, calls, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) * 1e3 / count)
    return [{"us": statistics.median(mine), "us_min": min(mine), "us_max": max(mine)} for mine in samples]


def copy_gb_s(size_bytes: int) -> float:
    """Rate of a plain copy on the device, read + write."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    (time,) = times_us([graph_of([lambda: target.copy_(source)] * 4)], [4])
    return 2 * size_bytes / time["us"] / 1e3


def torch_move(pool: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """What SGLang does for MLA pools: an indexed copy a layer, two kernels each."""
    for layer in pool:
        layer[target] = layer[source]


def prepared_move(pack: Path, layout: str, rows: int) -> PreparedCall:
    """kv_defrag of a pack, for all layers and up to ``rows`` moves."""
    return prepare(
        load_pack(pack),
        family="kv_defrag",
        layout=layout,
        capacity={"layers": LAYERS, "rows": rows},
        device="cuda",
        checked=False,
    )


def check_move(move: PreparedCall, pool: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """Compare one call with PyTorch, layer by layer."""
    expected = [layer.clone() for layer in pool]
    torch_move(expected, source, target)
    count = torch.tensor([len(source)], dtype=torch.int32, device="cuda")
    move(layer_ptrs=PointerTable(pool), src_slots=source, dst_slots=target, count=count)
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(pool, expected, strict=True)), "wrong rows"


MOVES = [  # layout, rows, destinations in ascending order
    ("mla_bf16_disjoint", 954, True),  # 67 MB
    ("mla_bf16_disjoint", 4096, True),  # 288 MB
    ("mla_bf16_disjoint", 15000, True),  # 1054 MB
    ("mla_bf16_disjoint", 4096, False),
    ("mla_bf16", 954, True),
    ("mla_bf16", 4096, True),
]


def large_move(pack: Path, pool: list[torch.Tensor], layout: str, rows: int, ascending: bool) -> dict[str, Any]:
    """A compaction: random sources, no destination a source."""
    move, table = prepared_move(pack, layout, rows), PointerTable(pool)
    order = torch.randperm(SLOTS - 1, device="cuda") + 1
    lists = []
    for first in range(0, (SLOTS - 1) // (2 * rows) * 2 * rows, 2 * rows):
        target = order[first + rows : first + 2 * rows]
        lists.append((order[first : first + rows], target.sort().values if ascending else target))
    lists = lists[:4]
    check_move(move, pool, *lists[0])
    ours = graph_of([lambda s=s, t=t: move(layer_ptrs=table, src_slots=s, dst_slots=t) for s, t in lists])
    theirs = graph_of([lambda s=s, t=t: torch_move(pool, s, t) for s, t in lists])
    mine, other = times_us([ours, theirs], [len(lists)] * 2)
    size = rows * LAYERS * ROW_BYTES
    row = {
        "layout": layout, "rows": rows, "layers": LAYERS, "moved_bytes": size, "ascending": ascending,
        "variant": move.last.variant, "how": move.last.how, **mine, "gb_s": 2 * size / mine["us"] / 1e3,
        "torch_us": other["us"],
    }  # fmt: skip
    print(f"move {layout} {rows} rows, {size / 1e6:.0f} MB: {mine['us']:.1f} us, {row['gb_s']:.0f} GB/s; "
          f"torch {other['us']:.0f} us; {move.last.variant}")  # fmt: skip
    return row


def accepted(first: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Eight requests of 24 draft slots each, of which eight accepted nodes move to the front."""
    source, target = [], []
    for request in range(8):
        base = first + request * 24
        nodes = np.sort(rng.choice(np.arange(1, 24), 8, replace=False))
        source += [int(base + node) for node in nodes]
        target += [base + place for place in range(8)]
    return source, target


def accept_move(pack: Path, pool: list[torch.Tensor]) -> dict[str, Any]:
    """After a tree verify: 8 requests x 8 rows x all layers, sources among the destinations."""
    move, table, rng = prepared_move(pack, "mla_bf16", 64), PointerTable(pool), np.random.default_rng(0)
    count = torch.tensor([64], dtype=torch.int32, device="cuda")
    lists = [
        tuple(torch.tensor(slots, device="cuda") for slots in accepted(1 + 200 * place, rng)) for place in range(40)
    ]
    check_move(move, pool, *lists[0])

    def calls(of: Sequence[Any]) -> list[Step]:
        return [lambda s=s, t=t: move(layer_ptrs=table, src_slots=s, dst_slots=t, count=count) for s, t in of]

    graphs = [
        graph_of(calls(lists)),
        graph_of(calls(lists[:1] * 40)),
        graph_of(calls(lists[:1])),
        graph_of([lambda s=s, t=t: torch_move(pool, s, t) for s, t in lists[:4]]),
    ]
    names = ["cold", "warm", "one_call_a_graph", "torch_in_graph"]
    row: dict[str, Any] = dict(zip(names, times_us(graphs, [40, 40, 1, 4]), strict=True))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        torch_move(pool, *lists[0])
    end.record()
    end.synchronize()
    row["torch_eager"] = {"us": start.elapsed_time(end) * 100}
    row |= {"rows": 64, "layers": LAYERS, "variant": move.last.variant, "how": move.last.how}
    row["speedup_cold"] = row["torch_in_graph"]["us"] / row["cold"]["us"]
    print("accept 64 rows:", ", ".join(f"{name} {row[name]['us']:.1f} us" for name in (*names, "torch_eager")),
          f"; {row['speedup_cold']:.0f} x torch in a graph; {move.last.variant}")  # fmt: skip
    return row


def remap(pack: Path, scattered: bool) -> dict[str, Any]:
    """256 requests x 32k tokens through a map of a million slots, of which half moved."""
    requests, context, slots, copies = 256, 32768, 1 << 20, 5
    shape = (requests, context)
    rewrite = prepare(
        load_pack(pack),
        family="slot_remap",
        layout="int32",
        capacity={"requests": requests, "context": context, "entries": 65536},
        device="cuda",
    )
    order = torch.randperm(slots, device="cuda").to(torch.int32)
    slot_map = torch.arange(slots, dtype=torch.int32, device="cuda")
    slot_map[order[: slots // 2].long()] = order[slots // 2 :]
    tokens = [torch.randint(0, slots, shape, dtype=torch.int32, device="cuda") for _ in range(copies)]
    if not scattered:
        starts = torch.randint(0, slots - context, (copies, requests, 1), dtype=torch.int32, device="cuda")
        steps = torch.arange(context, dtype=torch.int32, device="cuda")
        tokens = [(start + steps).contiguous() for start in starts]
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    expected = slot_map[tokens[0].long()]
    rewrite(slot_map=slot_map, lengths=lengths, req_to_token=tokens[0])
    assert torch.equal(tokens[0], expected), "wrong slots"
    target = torch.empty_like(tokens[0])
    graphs = [
        graph_of([lambda t=t: rewrite(slot_map=slot_map, lengths=lengths, req_to_token=t) for t in tokens]),
        graph_of([lambda t=t: target.copy_(t) for t in tokens]),
    ]
    mine, copied = times_us(graphs, [copies, copies])
    row = {
        "requests": requests, "context": context, "slots": slots, "scattered": scattered, **mine,
        "gb_s": 8 * requests * context / mine["us"] / 1e3, "copy_us": copied["us"],
        "of_copy": copied["us"] / mine["us"], "variant": rewrite.last.variant, "how": rewrite.last.how,
    }  # fmt: skip
    print(f"remap {requests} x {context}, {'scattered' if scattered else 'runs'}: {mine['us']:.1f} us, "
          f"{row['gb_s']:.0f} GB/s, {row['of_copy']:.0%} of a copy's rate; {rewrite.last.variant}")  # fmt: skip
    return row


ATTENTION = [(page, batch, prefix) for page in (1, 16, 64) for batch, prefix in ((16, 16384), (4, 65536))]


def attention(pack: Path, page: int, batch: int, prefix: int, nodes: int = 16, heads: int = 16) -> dict[str, Any]:
    """verify_mla over the same rows in order and in random pages, interleaved."""
    attend = prepare(
        load_pack(pack),
        family="verify_mla",
        layout=f"h{heads}_p{64 if page == 64 else 1}",
        capacity={"batch": batch, "nodes": nodes, "prefix": prefix},
        device="cuda",
    )
    rows, tokens = batch * prefix, batch * nodes
    pool = torch.randn(rows + page, COLUMNS, device="cuda").to(torch.bfloat16)
    in_order = torch.arange(page, rows + page, dtype=torch.int32, device="cuda")
    pages = torch.randperm(rows // page, device="cuda").to(torch.int32)[:, None] * page + page
    at_random = (pages + torch.arange(page, dtype=torch.int32, device="cuda")).reshape(-1)
    fixed = {
        "q": torch.randn(tokens, heads, COLUMNS, device="cuda").to(torch.bfloat16),
        "kv_pool": pool,
        "draft_kv": torch.randn(tokens, COLUMNS, device="cuda").to(torch.bfloat16),
        "kv_indptr": torch.arange(0, rows + 1, prefix, dtype=torch.int32, device="cuda"),
        "qo_indptr": torch.arange(0, tokens + 1, nodes, dtype=torch.int32, device="cuda"),
        "out": torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda"),
        "hint": {"prefix": prefix},
    }
    graphs = [graph_of([lambda i=i: attend(kv_indices=i, **fixed)] * 2) for i in (in_order, at_random)]
    ordered, random = times_us(graphs, [2, 2])
    row = {
        "page": page, "batch": batch, "prefix": prefix, "nodes": nodes, "heads": heads, "contiguous": ordered,
        "scattered": random, "scattered_over_contiguous": random["us"] / ordered["us"], "variant": attend.last.variant,
    }  # fmt: skip
    print(f"attention page {page}, {batch} x {prefix}: contiguous {ordered['us']:.1f} us, scattered "
          f"{random['us']:.1f} us, {row['scattered_over_contiguous']:.3f} x")  # fmt: skip
    return row


if __name__ == "__main__":
    main()
