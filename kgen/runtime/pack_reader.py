"""Reads a frozen kernel pack and refuses one that is not, byte for byte, what was written.

Every file is read once, through no symbolic link, and checked against the manifest's sha256; the manifest itself
against ``MANIFEST.sha256``. The standard library only.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from kgen.errors import PackError
from kgen.runtime.dispatch import Dispatcher
from kgen.runtime.manifest import DIGEST_FILE, MANIFEST_FILE, Manifest, cubin_path, decode, source_path

REBUILD = "emit the pack again, or copy it again from where it came"


@dataclass(frozen=True)
class Pack:
    """A pack in memory: its manifest and the bytes of its files by their path in the pack.

    ``where`` is the folder it was read from, or says what it was assembled from; it is no part of its content.
    """

    manifest: Manifest
    files: Mapping[str, bytes]
    where: str

    def source_text(self, source: str) -> str:
        """The rendered CUDA text of a source."""
        return self.files[source_path(source)].decode("utf-8")

    def cubin(self, source: str, arch: str) -> bytes:
        """The cubin of a source for an arch of the pack."""
        return self.files[cubin_path(arch, source)]

    def dispatcher(self) -> Dispatcher:
        """Its dispatch tables, with counts of misses of their own."""
        return Dispatcher(self.manifest.targets, self.manifest.dispatch, self.where)

    def require_interface(self, interface: str) -> None:
        """PackError unless the kernels are launched as by the family of this `kgen.family.Family.interface`."""
        held = self.manifest
        if held.interface != interface:
            raise PackError(
                self.where,
                f"is for another kgen, which launches {held.family} differently",
                seen=f"kgen {held.kgen_version}: {_first_difference(held.interface, interface)}",
                remedy="emit the pack again with this kgen",
            )


def digest_line(manifest: bytes) -> bytes:
    """The content of ``MANIFEST.sha256``, in the form that ``sha256sum -c`` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_FILE}\n".encode("ascii")


def load_pack(path: str | os.PathLike[str]) -> Pack:
    """The pack in the folder ``path``, with every digest checked.

    Raises PackError that names the file which is missing, damaged, a symbolic link, or of a newer schema.
    """
    root = Path(path)
    try:
        is_folder = root.is_dir()
    except OSError as error:
        raise PackError(str(root), "cannot be read", seen=error.strerror or "") from None
    if not is_folder:
        raise PackError(str(root), "is no kernel pack", seen="not a folder", remedy="kgen emit --out makes one")
    written = _read(root, DIGEST_FILE)
    data = _read(root, MANIFEST_FILE)
    if written != digest_line(data):
        wrong = f"does not have the sha256 that {DIGEST_FILE} records"
        raise PackError(str(root / MANIFEST_FILE), wrong, remedy=REBUILD)
    manifest = decode(data, str(root / MANIFEST_FILE))
    files = {}
    for name, sha256 in sorted(manifest.files().items()):
        files[name] = _read(root, name)
        seen = hashlib.sha256(files[name]).hexdigest()
        if seen != sha256:
            wrong = "does not have the sha256 that the manifest records"
            raise PackError(str(root / name), wrong, seen=f"{seen[:12]}... instead of {sha256[:12]}...", remedy=REBUILD)
    return Pack(manifest, files, str(root))


def _first_difference(theirs: str, ours: str) -> str:
    pairs = zip_longest(theirs.split(", "), ours.split(", "), fillvalue="nothing")
    return next(f"{their!r} where this has {our!r}" for their, our in pairs if their != our)


def _read(root: Path, name: str) -> bytes:
    """A file of the pack; its folders inside the pack and itself must not be symbolic links."""
    at = root
    for part in name.split("/"):
        at /= part
        try:
            mode = at.lstat().st_mode
        except OSError as error:
            raise PackError(str(at), "cannot be read", seen=error.strerror or "", remedy=REBUILD) from None
        if stat.S_ISLNK(mode):
            raise PackError(str(at), "is a symbolic link, which a pack must not hold", remedy=REBUILD)
    try:
        handle = os.open(at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise PackError(str(at), "is not a regular file", remedy=REBUILD)
            return file.read()
    except OSError as error:
        raise PackError(str(at), "cannot be read", seen=error.strerror or "", remedy=REBUILD) from None
