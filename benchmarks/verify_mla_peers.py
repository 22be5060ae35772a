"""Times a verify_mla pack at the shapes of peers_h200.json and prints the ratios; on the GPU, kernels proven first.

    python benchmarks/verify_mla_peers.py --pack DIR --envelope sm_120 --json results.json

The peers' times are stored, taken on one H200 on the day that the file says, not in this run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kgen.bench import BenchCall, Row, device_target, time_calls
from kgen.cli.options import first_gpu, shipped_pack
from kgen.measure import DeviceEvaluator
from kgen.resources import SPECS
from kgen.runtime import load_pack
from kgen.spec import Spec, load_spec

PEERS = Path(__file__).parent / "peers_h200.json"
PROTOCOL = (
    "CUDA-graph replay, KV pool rotated over 2.5 x L2 so that its rows are cold, lengths, indices and q warm; "
    "median, fastest and slowest of 7 replays; random slots; tree mask on; no more blocks an SM than the envelope "
    "holds; time_us: with a schedule that is there already, as every layer but the first of a forward finds it; "
    "time_alone_us: every call finds its own work"
)


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=shipped_pack("verify_mla"))
    parser.add_argument("--envelope", default="sm_120", help="target whose occupancy every launch keeps")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    spec, pack = load_spec(SPECS / "verify_mla.yaml"), load_pack(arguments.pack)
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    target = device_target(spec, first_gpu()[0])
    with DeviceEvaluator(target, spec.target(arguments.envelope)) as evaluator:
        calls = [_call(spec, shape) for shape in peers["results"]]
        rows = list(time_calls(spec, pack, evaluator, target, calls, alone=True))
        device = evaluator.fingerprint
    _print(rows, peers)
    if arguments.json:
        found = {
            "device": device.name,
            "driver": device.driver_version,
            "date": datetime.now(UTC).date().isoformat(),
            "envelope": arguments.envelope,
            "protocol": PROTOCOL,
            "results": [_result(spec, row) for row in rows],
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _call(spec: Spec, shape: Mapping[str, Any]) -> BenchCall:
    name = next(
        name for name, layout in spec.layouts.items() if layout["heads"] == shape["heads"] and layout["page_size"] == 1
    )
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


def _print(rows: Sequence[Row], peers: Mapping[str, Any]) -> None:
    names = list(peers["peers"])
    print(
        "| heads, nodes, batch, prefix | kgen us | floor / kgen | "
        + " | ".join(f"{name} / kgen" for name in names)
        + " | variant |"
    )
    print("|---" * (len(names) + 4) + "|")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for row, shape in zip(rows, peers["results"], strict=True):
        cells = []
        for name in names:
            peer_us = shape["time_us"][name]
            cells.append("-" if peer_us is None else f"{peer_us / row.time_us:.2f}")
            if peer_us is not None:
                ratios[name].append(peer_us / row.time_us)
        where = ", ".join(str(shape[key]) for key in ("heads", "nodes", "batch", "prefix"))
        print(
            f"| {where} | {row.time_us:.1f} | {row.floor_us / row.time_us:.2f} | {' | '.join(cells)} | {row.variant} |"
        )
    means = [f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}" for found in ratios.values()]
    print(f"| geometric mean | | | {' | '.join(means)} | |")


if __name__ == "__main__":
    main()
