"""Times KV moves and map rewrites on a GPU, beside PyTorch and a plain copy, and attention over moved slots.

    python benchmarks/kv_defrag.py --json benchmarks/results/kv_defrag_h200.json

Every move and rewrite is first compared with what PyTorch computes. Times are medians of CUDA-graph replays, in
microseconds a call; a graph holds several calls on other slots, so that rows are not found in the L2 cache. The copy
that rates are compared with has the same size, is as cold, and is the better of two: the driver's memcpy (whose rate
depends on the size and is no ceiling) and a kernel of PyTorch's that reads and writes every element once. Maps are
their own inverse, so that every replay changes as many numbers as the first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kgen.cli.options import shipped_pack
from kgen.runtime import PointerTable, PreparedCall, load_pack, prepare

LAYERS, COLUMNS, SLOTS = 61, 576, 32768  # DeepSeek-V3 in bf16: rows of 1152 bytes, a pool of 2.3 GB
ROW_BYTES = COLUMNS * 2
REPLAYS = 21
COPY_BYTES = 1 << 30  # of a graph of copies that are cold to each other
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
    }
    print(f"{found['device']}, rates are read + write")
    pool = [torch.randn(SLOTS, 1, COLUMNS, device="cuda").to(torch.bfloat16) for _ in range(LAYERS)]
    found["moves"] = [large_move(arguments.move_pack, pool, case) for case in MOVES]
    found["accept"] = accept_move(arguments.move_pack, pool)
    del pool
    found["remap"] = [remap(arguments.remap_pack, *case) for case in REMAPS]
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


def copy_rates(size_bytes: int) -> dict[str, float]:
    """GB/s (read + write) of copies of ``size_bytes`` by the driver and by a kernel, and the better of the two."""
    pairs = max(1, min(4, COPY_BYTES // size_bytes))
    made = [torch.zeros(2, size_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(pairs)]
    graphs = [
        graph_of([lambda pair=pair: pair[1].copy_(pair[0]) for pair in made]),
        graph_of([lambda pair=pair: torch.neg(pair[0], out=pair[1]) for pair in made]),
    ]
    memcpy, kernel = (2 * size_bytes / time["us"] / 1e3 for time in times_us(graphs, [pairs] * 2))
    return {"memcpy_gb_s": memcpy, "kernel_gb_s": kernel, "copy_gb_s": max(memcpy, kernel)}


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


class Move(NamedTuple):
    """``rows`` random slots into ``holes`` (ascending), into one ``run``, or (``overlapping``) each into the next's."""

    layout: str
    rows: int
    targets: str


MOVES = [
    *(Move("mla_bf16_disjoint", rows, targets) for rows in (954, 4096) for targets in ("holes", "run")),
    Move("mla_bf16_disjoint", 15000, "holes"),  # 1054 MB; 954 rows are 67 MB, 4096 are 288
    *(Move("mla_bf16", rows, targets) for rows in (954, 4096) for targets in ("holes", "overlapping")),
]
Lists = list[tuple[torch.Tensor, torch.Tensor]]


