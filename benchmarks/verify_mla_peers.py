"""Times a verify_mla pack at the shapes of peers_h200.json and prints the ratios; on the GPU, kernels proven first.

    python benchmarks/verify_mla_peers.py --pack DIR --envelope sm_120 --json results.json
    python benchmarks/verify_mla_peers.py --from-json results.json --plot roofline.svg

Each shape is timed over KV rows in bf16, as the peers have them, and in e4m3. The peers' times are stored, taken on one
H200 on the day that the file says, not in this run. The second command
needs no GPU: it prints and plots (extra ``plot``) what the first one wrote.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kgen.bench import BenchCall, Row, device_target, time_calls
from kgen.bench.roofline import check_can_plot, write_roofline
from kgen.cli.options import first_gpu, shipped_pack
from kgen.measure import DeviceEvaluator
from kgen.resources import SPECS
from kgen.runtime import load_pack
from kgen.spec import Spec, load_spec

PEERS = Path(__file__).parent / "peers_h200.json"
KV_DTYPES = ("bf16", "e4m3")
PROTOCOL = (
    "CUDA-graph replay, KV pool rotated over 2.5 x L2 so that its rows are cold, lengths, indices and q warm; "
    "median, fastest and slowest of 7 replays; random slots; tree mask on; no more blocks an SM than the envelope "
    "holds; time_us: with a schedule that is there already, as every layer but the first of a forward finds it; "
    "time_alone_us: every call finds its own work"
)


def main() -> None:
    """Time or read, print, write, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=shipped_pack("verify_mla"))
    parser.add_argument("--envelope", default="sm_120", help="target whose occupancy every launch keeps")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--from-json", type=Path, help="results of an earlier run, instead of timing")
    parser.add_argument("--plot", type=Path, help="where to write a roofline, as SVG")
    arguments = parser.parse_args()
    if arguments.plot:
        check_can_plot(arguments.plot)
    spec, peers = load_spec(SPECS / "verify_mla.yaml"), json.loads(PEERS.read_text(encoding="utf-8"))
    if arguments.from_json:
        found = json.loads(arguments.from_json.read_text(encoding="utf-8"))
    else:
        found = _time(spec, arguments.pack, arguments.envelope, peers)
    _print(found["results"], peers)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        marks = [_mark(spec, result) for result in found["results"]]
        write_roofline(arguments.plot, marks, spec.target(found["target"]), found["device"])


def _time(spec: Spec, pack: Path, envelope: str, peers: Mapping[str, Any]) -> dict[str, Any]:
    target = device_target(spec, first_gpu()[0])
    with DeviceEvaluator(target, spec.target(envelope)) as evaluator:
        calls = [_call(spec, shape, dtype) for dtype in KV_DTYPES for shape in peers["results"]]
        rows = list(time_calls(spec, load_pack(pack), evaluator, target, calls, alone=True))
        device = evaluator.fingerprint
    return {
        "device": device.name,
        "target": target.name,
        "driver": device.driver_version,
        "date": datetime.now(UTC).date().isoformat(),
        "envelope": envelope,
        "protocol": PROTOCOL,
        "results": [_result(spec, row) for row in rows],
    }


class Mark(NamedTuple):
    """What the roofline has of a result."""

    layout: str
    intensity: float
    tflop_s: float


def _mark(spec: Spec, result: Mapping[str, Any]) -> Mark:
    is_of = {"heads": result["heads"], "page_size": result["page_size"], "dtype": result["kv_dtype"]}
    name, layout = next(item for item in spec.layouts.items() if is_of.items() <= item[1].items())
    work = spec.family.work(layout, {axis: result[axis] for axis in spec.family.axes})
    return Mark(name, work.flop / work.bytes, work.flop / result["time_us"] / 1e6)


def _call(spec: Spec, shape: Mapping[str, Any], dtype: str) -> BenchCall:
    is_of = {"heads": shape["heads"], "page_size": 1, "dtype": dtype}
    name = next(name for name, layout in spec.layouts.items() if is_of.items() <= layout.items())
    return name, {axis: shape[axis] for axis in spec.family.axes}


def _result(spec: Spec, row: Row) -> dict[str, Any]:
    layout = spec.layout(row.layout)
    return {
        "heads": layout["heads"],
        **row.point,
        "page_size": layout["page_size"],
        "kv_dtype": layout["dtype"],
        "time_us": row.time_us,
        "time_us_min": row.time_us_min,
        "time_us_max": row.time_us_max,
        "time_alone_us": row.alone_us,
        "floor_us": row.floor_us,
        "rel_error": row.relative_error,
        "variant": row.variant,
        "match": row.match,
        "shared_bytes": row.shared_bytes,
        "registers": row.registers,
        "blocks_per_sm": row.blocks_per_sm,
    }


def _print(results: Sequence[Mapping[str, Any]], peers: Mapping[str, Any]) -> None:
    by_dtype = {dtype: [result for result in results if result["kv_dtype"] == dtype] for dtype in KV_DTYPES}
    _print_beside_peers(by_dtype["bf16"], peers)
    print()
    print("| heads, nodes, batch, prefix | e4m3 us | floor / e4m3 | bf16 / e4m3 | variant |")
    print("|---|---|---|---|---|")
    for wide, narrow in zip(by_dtype["bf16"], by_dtype["e4m3"], strict=True):
        share, ratio = narrow["floor_us"] / narrow["time_us"], wide["time_us"] / narrow["time_us"]
        print(f"| {_shape(narrow)} | {narrow['time_us']:.1f} | {share:.2f} | {ratio:.2f} | {narrow['variant']} |")


def _shape(result: Mapping[str, Any]) -> str:
    return ", ".join(str(result[key]) for key in ("heads", "nodes", "batch", "prefix"))


def _print_beside_peers(results: Sequence[Mapping[str, Any]], peers: Mapping[str, Any]) -> None:
    names = list(peers["peers"])
    print(
        "| heads, nodes, batch, prefix | kgen us | alone us | floor / kgen | "
        + " | ".join(f"{name} / kgen" for name in names)
        + " | variant |"
    )
    print("|---" * (len(names) + 5) + "|")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for result, shape in zip(results, peers["results"], strict=True):
        mine_us = result["time_us"]
        cells = []
        for name in names:
            peer_us = shape["time_us"][name]
            cells.append("-" if peer_us is None else f"{peer_us / mine_us:.2f}")
            if peer_us is not None:
                ratios[name].append(peer_us / mine_us)
        share, alone_us = result["floor_us"] / mine_us, result["time_alone_us"]
        print(
            f"| {_shape(result)} | {mine_us:.1f} | {alone_us:.1f} | {share:.2f} | {' | '.join(cells)} "
            f"| {result['variant']} |"
        )
    means = [f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}" for found in ratios.values()]
    print(f"| geometric mean | | | | {' | '.join(means)} | |")


if __name__ == "__main__":
    main()
