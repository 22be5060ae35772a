"""Where the shipped files live: in the checkout, or inside the installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

from kgen.errors import InputError

_PACKAGE = Path(__file__).resolve().parent
_PACKAGED = _PACKAGE / "_data"
ROOT = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent
"""Holds templates/, specs/, tuning_db/ and generated/."""
TEMPLATES = ROOT / "templates"
INCLUDE = TEMPLATES / "include"
SPECS = ROOT / "specs"
TUNING_DB = ROOT / "tuning_db"
GENERATED = ROOT / "generated"


def find_spec(name: str) -> Path:
    """The spec file called ``name``: as a path, then in ./specs, then among the shipped ones.

    ``.yaml`` may be left out. Raises InputError that lists the shipped specs.
    """
    names = [name] if name.endswith((".yaml", ".yml")) else [name, f"{name}.yaml"]
    for folder in (Path(), Path("specs"), SPECS):
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    shipped = ", ".join(sorted(path.name for path in SPECS.glob("*.yaml")))
    raise InputError("--spec", "no such spec", seen=repr(name), remedy=f"give a path, or one of: {shipped}")


def cache_dir() -> Path:
    """Where builds are kept: $KGEN_CACHE_DIR, else kgen/ in the user's cache folder. Safe to delete at any time."""
    named = os.environ.get("KGEN_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kgen"
