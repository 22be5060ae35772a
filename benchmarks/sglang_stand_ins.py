"""Stand-ins for packages that importing SGLang asks for and a machine may lack: import this before SGLang.

None of them takes part in what `benchmarks/sglang_h200.py` runs: whatever is called of one raises. The exception is
`sgl_kernel.utils.is_arch_support_pdl`, which the Triton backend asks once, for decode: here the answer is no.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("IPython", "sgl_kernel")


class _AbsentName(type):
    """A class that cannot be made; its attributes are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentName(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} is called, and a stand-in")


class _Absent(types.ModuleType):
    """A module all of whose names are such classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "is_arch_support_pdl":
            return lambda: False
        return _AbsentName(f"{self.__name__}.{name}", (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of the missing packages."""

    def __init__(self, missing: Sequence[str]) -> None:
        self._missing = missing

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._missing:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def stand_in(packages: Sequence[str]) -> list[str]:
    """Put stand-ins where packages are missing; their names."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing


STOOD_IN = stand_in(PACKAGES)
"""What is stood in for here."""
