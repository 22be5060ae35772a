"""Runs kgen's attention backend beside SGLang's Triton backend on a GPU, with SGLang's own classes.

    pip install -e . "sglang==0.5.23"
    python benchmarks/sglang_h200.py --json results.json
    python benchmarks/sglang_h200.py --kv-dtype e4m3 --json results_fp8.json

kit: SGLang's own test kit for MLA backends. replay: CUDA graphs captured by batch size, replayed with other lengths,
trees, masks and padding for many steps; both backends' outputs compared with each other and, on a sample, with float64.
tokens: tree speculative decoding of two small models, tokens compared. time: a verify step of both. Exits 1 if a part
finds a fault. tests/sglang runs it with `--device cpu --small`. Nothing is stood in for but packages that SGLang
imports and the machine lacks (`sglang_stand_ins`); the results name them.
"""

from __future__ import annotations

from sglang_stand_ins import STOOD_IN  # first: SGLang is not imported without  # isort: skip

import argparse
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sglang
import torch
import triton
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins
from sglang_kit import kit_part
from sglang_replays import KV_DTYPES, PAIR_TOLERANCE, REFERENCE_TOLERANCE, replay_part
from sglang_times import time_part
from sglang_tokens import tokens_part

from kgen.sglang.agreement import described
from kgen.sglang.plugin import checked_pack

PARTS = {"kit": kit_part, "replay": replay_part, "tokens": tokens_part, "time": time_part}
OF_ANY_KV_DTYPE = {"replay", "time"}


def faults_in(report: Any) -> list[str]:
    """All faults of a part's report."""
    if not isinstance(report, dict):
        return []
    return [*report.get("faults", []), *(fault for value in report.values() for fault in faults_in(value))]


def described_machine(device: str, kv_dtype: str) -> dict[str, Any]:
    """What ran."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": datetime.now(UTC).date().isoformat(),
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "stood_in_for": STOOD_IN,
        "packs": [described(checked_pack(family)) for family in ("verify_mla", "kv_defrag")],
        "kv_dtype": kv_dtype,
        "tolerances": {"kgen against stock": PAIR_TOLERANCE[kv_dtype], "kgen against float64": REFERENCE_TOLERANCE},
    }


def main() -> None:
    """Run the parts that are asked for; each is written as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="what to run; all by default")
    parser.add_argument("--json", type=Path, help="where to write the results; parts that are there are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--steps", type=int, help="steps of each replay shape and each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="of the pools of replay and time")
    options = parser.parse_args()
    parts = options.part or [name for name in PARTS if options.kv_dtype == "bf16" or name in OF_ANY_KV_DTYPE]
    if options.kv_dtype != "bf16" and not OF_ANY_KV_DTYPE.issuperset(parts):
        parser.error(f"--kv-dtype {options.kv_dtype} is for the parts {', '.join(sorted(OF_ANY_KV_DTYPE))}")
    load_plugins()
    if "kgen" not in ATTENTION_BACKENDS:
        raise SystemExit("SGLang's plug-in loader did not register kgen")
    results = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    of = results.get("machine", {}).get("kv_dtype", options.kv_dtype)
    if of != options.kv_dtype:
        parser.error(f"{options.json} holds results of pools in {of}: give another file")
    results["machine"] = described_machine(options.device, options.kv_dtype)
    failed = False
    for name in parts:
        started = time.perf_counter()
        try:
            results[name] = PARTS[name](options)
        except Exception:  # noqa: BLE001 - the other parts are still worth running
            traceback.print_exc()
            results[name] = {"faults": [traceback.format_exc().strip().splitlines()[-1]]}
        faults = faults_in(results[name])
        failed = failed or bool(faults)
        print(f"{name}: {'; '.join(faults) or 'no fault'} ({time.perf_counter() - started:.1f} s)", flush=True)
        if name != "time":
            print(json.dumps(results[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
