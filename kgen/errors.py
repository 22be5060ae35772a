"""Errors that a person can act on: where, what is wrong, what was seen, what to do."""

from __future__ import annotations

from typing import Any


class KgenError(Exception):
    """An error of kgen's own, printed as ``where: wrong, seen; remedy`` and never as a traceback.

    ``where`` is a file (with line), flag, tensor or stage; ``seen`` and ``remedy`` may be empty.
    ``exit_code`` is what the command line exits with: 1, the work failed; 2, wrong usage or input.
    """

    exit_code = 1

    def __init__(self, where: str, wrong: str, *, seen: str = "", remedy: str = "") -> None:
        self.where, self.wrong, self.seen, self.remedy = where, wrong, seen, remedy
        text = f"{where}: {wrong}"
        if seen:
            text += f", {seen}"
        if remedy:
            text += f"; {remedy}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """How it gets from one process to another whole: ``args`` has its text, which is not what makes it."""
        return _with_text, (type(self), *self.args), self.__dict__


def _with_text(kind: type[KgenError], text: str) -> KgenError:
    return kind.__new__(kind, text)


class InputError(KgenError):
    """A flag, environment variable or argument is wrong."""

    exit_code = 2


class SpecError(InputError):
    """A spec or target file is wrong; ``where`` is ``file:line``."""


class DatabaseError(KgenError):
    """The tuning database cannot be read or written."""

    exit_code = 2


class ToolchainError(KgenError):
    """No usable compiler, or one that cannot build for the asked architecture."""

    exit_code = 2


class BuildError(KgenError):
    """A kernel that must compile does not."""


class EmulatorError(KgenError):
    """The emulator stopped a kernel; the report says at which block, thread and source line."""


class DeviceError(KgenError):
    """The CUDA driver or the device refused or failed."""


class ValidationError(KgenError):
    """A kernel's result differs from the reference."""


class PackError(KgenError):
    """A kernel pack is damaged, stale, or made for another schema."""

    exit_code = 2


class ForeignArchError(PackError):
    """The pack holds nothing for the architecture of this device."""


class LayoutMissingError(PackError):
    """The pack holds nothing for the asked head layout."""


class TensorError(InputError):
    """A tensor has the wrong dtype, shape, stride, device or content; ``where`` is its name."""
