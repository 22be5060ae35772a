"""The driver layer, against a driver in Python: what it calls, and how it says that a call failed."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import fake_cuda
import numpy as np
import pytest

from kgen.device import (
    ArgumentBuffer,
    CudaError,
    Device,
    DriverTooOldError,
    Event,
    Graph,
    Stream,
    cuda_driver,
    device_count,
    driver_version,
    is_sticky,
    resident_blocks,
)
from kgen.errors import DeviceError, InputError
from kgen.family import Kernel
from kgen.targets import Target

SM_90 = Target(
    "sm_90", (9, 0), 132, 232448, 233472, 1024, 64, 32, 65536, 255, 1980, 4283.0, 62914560, 2433, 128, 16.0, 0.8, 2.5
)
SM_120 = Target(
    "sm_120", (12, 0), 188, 101376, 102400, 1024, 48, 24, 65536, 255, 2617, 1792.0, 1 << 27, 1024, 128, 16.0, 0.8, 2.5
)


def install(monkeypatch: pytest.MonkeyPatch, fake: object) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    cuda_driver.driver.cache_clear()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    """A fake driver with one kernel, which stores the first field of its struct at the address in the second."""

    def store(struct_address: int) -> None:
        value, address = struct.unpack("<qQ", fake_cuda.read_bytes(struct_address, 16))
        fake_cuda.write_bytes(address, struct.pack("<q", value))

    fake = fake_cuda.FakeCuda({"store": store})
    install(monkeypatch, fake)
    yield fake
    cuda_driver.driver.cache_clear()


def test_versions_and_fingerprint(cuda: fake_cuda.FakeCuda) -> None:
    assert driver_version() == (13, 0)
    assert device_count() == 1
    device = Device.open(0)
    assert device.arch == "sm_90"
    found = device.fingerprint()
    assert (found.compute_capability, found.sms, found.l2_bytes) == ("9.0", 4, 1 << 16)
    assert (found.shared_bytes_per_block, found.memory_clock_khz) == (232448, 3201000)
    assert (found.name, found.driver_version) == ("NVIDIA Fake", "13.0")


def test_missing_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(DeviceError, match=r"cuda-bindings: cannot be imported.*pip install 'kgen\[gpu\]'"):
        device_count()


def test_missing_driver_says_so(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda, "cuInit", no_library)
    with pytest.raises(DeviceError, match=r"CUDA driver: not found, Failed to dlopen libcuda.so.1; install the NVIDIA"):
        device_count()


def test_no_device_and_wrong_ordinal(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda) -> None:
    with pytest.raises(DeviceError, match=r"device: no such ordinal, 1 of 1 devices; check CUDA_VISIBLE_DEVICES"):
        Device.open(1)
    install(monkeypatch, fake_cuda.FakeCuda({}, devices=0))
    with pytest.raises(CudaError, match="cuInit: failed with CUDA_ERROR_NO_DEVICE; check nvidia-smi"):
        device_count()


def test_function_that_an_old_driver_lacks(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda) -> None:
    def lacking(function: object) -> None:
        raise RuntimeError('Function "cuFuncLoad" not found')

    monkeypatch.setattr(cuda, "cuFuncLoad", lacking)
    with pytest.raises(DeviceError, match=r"cuFuncLoad: is not in this driver.*install a newer driver"):
        Device.open().load_module(b"store").function("store")


def test_copies_round_trip_and_buffers_are_freed(cuda: fake_cuda.FakeCuda) -> None:
    device, stream = Device.open(), Stream()
    first, second = device.allocate(24), device.allocate(24)
    sent = np.arange(12, dtype=np.int16)[::1].reshape(3, 4)
    device.copy_to_device(first.address, sent.T)  # not contiguous: the copy is of its elements in order
    device.copy_on_device(second.address, first.address, 24, stream)
    device.fill(second.address, 0xFF, 2, stream)
    received = np.zeros((4, 3), np.int16)
    device.copy_to_host(received, second.address)
    assert received.flatten()[0] == -1
    assert (received.flatten()[1:] == sent.T.flatten()[1:]).all()
    for buffer in (first, second, first):
        buffer.free()
    assert cuda.memory == {}
    assert device.allocate(0).address != 0


def test_out_of_memory_names_call_and_remedy(cuda: fake_cuda.FakeCuda) -> None:
    cuda.fail["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(
        CudaError, match="cuMemAlloc: failed with CUDA_ERROR_OUT_OF_MEMORY; free device memory"
    ) as raised:
        Device.open().allocate(1 << 40)
    assert not is_sticky(raised.value)


def test_launch_passes_shape_and_struct(cuda: fake_cuda.FakeCuda) -> None:
    device, stream = Device.open(), Stream()
    function = device.load_module(b"store other").function("store")
    function.set_dynamic_shared(101376)
    assert (function.registers, function.local_bytes, function.static_shared_bytes) == (64, 8, 16)
    assert resident_blocks(function, 128, 101376) == 2
    target = device.allocate(8)
    arguments = ArgumentBuffer(16)
    struct.pack_into("<qQ", arguments.view, 0, 1234, target.address)
    function.launch((3, 2, 1), 128, 101376, arguments, stream)
    struct.pack_into("<qQ", arguments.view, 0, 99, target.address)  # after the call: too late for that launch
    assert cuda.launches == [("store", (3, 2, 1), 128, 101376)]
    found = np.zeros(1, np.int64)
    device.copy_to_host(found, target.address)
    assert found[0] == 1234


def test_shared_memory_without_opt_in_is_refused(cuda: fake_cuda.FakeCuda) -> None:
    function = Device.open().load_module(b"store").function("store")
    with pytest.raises(CudaError, match="cuLaunchKernel of store: failed with CUDA_ERROR_INVALID_VALUE"):
        function.launch((1, 1, 1), 32, 101376, ArgumentBuffer(16), 0)


def test_launch_on_a_thread_without_context(cuda: fake_cuda.FakeCuda) -> None:
    device = Device.open()
    function = device.load_module(b"store").function("store")
    cuda.current = None
    with pytest.raises(CudaError, match=r"INVALID_CONTEXT; call Device.make_current\(\)"):
        function.launch((1, 1, 1), 32, 0, ArgumentBuffer(16), 0)
    device.make_current()
    target = device.allocate(8)
    arguments = ArgumentBuffer(16)
    struct.pack_into("<qQ", arguments.view, 0, 1, target.address)
    function.launch((1, 1, 1), 32, 0, arguments, 0)


def test_graph_captures_launches_and_replays_them(cuda: fake_cuda.FakeCuda) -> None:
    device, stream, graph = Device.open(), Stream(), Graph()
    function = device.load_module(b"store").function("store")
    target = device.allocate(8)
    device.fill(target.address, 0, 8, stream)
    arguments = ArgumentBuffer(16)
    struct.pack_into("<qQ", arguments.view, 0, 5, target.address)
    with graph.capture(stream):
        function.launch((1, 1, 1), 32, 0, arguments, stream)
    found = np.zeros(1, np.int64)
    device.copy_to_host(found, target.address)
    assert found[0] == 0, "capturing runs nothing"
    graph.launch(stream)
    device.copy_to_host(found, target.address)
    assert found[0] == 5
    graph.destroy()
    graph.destroy()
    assert cuda.graphs == 0


def test_failed_capture_ends_it_and_reports_the_cause(cuda: fake_cuda.FakeCuda) -> None:
    device, stream, graph = Device.open(), Stream(), Graph()
    function = device.load_module(b"store").function("store")
    with pytest.raises(CudaError, match="cuLaunchKernel of store"), graph.capture(stream):
        function.launch((1, 1, 1), 32, 1 << 20, ArgumentBuffer(16), stream)
    assert cuda.capturing is None
    assert cuda.graphs == 0


def test_events_measure_microseconds(cuda: fake_cuda.FakeCuda) -> None:
    Device.open()
    stream, start, end = Stream(), Event(), Event()
    start.record(stream)
    end.record(stream)
    end.synchronize()
    assert 0 <= end.microseconds_since(start) < 1e5
    start.destroy()
    end.destroy()
    assert cuda.events == 0


@pytest.mark.parametrize(
    "name", ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"]
)
def test_sticky_errors_ask_for_a_new_process(cuda: fake_cuda.FakeCuda, name: str) -> None:
    Device.open()
    cuda.fail["cuStreamSynchronize"] = name
    with pytest.raises(CudaError, match=f"cuStreamSynchronize: failed with {name}; .*start a new process") as raised:
        Stream().synchronize()
    assert is_sticky(raised.value)


def test_module_errors_name_the_entry_and_architecture(cuda: fake_cuda.FakeCuda) -> None:
    device = Device.open()
    with pytest.raises(CudaError, match="loading kernel absent: failed with CUDA_ERROR_NOT_FOUND"):
        device.load_module(b"store").function("absent")
    cuda.fail["cuModuleLoadData"] = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.raises(
        CudaError, match=r"loading a cubin on sm_90: .*NO_BINARY_FOR_GPU; the cubin is for another arch"
    ):
        device.load_module(b"store")


def test_driver_older_than_the_cubin_needs(monkeypatch: pytest.MonkeyPatch, cuda: fake_cuda.FakeCuda) -> None:
    install(monkeypatch, fake_cuda.FakeCuda({}, version=12080))
    device = Device.open()
    with pytest.raises(DriverTooOldError, match=r"CUDA 13.0, it supports CUDA 12.8; .*smallest driver .* 580.65"):
        device.load_module(b"store", minimum_cuda=(13, 0))
    device.load_module(b"store", minimum_cuda=(12, 0))


def test_envelope_keeps_no_more_blocks_than_the_target_would() -> None:
    from kgen.device.envelope import envelope_shared_bytes

    def blocks(target: Target, threads: int, registers: int, shared_bytes: int) -> int:
        return target.resident_blocks(threads=threads, registers=registers, shared_bytes=shared_bytes)

    assert envelope_shared_bytes(SM_120, SM_90, 128, 64, 101376) == 115_840  # one block: over half of 233472 - 2 x 1024
    for shared_bytes in range(0, 101377, 1024):
        for threads, registers in ((32, 32), (128, 168), (256, 255), (1024, 64)):
            padded = envelope_shared_bytes(SM_120, SM_90, threads, registers, shared_bytes)
            assert padded >= shared_bytes
            assert 0 < blocks(SM_90, threads, registers, padded) <= blocks(SM_120, threads, registers, shared_bytes)
    assert envelope_shared_bytes(SM_90, SM_90, 128, 64, 50000) == 50000
    with pytest.raises(InputError, match=r"target sm_120: no block of this shape fits an SM, .* 101377 shared bytes"):
        envelope_shared_bytes(SM_120, SM_90, 128, 64, 101377)


def test_loading_pads_kernels_to_the_envelope(cuda: fake_cuda.FakeCuda) -> None:
    from kgen.device.envelope import load_kernels

    kernels = (Kernel("store", 128, 101360), Kernel("other", 32, 0))
    loaded = load_kernels(Device.open(), b"store other", kernels, envelope=SM_120, limits=SM_90)
    assert loaded.shared_bytes["store"] + 16 == 115_840  # 16 static bytes
    assert loaded.resident_blocks == 1
    assert load_kernels(Device.open(), b"store other", kernels).resident_blocks == 2
    loaded.unload()
    with pytest.raises(InputError):
        load_kernels(
            Device.open(), b"store x", (Kernel("store", 128, 101376), Kernel("x", 1, 0)), envelope=SM_120, limits=SM_90
        )
    assert ("store", "x") not in cuda.modules
