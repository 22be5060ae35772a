"""SGLang's own plug-in loader finds kgen; what it then registers, and when it stays out."""

from __future__ import annotations

import sglang_harness  # first: it prepares triton  # noqa: F401

import argparse
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang.srt import plugins
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import dflash_utils

from kgen.sglang import plugin


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """SGLang as if nothing had been loaded yet, and the same again afterwards."""
    original, known = MLATokenToKVPool.move_kv_cache, list(choices.ATTENTION_BACKEND_CHOICES)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delitem(ATTENTION_BACKENDS, plugin.BACKEND, raising=False)
    monkeypatch.setattr(dflash_utils, "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS", frozenset({"TritonAttnBackend"}))
    choices.ATTENTION_BACKEND_CHOICES[:] = [name for name in known if name != plugin.BACKEND]
    caplog.set_level(logging.INFO)
    yield
    HookRegistry.reset()
    MLATokenToKVPool.move_kv_cache = original
    choices.ATTENTION_BACKEND_CHOICES[:] = known


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def parse(backend: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "none", "--attention-backend", backend])


@pytest.mark.usefixtures("loader")
def test_sglang_finds_and_runs_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_gpu(monkeypatch, (12, 0))
    original = MLATokenToKVPool.move_kv_cache
    plugins.load_plugins()
    assert "Executed general plugin: kgen" in caplog.text
    assert plugin.BACKEND in ATTENTION_BACKENDS
    assert parse("kgen").attention_backend == "kgen"
    assert MLATokenToKVPool.move_kv_cache is not original
    assert "KgenAttnBackend" in dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS
    assert "stays out" not in caplog.text


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(
    ("capability", "said"),
    [(None, "kgen stays out: no CUDA GPU is usable"), ((8, 6), "no cubins for this device, the device is sm_86")],
)
def test_it_stays_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int] | None,
    said: str,
) -> None:
    if capability:
        on_gpu(monkeypatch, capability)
    original = MLATokenToKVPool.move_kv_cache
    plugins.load_plugins()
    ours = [record.getMessage() for record in caplog.records if record.name == "kgen.sglang"]
    assert len(ours) == 1
    assert said in ours[0]
    assert plugin.BACKEND not in ATTENTION_BACKENDS
    assert MLATokenToKVPool.move_kv_cache is original
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'kgen'"):
        parse("kgen")


@pytest.mark.usefixtures("loader")
def test_another_sglang_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_gpu(monkeypatch, (12, 0))
    monkeypatch.setitem(plugin.NEEDED, "sglang.srt.layers.attention.verify_mask", ("NewMask",))
    plugins.load_plugins()
    assert "0.5.23 has no sglang.srt.layers.attention.verify_mask.NewMask; kgen is tested with 0.5.23" in caplog.text
    assert plugin.BACKEND not in ATTENTION_BACKENDS


RANK = """
import sys; sys.path.insert(0, {folder!r})
import sglang_harness, torch
from types import SimpleNamespace
import sglang.srt.distributed as distributed
from kgen.errors import PackError
from kgen.sglang.agreement import refuse_other_packs
from kgen.sglang.plugin import checked_pack
rank, path, reason = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
distributed.get_tp_group = lambda: group
try:
    refuse_other_packs(checked_pack("verify_mla"), reason)
    print("starts")
except PackError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("reasons", [("", ""), ("", "the pack is old")])
def test_two_ranks_agree_or_are_refused(tmp_path_factory: pytest.TempPathFactory, reasons: tuple[str, str]) -> None:
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    code = RANK.format(folder=str(Path(__file__).parent))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(meeting), reason], stdout=subprocess.PIPE, text=True
        )
        for rank, reason in enumerate(reasons)
    ]
    said = [rank.communicate(timeout=120)[0].strip().splitlines()[-1] for rank in ranks]
    if reasons == ("", ""):
        assert said == ["starts", "starts"]
    else:
        assert said[0] == said[1]
        assert said[0].startswith("refused: kgen: ranks differ in the kernels they would run, rank 0: pack ")
        assert said[0].count("rank 1: SGLang's kernels (the pack is old)") == 1
