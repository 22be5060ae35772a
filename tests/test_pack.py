"""The pack format: equal packs are equal bytes, nothing is half-written, nothing damaged is read."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packs import invented_pack

from kgen.errors import KgenError, PackError
from kgen.pack import verify_pack, write_pack
from kgen.runtime.manifest import DIGEST_FILE, MANIFEST_FILE, SCHEMA, canonical_json, decode, encode
from kgen.runtime.pack_reader import Pack, digest_line, load_pack


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_pack(tmp_path / "pack", invented_pack())
    return tmp_path / "pack"


def test_two_writes_are_bit_identical_and_read_back(written: Path, tmp_path: Path) -> None:
    write_pack(tmp_path / "elsewhere" / "second", invented_pack())
    assert contents(written) == contents(tmp_path / "elsewhere" / "second")
    pack = load_pack(written)
    assert pack.manifest == invented_pack().manifest
    assert pack.files == invented_pack().files
    assert names(written) == [DIGEST_FILE, "cubins", MANIFEST_FILE, "sources"]
    assert names(written / "cubins") == ["sm_120", "sm_90"]


def test_a_pack_holds_no_path_and_its_digest_file_is_that_of_sha256sum(written: Path) -> None:
    text = (written / MANIFEST_FILE).read_text()
    assert str(written.parent) not in text
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert (written / DIGEST_FILE).read_text() == f"{digest}  manifest.json\n"


@pytest.mark.parametrize("name", [*invented_pack().files, MANIFEST_FILE, DIGEST_FILE])
def test_one_flipped_byte_anywhere_is_refused_by_name(written: Path, name: str) -> None:
    original = (written / name).read_bytes()
    places = range(len(original)) if len(original) < 200 else (0, len(original) // 2, len(original) - 1)
    for place in places:
        damaged = bytearray(original)
        damaged[place] ^= 1
        (written / name).write_bytes(damaged)
        with pytest.raises(PackError) as error:
            load_pack(written)
        assert name in str(error.value)
    (written / name).write_bytes(original)
    load_pack(written)


@pytest.mark.parametrize("name", ["sources/demo__fast.cu", "cubins/sm_90/demo__fast.cubin", MANIFEST_FILE, DIGEST_FILE])
def test_a_missing_file_and_a_link_are_refused_by_name(written: Path, tmp_path: Path, name: str) -> None:
    (written / name).rename(tmp_path / "moved")
    with pytest.raises(PackError, match=f"{name}: cannot be read"):
        load_pack(written)
    (written / name).symlink_to(tmp_path / "moved")
    with pytest.raises(PackError, match=f"{name}: is a symbolic link"):
        load_pack(written)
    (written / name).unlink()
    os.mkfifo(written / name)
    with pytest.raises(PackError, match=f"{name}: is not a regular file"):
        load_pack(written)


def test_a_linked_folder_inside_a_pack_is_refused(written: Path, tmp_path: Path) -> None:
    (written / "cubins").rename(tmp_path / "cubins")
    (written / "cubins").symlink_to(tmp_path / "cubins")
    with pytest.raises(PackError, match="cubins: is a symbolic link"):
        load_pack(written)


def test_no_folder_is_no_pack(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="nowhere: is no kernel pack"):
        load_pack(tmp_path / "nowhere")
    with pytest.raises(PackError, match=f"{DIGEST_FILE}: cannot be read"):
        load_pack(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make its digest right again, as someone with bad intentions would."""
    tree = json.loads((folder / MANIFEST_FILE).read_text())
    change(tree)
    data = canonical_json(tree).encode()
    (folder / MANIFEST_FILE).write_bytes(data)
    (folder / DIGEST_FILE).write_bytes(digest_line(data))


def rename_source(tree: dict[str, Any], name: str) -> None:
    tree["sources"][name] = tree["sources"].pop("demo__fast")
    tree["variants"]["fast"]["source"] = name


