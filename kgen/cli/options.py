"""Flags that several commands share, and how their texts become values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.errors import DeviceError, InputError
from kgen.resources import GENERATED, ROOT, TUNING_DB, find_spec

if TYPE_CHECKING:
    from kgen.family import Value
    from kgen.spec import Spec

SpecFlag = Annotated[
    str,
    typer.Option(
        "--spec",
        metavar="FILE",
        help="Spec file: a path, or a bare name that is looked up here, in ./specs, then among the shipped specs.",
    ),
]
TargetFlag = Annotated[str, typer.Option("--target", metavar="NAME", help="Architecture to tune for, e.g. sm_120.")]
LayoutsFlag = Annotated[
    list[str] | None,
    typer.Option("--layout", metavar="NAME", help="Head layout of the spec; may be repeated. Default: all of them."),
]
LayoutFlag = Annotated[str, typer.Option("--layout", metavar="NAME", help="Head layout, e.g. h8_p1.")]
DatabaseFlag = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="Tuning database: sqlite:///FILE, or a file's path. "
        "Default: tuning_db/tuning.sqlite in a checkout, else ./tuning.sqlite.",
    ),
]
JobsFlag = Annotated[int, typer.Option("--jobs", min=1, max=1024, metavar="N", help="Compilers to run at once.")]
AskedTargetFlag = Annotated[str, typer.Option("--target", metavar="NAME", help="Target whose table is asked.")]
AskedPackFlag = Annotated[
    Path | None, typer.Option("--pack", metavar="DIR", help="Pack to ask. Default: the one that kgen ships.")
]
BatchFlag = Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Sequences in the batch.")]
NodesFlag = Annotated[int | None, typer.Option("--nodes", min=1, metavar="N", help="Draft nodes a sequence.")]
PrefixFlag = Annotated[int | None, typer.Option("--prefix", min=0, metavar="N", help="KV rows before the draft tree.")]
AtFlag = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="AXIS=N", help="A workload axis of any family, e.g. --at batch=4; may be repeated."),
]

DEFAULT_SPEC = "verify_mla.yaml"
DEFAULT_TARGET = "sm_120"
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def load(name: str) -> Spec:
    """The spec that ``--spec`` names."""
    from kgen.spec import load_spec

    return load_spec(find_spec(name))


def database_url(given: str | None) -> str:
    """The tuning database to use, as a URL: the given one, else the checkout's own, else one in this folder."""
    if given == "":
        raise InputError("--db", "is empty", remedy="name a file, or leave it out")
    if given is not None:
        return given if "://" in given else f"sqlite:///{given}"
    in_checkout = (ROOT / "pyproject.toml").is_file()
    return f"sqlite:///{TUNING_DB / 'tuning.sqlite' if in_checkout else 'tuning.sqlite'}"


def seconds(flag: str, text: str | None) -> float | None:
    """A duration such as ``90s``, ``10m``, ``1.5h`` or plain seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or float(found[1]) == 0:
        raise InputError(flag, "not a duration", seen=repr(text), remedy="write it like 90s, 10m or 1.5h")
    return float(found[1]) * _UNITS_S[found[2]]


def settings(spec: Spec, base: Mapping[str, Value], texts: Iterable[str], flag: str = "--set") -> dict[str, Value]:
    """``base`` with the ``NAME=VALUE`` texts of ``flag`` applied; the spec must list the values."""
    candidate = dict(base)
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(flag, "not NAME=VALUE", seen=repr(text), remedy=f"write it like {flag} tile_m=32")
        if name not in spec.tunables:
            known = ", ".join(spec.tunables)
            raise InputError(flag, f"{spec.label} has no such tunable", seen=repr(name), remedy=f"known: {known}")
        known_values = {str(item): item for item in spec.tunables[name]}
        if value not in known_values:
            remedy = f"one of: {', '.join(known_values)}"
            raise InputError(flag, f"{spec.label} does not list this value of {name}", seen=value, remedy=remedy)
        candidate[name] = known_values[value]
    return candidate


def point(axes: Sequence[str], named: Mapping[str, int | None], texts: Iterable[str]) -> dict[str, int]:
    """The workload point that the flags name, in the order of ``axes``; only what was given."""
    given = {name: value for name, value in named.items() if value is not None}
    for text in texts:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise InputError("--at", "not AXIS=N", seen=repr(text), remedy="write it like --at batch=4")
        given[name] = int(value)
    for name in given:
        if name not in axes:
            raise InputError("--at", "no such workload axis", seen=repr(name), remedy=f"known: {', '.join(axes)}")
    return {axis: given[axis] for axis in axes if axis in given}


def full_point(axes: Sequence[str], named: Mapping[str, int | None], texts: Iterable[str]) -> dict[str, int]:
    """`point`, with a value for every axis or an InputError that says which are missing."""
    found = point(axes, named, texts)
    missing = [axis for axis in axes if axis not in found]
    if missing:
        flags = " ".join(f"--{axis} N" if axis in named else f"--at {axis}=N" for axis in missing)
        raise InputError("workload", "axes without a value", seen=", ".join(missing), remedy=f"add {flags}")
    return found


def shipped_pack(family: str) -> Path:
    """The folder of the pack that comes with kgen."""
    return GENERATED / "pack" / family


def own_pack(family: str) -> Path:
    """Where `kgen emit` writes by default: git ignores it in a checkout."""
    return Path("generated") / "packs" / family


def first_gpu() -> tuple[tuple[int, int], int]:
    """Compute capability and SMs of the first GPU; DeviceError that says so plainly where none is usable."""
    from kgen.device import Device

    try:
        device = Device.open(0)
    except DeviceError as error:
        remedy = "see kgen doctor; without a GPU, kgen check runs kernels in the emulator"
        raise DeviceError("GPU", "this needs one and none is usable", seen=str(error), remedy=remedy) from None
    try:
        return device.compute_capability, device.sms
    finally:
        device.close()
