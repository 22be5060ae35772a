"""Kgen's counters at SGLang's own ``/metrics``, written by two processes through the real prometheus-client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)

RANK = """
import sys; sys.path.insert(0, sys.argv[1])
import sglang_harness as harness, torch
from types import SimpleNamespace
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
import sglang.srt.distributed as distributed
from kgen.sglang import plugin
from kgen.sglang.kv_moves import KvMoves
assert not plugin.missing_from_sglang()
moves = plugin.checked_pack("kv_defrag")
tally = plugin.enable(plugin.checked_pack("verify_mla"), moves)
assert "prometheus_client" not in sys.modules, "SGLang sets PROMETHEUS_MULTIPROC_DIR after plug-ins are loaded"
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[3]), world_size=2)
distributed.get_tp_group = lambda: SimpleNamespace(world_size=1)
with harness.serving(nodes=3, layers=2, enable_metrics=True) as runner:
    for _ in range(2):  # a second backend of a process shares the counters
        backend = ATTENTION_BACKENDS["kgen"](runner)
    step = harness.make_step(runner, (5, 8), 3)
    for cap in (0.0, 0.0, 30.0):
        harness.eager(backend, harness.make_layer(logit_cap=cap, layer_id=int(cap > 0)), step)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=6)
    for captures in (True, False, False, False):
        with harness.active(backend):
            backend.init_forward_metadata_out_graph(step.batch, in_capture=captures)
            backend.init_forward_metadata_in_graph(step.batch)
            if captures:  # a replay runs no Python of the layers
                harness.make_layer()(step.q, step.k, step.v, step.batch)
    slots = torch.tensor([1, 2])
    KvMoves(moves, tally)(None, runner.token_to_kv_pool, slots, slots)
"""

SCRAPE = """
import asyncio
from types import SimpleNamespace
from sglang.srt.utils import add_prometheus_middleware
app = SimpleNamespace(routes=[])
add_prometheus_middleware(app)
said = []
async def send(message): said.append(message)
async def receive(): return {"type": "http.request"}
scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": []}
asyncio.run(app.routes[0].app(scope, receive, send))
print(b"".join(message.get("body", b"") for message in said).decode())
"""


def run(code: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *words], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_two_ranks_at_the_metrics_of_a_server(tmp_path: Path) -> None:
    samples, meeting = tmp_path / "samples", tmp_path / "meeting"
    samples.mkdir()
    ranks = [run(RANK, samples, HERE, str(meeting), str(rank)) for rank in (0, 1)]
    assert [(rank.communicate(timeout=200)[0], rank.returncode) for rank in ranks] == [("", 0), ("", 0)]
    said = run(SCRAPE, samples).communicate(timeout=100)[0].splitlines()
    for rank in (0, 1):
        for line in (
            # Two forwards without a graph, and three replays.
            f'kgen_verify_forwards_total{{answer="default",rank="{rank}"}} 5.0',
            f'kgen_kv_moves_total{{rank="{rank}"}} 1.0',
            f'kgen_left_to_sglang_total{{kind="attention",rank="{rank}",reason="logit cap"}} 1.0',
        ):
            assert line in said