def first_table(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["dispatch"]["sm_120"]["h8_p1"]
    return found


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(PackError, match=r"^here: is not a pack's manifest"):
        decode(data, "here")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tree: tree.update(schema=SCHEMA + 1),
            f"pack schema {SCHEMA + 1} is not {SCHEMA}, the one this kgen reads; upgrade kgen",
        ),
        (lambda tree: tree.pop("schema"), "is not a pack's manifest"),
        (lambda tree: tree.update(extra=1), "manifest: unknown key 'extra'"),
        (lambda tree: tree.pop("archs"), "manifest: missing key 'archs'"),
        (lambda tree: tree.update(family=7), "manifest.family is 7"),
        (lambda tree: tree["sources"]["demo__fast"]["kernels"][0].update(threads=True), "threads is True"),
        (lambda tree: tree["variants"]["fast"].update(role="best"), "manifest.variants.fast.role is 'best'"),
        (lambda tree: rename_source(tree, "../../etc/passwd"), "'../../etc/passwd' is not a plain name"),
        (lambda tree: rename_source(tree, "/etc/passwd"), "'/etc/passwd' is not a plain name"),
        (lambda tree: rename_source(tree, ".."), "'..' is not a plain name"),
        (lambda tree: rename_source(tree, "a\0b"), "is not a plain name"),
        (lambda tree: tree["archs"].update({"..": tree["archs"].pop("sm_90")}), "'..' is not a plain name"),
        (lambda tree: first_table(tree)["buckets"][0].update(variant="none"), "missing variant 'none'"),
        (lambda tree: first_table(tree)["buckets"].append(first_table(tree)["buckets"][0]), "is listed twice"),
        (lambda tree: first_table(tree)["axes"].update(batch=[4, 1, 16]), "axis values [4, 1, 16] are not ascending"),
        (lambda tree: tree["variants"]["fast"]["proofs"].pop("h8_p1"), "variant 'fast' was not proven right"),
        (lambda tree: tree["variants"]["fast"].update(source="none"), "names the missing source 'none'"),
        (lambda tree: tree["sources"]["demo__fast"]["cubins"].pop("sm_120"), "variant 'fast' has no cubin for sm_120"),
        (lambda tree: tree["archs"]["sm_90"].update(min_cuda=[13]), "min_cuda is [13]"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(
    written: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    rewrite(written, change)
    with pytest.raises(PackError) as error:
        load_pack(written)
    assert MANIFEST_FILE in str(error.value)
    assert says in str(error.value)


def test_the_manifest_survives_encoding() -> None:
    manifest = invented_pack().manifest
    assert decode(encode(manifest), "here") == manifest
    assert encode(decode(encode(manifest), "here")) == encode(manifest)


def test_verify_accepts_what_was_written_and_refuses_foreign_files_by_name(written: Path) -> None:
    report = verify_pack(written)
    assert (report.ok, report.files, report.answers, report.problems) == (True, 14, 72, ())
    assert any("renders to another source" in reason or "render" in reason for reason in report.stale)  # invented ones
    (written / "sources" / "notes.txt").write_text("mine")
    with pytest.raises(PackError, match=r"sources/notes\.txt: is no part of the pack"):
        verify_pack(written)


def test_verify_names_a_tuned_point_that_is_not_answered(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kgen.runtime.dispatch import Match, Table

    monkeypatch.setattr(Table, "match", lambda self, values: Match("default", "default", {}, ""))
    report = verify_pack(written)
    assert not report.ok
    assert len(report.problems) == 72
    assert "sm_120 h8_p1 {'batch': 1, 'nodes': 1, 'prefix': 4096}: default default" in report.problems


def test_an_older_pack_is_replaced_whole(written: Path) -> None:
    newer = changed_pack()
    write_pack(written, newer)
    assert load_pack(written).manifest == newer.manifest
    assert names(written.parent) == ["pack"]


def changed_pack() -> Pack:
    pack = invented_pack()
    return replace(pack, manifest=replace(pack.manifest, kgen_version="2"))


def make_foreign(folder: Path) -> None:
    (folder / "thesis.txt").write_text("years of work")


def make_pack_with_notes(folder: Path) -> None:
    shutil.rmtree(folder)
    write_pack(folder, invented_pack())
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [(make_foreign, "exists and is no pack, so it is left alone"), (make_pack_with_notes, "holds notes.txt")],
)
def test_a_folder_that_is_no_pack_is_left_alone(tmp_path: Path, prepare: Callable[[Path], None], says: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare(out)
    before = contents(out)
    with pytest.raises(PackError, match=says):
        write_pack(out, changed_pack())
    assert contents(out) == before


def test_a_file_or_a_link_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("text")
    with pytest.raises(PackError, match="exists and is not a folder"):
        write_pack(tmp_path / "out", invented_pack())
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PackError, match="exists and is not a folder"):
        write_pack(tmp_path / "link", invented_pack())


def test_a_pack_that_contradicts_its_manifest_is_not_written(tmp_path: Path) -> None:
    pack = invented_pack()
    name = next(iter(pack.files))
    for files in ({**pack.files, name: b"other"}, {key: pack.files[key] for key in pack.files if key != name}):
        with pytest.raises(PackError, match=name):
            write_pack(tmp_path / "out", replace(pack, files=files))
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_old_pack_and_nothing_else(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    before = contents(written)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PackError, match="pack: cannot be written, No space left on device"):
        write_pack(written, changed_pack())
    assert contents(written) == before
    assert names(written.parent) == ["pack"]


def _die_at(call: str, out: Path) -> None:
    """In a child process: write a pack and be killed at a call of ``os`` or ``Path``."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if call == "fsync":
        os.fsync = die
    else:
        rename, calls = Path.rename, []

        def counted(self: Path, target: Path) -> Path:
            calls.append(target)
            return die() if len(calls) == int(call) else rename(self, target)  # type: ignore[func-returns-value, return-value]

        Path.rename = counted  # type: ignore[method-assign, assignment]
    write_pack(out, changed_pack())


@pytest.mark.parametrize("call", ["fsync", "1", "2"])
def test_a_killed_writer_leaves_an_old_pack_that_the_next_write_finds(written: Path, call: str) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_die_at, args=(call, written))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(names(written.parent)) > 1  # something was under way
    if call != "2":  # between the two renames there is no pack for a moment, but never half a one
        assert load_pack(written).manifest == invented_pack().manifest
    else:
        assert not written.exists()
        with pytest.raises(PackError, match="is missing from the pack"):
            write_pack(written, replace(invented_pack(), files={}))
        write_pack(written.with_name("other"), invented_pack())  # another pack's writer leaves this one's remains alone
        shutil.rmtree(written.with_name("other"))
    write_pack(written, invented_pack())
    assert load_pack(written).manifest == invented_pack().manifest
    assert names(written.parent) == ["pack"]


def test_errors_of_packs_exit_with_2() -> None:
    assert PackError("a", "b").exit_code == 2
    assert issubclass(PackError, KgenError)


def test_files_lists_what_the_manifest_vouches_for() -> None:
    files: Mapping[str, str] = invented_pack().manifest.files()
    assert len(files) == 12
    assert files["sources/demo__fast.cu"] == hashlib.sha256(b"// fast\n").hexdigest()
