"""benchmarks/sglang_h200.py, each part in sizes for a CPU: SGLang's loader brings kgen, and no part finds a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.sglang.agreement import described
from kgen.sglang.plugin import checked_pack

RUN = """
import sys; sys.path.insert(0, sys.argv.pop(1))
import sglang_harness
from unittest.mock import patch
from sglang.srt.plugins import load_plugins
with (
    patch("torch.cuda.is_available", lambda: True),
    patch("torch.cuda.device_count", lambda: 1),
    patch("torch.cuda.get_device_capability", lambda _: (12, 0)),
):
    load_plugins()
import sglang_h200
sglang_h200.main()
"""


@pytest.mark.parametrize(
    ("kv_dtype", "parts"), [("bf16", ("kit", "replay", "time")), ("bf16", ("tokens",)), ("e4m3", ("replay", "time"))]
)
def test_the_script_that_runs_on_a_gpu(tmp_path: Path, kv_dtype: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "results.json"
    words = [word for part in parts for word in ("--part", part)]
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(Path(__file__).parent), *words]
    done = subprocess.run(
        [*command, "--device", "cpu", "--kv-dtype", kv_dtype, "--small", "--steps", "2", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert set(found) == {"machine", *parts}
    packs = [described(checked_pack(family)) for family in ("verify_mla", "kv_defrag")]
    assert found["machine"]["packs"] == packs  # by digest
    for part in parts:
        assert f"{part}: no fault" in done.stdout
    if "tokens" in parts:
        assert found["tokens"]["recalling"]["identical"]
