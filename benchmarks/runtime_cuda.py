"""Calls a pack through kgen.runtime on a GPU: right against the reference, captured, replayed with other lengths.

    python benchmarks/runtime_cuda.py --pack DIR

Every case of the family runs eagerly and, captured in a CUDA graph with its first inputs, is replayed with others.
Prints one line a case, then the host time of a call and of a lookup. Exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kgen.cli.options import shipped_pack
from kgen.family import Array, Case, Layout, find_family
from kgen.resources import SPECS
from kgen.runtime import PreparedCall, load_pack, prepare
from kgen.spec import load_spec
from kgen.validate import compare, reversed_lengths

FAMILY = find_family("verify_mla", "runtime_cuda")
SPEC = load_spec(SPECS / "verify_mla.yaml")


def on_gpu(name: str, array: Array | None) -> Any:
    """The array as the tensor that a server would pass: bf16 as bfloat16, masks as int32."""
    if array is None:
        return None
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).cuda()


def errors(
    layout: Layout, case: Case, seed: int, inputs: Mapping[str, Array | None], outputs: Mapping[str, Any]
) -> list[str]:
    """What is wrong with a call's outputs."""
    wrong = []
    for name, expected in FAMILY.reference(layout, case, inputs).items():
        if outputs[name] is not None:
            found = outputs[name].cpu()
            array = found.view(torch.int16).numpy().view(np.uint16) if name == "out" else found.numpy()
            result = compare(
                FAMILY.as_float(name, array), expected, SPEC.tolerances[name], name=case.name, seed=seed, output=name
            )
            wrong += [] if result.ok else [result.reason]
    return wrong


def run_case(layout: Layout, verify: PreparedCall, case: Case) -> list[str]:
    """Eager, then captured and replayed with the case's lengths in reverse."""
    inputs = FAMILY.make_inputs(layout, case, 0)
    tensors = {name: on_gpu(name, array) for name, array in inputs.items()}
    outputs = {name: on_gpu(name, array) for name, array in FAMILY.output_arrays(layout, case, inputs).items()}
    verify(**tensors, **outputs)
    wrong = errors(layout, case, 0, inputs, outputs)

    other = reversed_lengths(case)
    changed = FAMILY.make_inputs(layout, other, 1)
    if any(
        array is not None and array.shape != inputs[name].shape for name, array in changed.items() if name != "kv_pool"
    ):
        return wrong
    pool = on_gpu("kv_pool", changed["kv_pool"])
    graph = torch.cuda.CUDAGraph()
    rows = max(len(tensors["kv_pool"]), len(pool))
    tensors["kv_pool"] = torch.empty((rows, pool.shape[1]), dtype=pool.dtype, device=pool.device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        verify(**tensors, **outputs)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    if allocated:
        wrong.append(f"{case.name}: the captured call allocated memory {allocated} times")
    for name, array in changed.items():
        if array is not None:
            tensors[name][: len(array)].copy_(on_gpu(name, array))
    for output in outputs.values():
        if output is not None:
            output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return wrong + errors(layout, other, 1, changed, outputs)


def host_time_us(layout: Layout, verify: PreparedCall) -> float:
    """Microseconds that one call takes on the host, launches queued and not waited for."""
    case = Case("host", {"prefixes": [64] * 4, "nodes": [4] * 4, "lse": False})
    inputs = FAMILY.make_inputs(layout, case, 0)
    tensors = {name: on_gpu(name, array) for name, array in inputs.items()}
    outputs = {name: on_gpu(name, array) for name, array in FAMILY.output_arrays(layout, case, inputs).items()}
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            verify(**tensors, **outputs)
        best = min(best, (time.perf_counter() - start) / 50 * 1e6)
    return best


def main() -> None:
    """Run every case of two layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=shipped_pack("verify_mla"))
    pack = load_pack(parser.parse_args().pack)
    wrong: list[str] = []
    for name in ("h8_p1", "h128_p64"):
        layout = SPEC.layout(name)
        capacity = {"batch": 40, "nodes": 80, "prefix": 4096}
        verify = prepare(pack, family="verify_mla", layout=name, capacity=capacity, device="cuda:0", checked=False)
        for case in FAMILY.cases(layout):
            found = run_case(layout, verify, case)
            outcome = "; ".join(found) if found else "right, eager and replayed"
            print(f"{name} {case.name}: {outcome} ({verify.last.variant})")
            wrong += found
        print(f"{name}: {host_time_us(layout, verify):.1f} us of host time a call")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
