"""SGLang's own plug-in loader finds kgen; what it then registers, and when it stays out."""

from __future__ import annotations

import sglang_harness  # first: it prepares triton

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
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
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from untuned_pack import untuned_pack

from kgen.runtime.manifest import DIGEST_FILE, MANIFEST_FILE
from kgen.runtime.pack_reader import digest_line
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


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
    ("algorithm", "steps", "rows"), [("NGRAM", 2, 28), ("EAGLE", 2, 12), ("EAGLE3", 4, 20), ("EAGLE", 9, 28)]
)
def test_moves_are_ready_for_the_server_that_the_backend_is_made_for(algorithm: str, steps: int, rows: int) -> None:
    plugin.enable(untuned_pack("h8_p1"), plugin.checked_pack("kv_defrag"))
    ((_, mover, *_),) = HookRegistry._hooks[plugin.MOVE]
    with sglang_harness.serving(nodes=7, max_bs=4, speculative_num_steps=steps) as runner:
        runner.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
        ATTENTION_BACKENDS[plugin.BACKEND](runner)
        assert mover.rows == mover._movers[runner.token_to_kv_pool].call.capacity["rows"] == rows


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
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang.srt.layers.attention.verify_mask", "NewMask"),
        ("sglang.srt.layers.attention.triton_backend", "TritonAttnBackend.new_metadata"),
        ("sglang.srt.layers.attention.new_module", "Anything"),
    ],
)
def test_an_sglang_that_lacks_something_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: str, name: str
) -> None:
    on_gpu(monkeypatch, (12, 0))
    monkeypatch.setitem(plugin.NEEDED, module, (name,))
    plugins.load_plugins()
    lacking = f"{module} (" if "new_module" in module else f"{module}.{name}; "
    assert f"kgen stays out: sglang {version('sglang')} has no {lacking}" in caplog.text
    assert "kgen is tested with 0.5.23" in caplog.text
    assert plugin.BACKEND not in ATTENTION_BACKENDS


RANK = """
import sys; sys.path.insert(0, sys.argv[1])
import sglang_harness as harness, torch
from types import SimpleNamespace
import sglang.srt.distributed as distributed
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from kgen.errors import PackError
from kgen.family import families
from kgen.sglang.plugin import checked_pack, enable
rank, meeting, newer = int(sys.argv[2]), sys.argv[3], sys.argv[4]
if newer:
    type(families()["verify_mla"]).plan_version = 99
torch.distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, ranks=[0, 1])
distributed.get_tp_group = lambda: group
enable(checked_pack("verify_mla"), None)
with harness.serving(nodes=3) as runner:
    try:
        ATTENTION_BACKENDS["kgen"](runner)
        print("starts")
    except PackError as error:
        print("refused:", error)
"""


def reemitted(folder: Path) -> Path:
    """The pack that ships, as another release would have written it."""
    shutil.copytree(plugin.pack_folder("verify_mla"), folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["kgen_version"] = "0.0"
    data = json.dumps(manifest).encode()
    (folder / MANIFEST_FILE).write_bytes(data)
    (folder / DIGEST_FILE).write_bytes(digest_line(data))
    return folder


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("same", None),
        ("newer kgen", "rank 1: SGLang's kernels ("),
        ("other pack", "rank 1: pack "),
    ],
)
def test_two_ranks_agree_or_neither_starts(tmp_path: Path, second: str, said: str | None) -> None:
    environment = dict(os.environ)
    if second == "other pack":
        environment["KGEN_PACK_VERIFY_MLA"] = str(reemitted(tmp_path / "pack"))
    newer = "newer" if second == "newer kgen" else ""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                RANK,
                str(Path(__file__).parent),
                str(rank),
                str(tmp_path / "m"),
                *of,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, (of, env) in enumerate([([""], dict(os.environ)), ([newer], environment)])
    ]
    first, other = (rank.communicate(timeout=200)[0].strip() for rank in ranks)
    assert first == other
    if said is None:
        assert first == "starts"
    else:
        assert first.startswith("refused: kgen: ranks differ in the kernels they would run, rank 0: pack ")
        assert said in first
        assert first.endswith("give all the same pack")
