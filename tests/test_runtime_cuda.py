"""The CUDA backend over a driver in Python: what is loaded when, and what a launch hands to the driver."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from packs import NAMES, invented_pack

from kgen.device import DriverTooOldError, cuda_driver
from kgen.errors import PackError
from kgen.family import Launch
from kgen.pack import write_pack
from kgen.runtime.backends import CudaBackend

ROOT = Path(__file__).resolve().parent.parent
STREAM = 0x7700
LAUNCHES = (Launch("fast_kernel", (3, 2, 1), 256, 1024), Launch("fast_kernel", (9, 1, 1), 128, 0))


class Cuda:
    """The fake driver, the structs that kernels saw, and torch's current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.structs: list[bytes] = []
        self.current_device = 0
        self.switched: list[int] = []
        self.streams: list[int] = []
        kernels: dict[str, fake_cuda.Kernel] = {f"{name}_kernel": self._keep for name in NAMES}
        self.driver = fake_cuda.FakeCuda(kernels, devices=2)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", self.driver)
        cuda_driver.driver.cache_clear()
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current_device)
        monkeypatch.setattr(torch.cuda, "device", self._switch)
        monkeypatch.setattr(torch.cuda, "current_stream", self._stream)

    def _keep(self, address: int) -> None:
        self.structs.append(ctypes.string_at(address, 8))

    @contextlib.contextmanager
    def _switch(self, ordinal: int) -> Iterator[None]:
        self.switched.append(ordinal)
        yield

    def _stream(self, ordinal: int) -> SimpleNamespace:
        self.streams.append(ordinal)
        return SimpleNamespace(cuda_stream=STREAM)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    yield Cuda(monkeypatch)
    cuda_driver.driver.cache_clear()


def loaded(cuda: Cuda, ordinal: int = 0) -> CudaBackend:
    backend = CudaBackend(ordinal, params_bytes=8)
    backend.load(invented_pack(), ["demo__fast", "demo__wide"], "sm_90")
    assert cuda.driver.modules == {("fast_kernel", "sm_90"), ("wide_kernel", "sm_90")}
    return backend


def test_loading_opts_in_to_shared_memory_and_knows_the_occupancy(cuda: Cuda) -> None:
    backend = loaded(cuda)
    assert cuda.driver.dynamic_shared == {"fast_kernel": 1024, "wide_kernel": 1024}
    assert (backend.capability, backend.sms, backend.resident_blocks("demo__fast")) == ((9, 0), 4, 1)


def test_a_run_launches_in_order_on_torchs_stream_with_the_struct_of_now(cuda: Cuda) -> None:
    backend = loaded(cuda)
    for value in (b"12345678", b"abcdefgh"):
        backend.arguments[:] = value
        backend.run("demo__fast", LAUNCHES, [])
    assert cuda.driver.launches == 2 * [("fast_kernel", (3, 2, 1), 256, 1024), ("fast_kernel", (9, 1, 1), 128, 0)]
    assert cuda.structs == 2 * [b"12345678"] + 2 * [b"abcdefgh"]
    assert cuda.streams == [0, 0]
    assert cuda.switched == []


def test_a_run_loads_and_allocates_nothing(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded(cuda)
    for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuMemAlloc", "cuCtxSynchronize"):
        monkeypatch.setattr(cuda.driver, call, lambda *_: pytest.fail("called after prepare"))
    backend.run("demo__fast", LAUNCHES, [])


def test_another_current_device_is_switched_for_the_launch_alone(cuda: Cuda) -> None:
    backend = loaded(cuda, ordinal=1)
    backend.run("demo__fast", LAUNCHES, [])
    assert cuda.switched == [1]
    cuda.current_device = 1
    backend.run("demo__fast", LAUNCHES, [])
    assert cuda.switched == [1]


def test_a_new_thread_gets_the_context(cuda: Cuda) -> None:
    backend = loaded(cuda)
    cuda.driver.current = None  # as the driver sees a thread that never touched CUDA
    thread = threading.Thread(target=backend.run, args=("demo__fast", LAUNCHES, []))
    thread.start()
    thread.join()
    assert len(cuda.driver.launches) == 2


def test_an_older_driver_is_named_with_the_one_that_is_needed(cuda: Cuda) -> None:
    cuda.driver.version = 12080
    with pytest.raises(DriverTooOldError, match=r"CUDA 13\.0, it supports CUDA 12\.8; .* 580\.65"):
        loaded(cuda)
    pack = invented_pack()
    archs = {arch: replace(packed, min_cuda=(12, 8)) for arch, packed in pack.manifest.archs.items()}
    backend = CudaBackend(0, params_bytes=8)
    backend.load(replace(pack, manifest=replace(pack.manifest, archs=archs)), ["demo__fast"], "sm_90")


def test_a_gpu_with_too_little_shared_memory_is_refused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_cuda.DEVICE_ATTRIBUTES, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 1024)
    loaded(cuda)
    monkeypatch.setitem(fake_cuda.DEVICE_ATTRIBUTES, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 1023)
    taken = "fast_kernel takes 1024 B of shared memory a block, this GPU has 1023 B"
    with pytest.raises(PackError, match=taken):
        loaded(cuda)


BLOCKED = ("numpy", "torch", "jinja2", "optuna", "sqlalchemy", "alembic", "yaml", "pydantic", "typer", "rich", "cuda")
READ_AND_DISPATCH = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import kgen.runtime
pack = kgen.runtime.load_pack({folder!r})
dispatcher = pack.dispatcher()
table = dispatcher.table(dispatcher.target((12, 1), 48), "h8_p1")
print(table.lookup({{"batch": 4, "nodes": 8, "prefix": 4096}}).how)
{more}
"""


@pytest.mark.parametrize(("more", "status"), [("", 0), ("import kgen.render", 1)])
def test_reading_and_dispatching_need_the_standard_library_only(tmp_path: Path, more: str, status: int) -> None:
    write_pack(tmp_path / "pack", invented_pack())
    code = READ_AND_DISPATCH.format(blocked=BLOCKED, folder=str(tmp_path / "pack"), more=more)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "exact\n"), done.stderr


def test_preparing_needs_nothing_of_the_tuner() -> None:
    blocked = [name for name in BLOCKED if name not in ("numpy", "torch", "cuda")]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import kgen.runtime, kgen.build, kgen.device\n"
    code += "from kgen.family import families; import kgen.emulator; assert 'verify_mla' in families()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
