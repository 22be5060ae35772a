"""The SGLang plug-in where there is no SGLang: it must do nothing but say so. tests/sglang has the rest."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packs import invented_pack
from torch._C._distributed_c10d import HashStore

from kgen.errors import PackError
from kgen.resources import GENERATED
from kgen.sglang import agreement, plugin
from kgen.sglang.agreement import check_agreement, described
from kgen.sglang.capture import WorkloadCapture
from kgen.sglang.metrics import MOST_REASONS, Metrics
from kgen.sglang.tally import Tally
from kgen.workload import read_capture

PACK = GENERATED / "pack" / "verify_mla"


@pytest.fixture(autouse=True)
def _every_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kgen.sglang")


def test_importing_it_needs_neither_sglang_nor_torch() -> None:
    code = "import kgen.sglang, sys; print('sglang' in sys.modules, 'torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False False\n"


def test_without_sglang_it_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("kgen stays out: sglang has no sglang.srt.plugins.hook_registry")


def corrupt(folder: Path) -> None:
    cubin = next((folder / "cubins").rglob("*.cubin"))
    data = bytearray(cubin.read_bytes())
    data[100] ^= 1
    cubin.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, "is no kernel pack"),
        (corrupt, "does not have the sha256 that the manifest records"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: cannot be read"),
    ],
    ids=["missing", "corrupt", "no manifest"],
)
def test_without_a_sound_pack_it_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: object, said: str
) -> None:
    folder = tmp_path / "pack"
    shutil.copytree(PACK, folder)
    assert callable(spoil)
    spoil(folder)
    monkeypatch.setenv("KGEN_PACK_VERIFY_MLA", str(folder))
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("kgen stays out: ")
    assert said in record.getMessage()


def test_a_pack_of_another_family_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KGEN_PACK_VERIFY_MLA", str(GENERATED / "pack" / "slot_remap"))
    plugin.register()
    assert "is no pack of verify_mla, it holds slot_remap" in caplog.text
    caplog.clear()
    monkeypatch.setenv("KGEN_PACK_KV_DEFRAG", "/nowhere")
    assert plugin.packed_moves() is None
    assert "kgen leaves KV moves to SGLang: /nowhere" in caplog.text


def test_a_gpu_that_the_pack_has_nothing_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = plugin.checked_pack("verify_mla")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plugin.missing_from_machine(pack) == "no CUDA GPU is usable"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus in ([(12, 0)], [(8, 6), (12, 0)]):  # a display's GPU comes first, SGLang serves with --base-gpu-id 1
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, gpus=gpus: gpus[index])
        assert plugin.missing_from_machine(pack) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 0), (8, 6)][index])
    with pytest.raises(PackError, match="the device is sm_80 and the pack has sm_120, sm_90"):
        plugin.missing_from_machine(pack)


def test_each_reason_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    for _ in range(3):
        tally.left_to_sglang("attention", "logit cap")
    tally.left_to_sglang("attention", "sinks")
    tally.did("attention")
    assert tally.left == {("attention", "logit cap"): 3, ("attention", "sinks"): 1}
    assert tally.ran == {"attention": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "kgen leaves attention to SGLang: logit cap",
        "kgen leaves attention to SGLang: sinks",
    ]


def test_reasons_beyond_the_most_share_a_series() -> None:
    counted: Counter[tuple[str, ...]] = Counter()
    series = SimpleNamespace(labels=lambda *labels: SimpleNamespace(inc=lambda: counted.update([labels])))
    metrics = Metrics(SimpleNamespace(Counter=lambda *_: series), rank=3)
    for number in (*range(MOST_REASONS + 2), 0):
        metrics.left_to_sglang("attention", f"reason {number}")
    assert counted["attention", "reason 0", "3"] == 2
    assert counted["attention", "other", "3"] == 2
    assert len(counted) == MOST_REASONS + 1


def test_ranks_with_different_packs_are_refused() -> None:
    one, stock = (described(invented_pack()), ""), ("SGLang's kernels", "old")
    assert one[0].startswith("pack ")
    check_agreement({0: one, 1: one})
    check_agreement({0: stock, 1: ("SGLang's kernels", "no head layout in another folder")})
    with pytest.raises(PackError, match=r"rank 0: pack [0-9a-f]{16} of verify_mla; rank 1: SGLang's kernels \(old\)"):
        check_agreement({0: one, 1: stock})


def test_a_rank_that_says_nothing_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.2)
    store = HashStore()
    with pytest.raises(PackError, match=r"in 0\.2 s which kernels they would run, nothing from 2, 3; "):
        agreement.exchanged(store, ("a pack", ""), [1, 2, 3], 1)


def test_a_store_that_is_gone_is_named() -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    store = SimpleNamespace(set=lambda *_: None, wait=gone, check=gone)
    with pytest.raises(PackError, match=r"^kgen: the ranks' store is gone, Connection reset by peer; "):
        agreement.exchanged(store, ("a pack", ""), [1, 2], 1)


def test_ranks_hear_each_other_each_time_that_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_meetings", Counter())
    store = HashStore()
    for meeting, said in ((1, "one"), (2, "another")):
        store.set(f"kgen/4-6/{meeting}/6", json.dumps([said, ""]))
        assert agreement.exchanged(store, ("mine", "why"), [4, 6], 4) == {4: ("mine", "why"), 6: (said, "")}


def batch(*prefixes: int, on_host: bool = True) -> SimpleNamespace:
    lengths = torch.tensor(prefixes)
    return SimpleNamespace(seq_lens=lengths, seq_lens_cpu=lengths if on_host else None)


def test_a_capture_holds_shapes_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "capture.jsonl"
    monkeypatch.setenv("KGEN_CAPTURE", str(path))
    monkeypatch.setenv("KGEN_CAPTURE_LINES", "2")
    capture = WorkloadCapture.from_environment("h8_p1")
    capture.note(batch(100, 7, 1), 2, 16)  # the third is padding
    capture.note(batch(5, on_host=False), 1, 8)
    capture.note(batch(6), 1, 8)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"family": "verify_mla", "layout": "h8_p1", "batch": 2, "nodes": 16, "prefixes": [100, 7]},
        {"family": "verify_mla", "layout": "h8_p1", "batch": 1, "nodes": 8, "prefixes": [5]},
    ]


def test_a_capture_goes_on_where_it_was_cut_off_and_its_bound_is_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    WorkloadCapture(path, "h8_p1", 3).note(batch(1), 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert sum(read_capture(path, "verify_mla").values()) == 1
    for _ in range(3):
        WorkloadCapture(path, "h8_p1", 3).note(batch(1), 1, 2)
    assert path.read_bytes() == whole * 3


@pytest.mark.parametrize("value", ["100k", "-1", "0", "1.5", "9" * 5000])
def test_a_number_that_is_none_is_named_and_ends_the_capture_alone(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KGEN_CAPTURE", "capture.jsonl")
    monkeypatch.setenv("KGEN_CAPTURE_LINES", value)
    WorkloadCapture.from_environment("h8_p1").note(batch(1), 1, 2)
    assert f"KGEN_CAPTURE_LINES: must be a positive whole number, '{value[:40]}'" in caplog.text
    assert not Path("capture.jsonl").exists()


def test_every_name_of_sglang_is_checked_for() -> None:
    """What the plug-in imports, looked for before it registers anything."""
    folder = Path(plugin.__file__).parent
    used = {
        (node.module, name.name)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for name in node.names
    }
    checked = {(module, item.split(".")[0]) for module, items in plugin.NEEDED.items() for item in items}
    assert {pair for pair in used if pair[1] != "ATTENTION_BACKEND_CHOICES"} <= checked


def test_a_capture_that_cannot_be_written_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = WorkloadCapture(tmp_path / "no folder" / "capture.jsonl", "h8_p1")
    capture.note(batch(1), 1, 2)
    capture.note(batch(1), 1, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("kgen stops capturing the workload")


@pytest.mark.parametrize("held", [b"notes\nlast line", b"weights without a newline", b'{"other": 1}\n', b"\n"])
def test_a_file_that_is_no_capture_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, held: bytes
) -> None:
    path = tmp_path / "precious"
    path.write_bytes(held)
    WorkloadCapture(path, "h8_p1").note(batch(1), 1, 2)
    assert path.read_bytes() == held
    assert f"kgen stops capturing the workload: {path}: is there already, and is no capture" in caplog.text


def test_a_pipe_that_nobody_reads_holds_up_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    WorkloadCapture(path, "h8_p1").note(batch(1), 1, 2)
    assert f"kgen stops capturing the workload: {path}: is no regular file" in caplog.text


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_ends_a_capture_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "capture.jsonl"
    capture = WorkloadCapture(path, "h8_p1")
    capture.note(batch(1), 1, 2)
    whole, file = path.read_bytes(), capture._file

    def write(data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return file.write(data[:room])

    monkeypatch.setattr(capture, "_file", SimpleNamespace(write=write))
    for _ in range(3):
        capture.note(batch(1), 1, 2)
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert path.read_bytes()[: len(whole)] == whole
    assert len(path.read_bytes()) == len(whole) + room


FORK = """
import os, sys, torch
from pathlib import Path
from types import SimpleNamespace
from kgen.sglang.capture import WorkloadCapture
path = Path(sys.argv[1])
capture = WorkloadCapture(path, "h8_p1")
def note(prefix):
    capture.note(SimpleNamespace(seq_lens_cpu=torch.tensor([prefix])), 1, 2)