def move_lists(case: Move) -> Lists:
    """Up to four pairs of sources and targets (int64), which share no rows where the pool is large enough."""
    order, rows, lists = torch.randperm(SLOTS - 1, device="cuda") + 1, case.rows, []
    for first in range(0, min(4, (SLOTS - 1) // (2 * rows)) * 2 * rows, 2 * rows):
        source, target = order[first : first + rows], order[first + rows : first + 2 * rows].sort().values
        if case.targets == "run":
            target = torch.arange(first + 1, first + 1 + rows, device="cuda")
            others = order[(order <= first) | (order > first + rows)]
            source = others[torch.randperm(len(others), device="cuda")[:rows]]
        elif case.targets == "overlapping":
            target = source.roll(-1)
        lists.append((source, target))
    return lists


def large_move(pack: Path, pool: list[torch.Tensor], case: Move) -> dict[str, Any]:
    """One case, beside PyTorch and a copy of as many bytes."""
    move, table, lists = prepared_move(pack, case.layout, case.rows), PointerTable(pool), move_lists(case)
    check_move(move, pool, *lists[0])
    ours = graph_of([lambda s=s, t=t: move(layer_ptrs=table, src_slots=s, dst_slots=t) for s, t in lists])
    theirs = graph_of([lambda s=s, t=t: torch_move(pool, s, t) for s, t in lists])
    mine, other = times_us([ours, theirs], [len(lists)] * 2)
    size = case.rows * LAYERS * ROW_BYTES
    rate, copy = 2 * size / mine["us"] / 1e3, copy_rates(size)
    print(f"move {case.layout} {case.rows} rows, {size / 1e6:.0f} MB, {case.targets}: {mine['us']:.1f} us, "
          f"{rate:.0f} GB/s of a copy's {copy['copy_gb_s']:.0f}; torch {other['us']:.0f} us; "
          f"{move.last.variant}")  # fmt: skip
    return {
        **case._asdict(), "layers": LAYERS, "moved_bytes": size, "variant": move.last.variant, "how": move.last.how,
        **mine, "gb_s": rate, **copy, "of_copy": rate / copy["copy_gb_s"], "torch_us": other["us"],
    }  # fmt: skip


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


REMAPS = [(run, moved) for run in (32768, 16, 1) for moved in (1.0, 1 / 16, 1 / 50)]  # tokens in a row; share of slots


def self_inverse_map(slots: int, moved: float, block: int) -> torch.Tensor:
    """int32 [slots]: ``moved`` of the slots, in blocks of neighbours, change places two and two."""
    order = torch.randperm(slots // block, device="cuda")[: int(moved * slots / block) // 2 * 2].reshape(2, -1)
    places = (order[:, :, None] * block + torch.arange(block, device="cuda")).reshape(2, -1)
    slot_map = torch.arange(slots, dtype=torch.int32, device="cuda")
    slot_map[places[0]], slot_map[places[1]] = places[1].int(), places[0].int()
    return slot_map


def remap(pack: Path, run: int, moved: float) -> dict[str, Any]:
    """256 requests x 32k tokens, ``run`` of them at a time in neighbouring slots, through a map of a million slots.

    Twice: with the hint of how many slots move, and without it, as if all did.
    """
    requests, context, slots, copies = 256, 32768, 1 << 20, 5
    rewrite = prepare(
        load_pack(pack),
        family="slot_remap",
        layout="int32",
        capacity={"requests": requests, "context": context, "entries": 65536, "moved_percent": 100},
        device="cuda",
    )
    slot_map = self_inverse_map(slots, moved, 1 if run == 1 else 64)
    starts = torch.randint(0, slots - run, (copies, requests, context // run, 1), dtype=torch.int32, device="cuda")
    tokens = list((starts + torch.arange(run, dtype=torch.int32, device="cuda")).reshape(copies, requests, context))
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    expected = slot_map[tokens[0].long()]
    hint = {"moved_percent": math.ceil(100 * moved)}
    graphs, variants = [], []
    for told in (hint, None):
        call = partial(rewrite, slot_map=slot_map, lengths=lengths, hint=told)
        before = tokens[0].clone()
        call(req_to_token=tokens[0])
        assert torch.equal(tokens[0], expected), "wrong slots"
        tokens[0].copy_(before)
        graphs.append(graph_of([lambda t=t, call=call: call(req_to_token=t) for t in tokens]))
        variants.append(rewrite.last)
    mine, unhinted = times_us(graphs, [copies] * 2)
    size = 4 * requests * context
    rate, copy = 2 * size / mine["us"] / 1e3, copy_rates(size)
    row = {
        "requests": requests, "context": context, "slots": slots, "run": run, "moved": moved, **mine,
        "gb_s": rate, **copy, "of_copy": rate / copy["copy_gb_s"], "variant": variants[0].variant,
        "how": variants[0].how, "unhinted": {**unhinted, "variant": variants[1].variant, "how": variants[1].how},
    }  # fmt: skip
    print(f"remap {requests} x {context} in runs of {run}, {moved:.0%} moved: {mine['us']:.1f} us, {rate:.0f} GB/s as "
          f"if all were written, {row['of_copy']:.0%} of a copy's; {variants[0].variant}; without the hint "
          f"{unhinted['us']:.1f} us, {variants[1].variant}")  # fmt: skip
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
