"""Writes a pack as a folder, all or nothing: it appears at one instant, complete, and equal packs are equal bytes."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kgen.errors import PackError
from kgen.runtime.manifest import DIGEST_FILE, MANIFEST_FILE, decode, encode
from kgen.runtime.pack_reader import Pack, digest_line

FOLDERS = ("sources", "cubins")


def write_pack(out: Path, pack: Pack) -> None:
    """Write ``pack`` to the folder ``out``, in place of a pack that is there.

    It is built in a hidden folder beside ``out`` and renamed, so a failure or a kill leaves ``out`` as it was; what a
    kill leaves beside it, the next write removes. Raises PackError if ``out`` holds anything but a pack, if the pack
    contradicts itself, or if the folder cannot be written.
    """
    data = encode(pack.manifest)
    decode(data, pack.where)
    for name, sha256 in pack.manifest.files().items():
        if name not in pack.files or hashlib.sha256(pack.files[name]).hexdigest() != sha256:
            raise PackError(name, "is missing from the pack, or is not what its manifest says")
    files = {name: pack.files[name] for name in pack.manifest.files()}
    files |= {MANIFEST_FILE: data, DIGEST_FILE: digest_line(data)}
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(out.parent):
            _recover(out)
            _refuse_other_content(out)
            _replace(out, files)
    except OSError as error:
        raise PackError(str(out), "cannot be written", seen=error.strerror or str(error)) from error


def foreign_files(root: Path, expected: set[str]) -> list[str]:
    """What is in a pack's folder beside ``expected`` and the two manifest files, as paths in it, sorted."""
    known = expected | {MANIFEST_FILE, DIGEST_FILE}
    folders = {str(parent) for name in known for parent in Path(name).parents}
    found = []
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if name not in (folders if is_folder else known):
            found.append(name)
    return sorted(found)


def _refuse_other_content(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise PackError(str(out), "exists and is not a folder", remedy="name another folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not ((out / MANIFEST_FILE).is_file() and (out / DIGEST_FILE).is_file()):
        raise PackError(str(out), "exists and is no pack, so it is left alone", remedy="name another folder")
    for path in out.rglob("*"):
        place = path.relative_to(out)
        if place.parts[0] not in (*FOLDERS, MANIFEST_FILE, DIGEST_FILE):
            wrong = f"holds {place.as_posix()}, which is no part of a pack, so it is left alone"
            raise PackError(str(out), wrong, remedy="move that away, or name another folder")


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on the parent folder itself, which leaves nothing behind and dies with the process."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def _recover(out: Path) -> None:
    """Remove what a killed writer left; bring the old pack back if the kill came between the two renames."""
    old = _old(out)
    if old.exists() and not out.exists():
        old.rename(out)
    for left in [old, *out.parent.glob(f".{glob.escape(out.name)}.partial-*")]:
        if left.exists():
            shutil.rmtree(left)


def _replace(out: Path, files: dict[str, bytes]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        partial.chmod(0o755)
        for name, data in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        old = _old(out)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if not out.exists() and _old(out).exists():
            _old(out).rename(out)
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")