note(1)
child = os.fork()
if child == 0:
    note(2)
    sys.exit()
os.waitpid(child, 0)
path.rename(sys.argv[2])
note(3)
os._exit(0)
"""


def test_a_capture_is_one_open_file_that_no_fork_or_exit_spoils(tmp_path: Path) -> None:
    path, moved = tmp_path / "capture.jsonl", tmp_path / "moved.jsonl"
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, str(path), str(moved)], check=True)
    assert [json.loads(line)["prefixes"] for line in moved.read_text().splitlines()] == [[1], [2], [3]]
    assert not path.exists()


def test_lengths_on_a_gpu_are_written_when_they_have_arrived(tmp_path: Path) -> None:
    class Arrival:
        arrived = False

        def query(self) -> bool:
            return self.arrived

    path, first, second = tmp_path / "capture.jsonl", Arrival(), Arrival()
    capture = WorkloadCapture(path, "h8_p1")
    capture._pending.extend([(torch.tensor([3]), first, 4), (torch.tensor([9]), second, 4)])
    capture.note(batch(1), 1, 4)
    assert [json.loads(line)["prefixes"] for line in path.read_text().splitlines()] == [[1]]
    first.arrived = True
    capture.note(batch(2), 1, 4)
    assert [json.loads(line)["prefixes"] for line in path.read_text().splitlines()] == [[1], [3], [2]]
