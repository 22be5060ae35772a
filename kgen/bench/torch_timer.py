"""Timing what torch launches, as kgen's own kernels are timed: graph replays on a warm device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kgen.bench.peers import Call, Timer
from kgen.errors import DeviceError
from kgen.measure.gpu import WARMUP_S
from kgen.measure.timing import REPEATS


class TorchTimer(Timer):
    """The first CUDA device, through torch. DeviceError where torch has none."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise DeviceError("torch", "is missing", seen=str(error), remedy="pip install 'kgen[gpu]'") from None
        if not torch.cuda.is_available():
            raise DeviceError("torch", "sees no GPU", remedy="install its CUDA build")
        self._torch: Any = torch
        self.device = "cuda:0"
        self.l2_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)

    @property
    def free_bytes(self) -> int:  # type: ignore[override]
        """Device memory that is free now."""
        self._torch.cuda.empty_cache()
        return int(self._torch.cuda.mem_get_info(0)[0])

    def samples_us(self, calls: Sequence[Call], rounds: int) -> list[float]:
        """The first round, which compiles and plans, is not timed."""
        torch = self._torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in calls:
                call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        end = time.monotonic() + WARMUP_S
        while time.monotonic() < end:
            graph.replay()
            torch.cuda.synchronize()
        return [self._replay_us(graph) / (rounds * len(calls)) for _ in range(REPEATS)]

    def _replay_us(self, graph: Any) -> float:
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
