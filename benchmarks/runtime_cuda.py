"""Calls a pack through kgen.runtime on a GPU: right against the reference, captured, replayed with other lengths.

    python benchmarks/runtime_cuda.py --pack DIR

Every case of the family runs eagerly and, captured in a CUDA graph with its first inputs, is replayed with others: one
call that finds its own work, and three as layers of a forward, of which the first makes the schedule that the others
keep. Prints a line for each, then the host time of a call without a schedule and of one that keeps it. Exits 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kgen.bench.peers import tensor_of
from kgen.cli.options import shipped_pack
from kgen.family import Array, Case, Layout, find_family
from kgen.resources import SPECS
from kgen.runtime import PreparedCall, load_pack, prepare
from kgen.runtime.schedule import Schedule
from kgen.spec import load_spec
from kgen.validate import compare, reversed_lengths

FAMILY = find_family("verify_mla", "runtime_cuda")
SPEC = load_spec(SPECS / "verify_mla.yaml")
WAYS: Mapping[str, Sequence[Schedule | None]] = {"alone": (None,), "three layers": ("make", "keep", "keep")}


def on_gpu(array: Array | None) -> Any:
    """The array as the tensor that a server would pass."""
    return None if array is None else tensor_of(array, "cuda")


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


@dataclass(frozen=True)
class Layer:
    """One call: what it is given, what it writes, and what it does about the schedule."""

    seed: int
    schedule: Schedule | None
    kv_scale: float | None
    tensors: dict[str, Any]
    outputs: dict[str, Any]

    @classmethod
    def make(cls, layout: Layout, case: Case, seed: int, schedule: Schedule | None) -> Layer:
        """Inputs of a seed, on the GPU."""
        inputs = FAMILY.make_inputs(layout, case, seed)
        outputs = FAMILY.output_arrays(layout, case, inputs)
        on = ({name: on_gpu(array) for name, array in arrays.items()} for arrays in (inputs, outputs))
        return cls(seed, schedule, case.options.get("kv_scale"), *on)

    def run(self, verify: PreparedCall) -> None:
        """Call it."""
        verify(**self.tensors, **self.outputs, kv_scale=self.kv_scale, schedule=self.schedule)

    def errors(self, layout: Layout, case: Case, seed: int) -> list[str]:
        """What is wrong with the outputs, for the inputs of a seed."""
        return errors(layout, case, seed, FAMILY.make_inputs(layout, case, seed), self.outputs)

    def fits(self, changed: Mapping[str, Array | None]) -> bool:
        """Whether a captured call can be replayed with these inputs."""
        return all(
            array is None or array.shape == self.tensors[name].shape
            for name, array in changed.items()
            if name != "kv_pool"
        )

    def change(self, changed: Mapping[str, Array | None]) -> None:
        """Put other inputs where the captured call looks, and poison in its outputs."""
        for name, array in changed.items():
            if array is not None:
                self.tensors[name][: len(array)].copy_(on_gpu(array))
        for output in self.outputs.values():
            if output is not None:
                output.fill_(float("nan"))


def run_case(layout: Layout, verify: PreparedCall, case: Case, schedules: Sequence[Schedule | None]) -> list[str]:
    """Eager, then captured and replayed with the case's lengths in reverse; a layer for each of ``schedules``."""
    layers = [Layer.make(layout, case, seed, schedule) for seed, schedule in enumerate(schedules)]
    for layer in layers:
        layer.run(verify)
    wrong = [error for layer in layers for error in layer.errors(layout, case, layer.seed)]

    other, later = reversed_lengths(case), len(layers)
    changed = [FAMILY.make_inputs(layout, other, layer.seed + later) for layer in layers]
    if not all(layer.fits(inputs) for layer, inputs in zip(layers, changed, strict=True)):
        return wrong
    for layer, inputs in zip(layers, changed, strict=True):
        pool = on_gpu(inputs["kv_pool"])
        rows = max(len(layer.tensors["kv_pool"]), len(pool))
        layer.tensors["kv_pool"] = torch.empty((rows, pool.shape[1]), dtype=pool.dtype, device=pool.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        for layer in layers:
            layer.run(verify)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    if allocated:
        wrong.append(f"{case.name}: the captured calls allocated memory {allocated} times")
    for layer, inputs in zip(layers, changed, strict=True):
        layer.change(inputs)
    graph.replay()
    torch.cuda.synchronize()
    return wrong + [error for layer in layers for error in layer.errors(layout, other, layer.seed + later)]


def host_time_us(layout: Layout, verify: PreparedCall, schedule: Schedule | None) -> float:
    """Microseconds that one call takes on the host, launches queued and not waited for."""
    case = Case("host", {"prefixes": [64] * 4, "nodes": [4] * 4, "lse": False})
    Layer.make(layout, case, 0, "make").run(verify)
    layer = Layer.make(layout, case, 0, schedule)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            layer.run(verify)
        best = min(best, (time.perf_counter() - start) / 50 * 1e6)
    return best


def main() -> None:
    """Run every case of three layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=shipped_pack("verify_mla"))
    pack = load_pack(parser.parse_args().pack)
    wrong: list[str] = []
    for name in ("h8_p1", "h16_p1_e4m3", "h128_p64"):
        layout = SPEC.layout(name)
        capacity = {"batch": 40, "nodes": 80, "prefix": 4096}
        verify = prepare(pack, family="verify_mla", layout=name, capacity=capacity, device="cuda:0", checked=False)
        for case, (what, schedules) in product(FAMILY.cases(layout), WAYS.items()):
            found = run_case(layout, verify, case, schedules)
            outcome = "; ".join(found) if found else "right, eager and replayed"
            print(f"{name} {case.name}, {what}: {outcome} ({verify.last.variant})")
            wrong += found
        for schedule in (None, "keep"):
            time_us = host_time_us(layout, verify, schedule)
            print(f"{name}: {time_us:.1f} us of host time a call, schedule={schedule!r}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
