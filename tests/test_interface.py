"""A pack says how its kernels are launched, and a kgen that launches them in another way refuses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packs import invented_pack
from typer.testing import CliRunner

from kgen.cli import app
from kgen.errors import PackError
from kgen.family import Parameter, ParameterStruct, families
from kgen.pack.writer import write_pack
from kgen.resources import SPECS
from kgen.runtime import load_pack, prepare
from kgen.spec import load_spec

MLA = families()["verify_mla"]
RECORDED = {
    "kv_defrag": (3, "e69b47bb5275cf47"),
    "slot_remap": (4, "a2c7aa5c461a9c30"),
    "verify_mla": (6, "fb9c349223f5a493"),
}  # plan_version and the digest of what `plans` gives; where the second changes for the same spec, so must the first


def plans(name: str) -> Iterator[dict[str, Any]]:
    """Kernels and plans of the default and the oracle, over layouts, capacities, chips."""
    spec = load_spec(SPECS / f"{name}.yaml")
    for layout, candidate in product(spec.layouts.values(), (spec.default, spec.oracle)):
        yield from ({"kernel": asdict(kernel)} for kernel in spec.family.kernels(candidate, layout))
        for point, sms, resident in product(spec.workload.points[::7], (1, 132), (1, 2)):
            capacity = spec.family.capacity(spec.family.point_case(point.point))
            yield asdict(spec.family.plan(candidate, layout, capacity, sms=sms, resident_blocks=resident))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_plan_that_changes_has_a_new_version(name: str) -> None:
    text = json.dumps(list(plans(name)), sort_keys=True)
    found = (families()[name].plan_version, hashlib.sha256(text.encode()).hexdigest()[:16])
    assert found == RECORDED[name], "raise plan_version, and record both"


def test_every_family_is_recorded() -> None:
    assert sorted(families()) == sorted(RECORDED)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"plan_version": 7}, "'6: pointer q' where this has '7: pointer q'"),
        (
            {"params": ParameterStruct((*MLA.params.parameters, Parameter("extra", "int32")))},
            "'nothing' where this has",
        ),
    ],
)
def test_a_pack_of_another_interface_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], says: str
) -> None:
    write_pack(tmp_path, invented_pack())
    pack = load_pack(tmp_path)
    pack.require_interface(MLA.interface)
    for name, value in changed.items():
        monkeypatch.setattr(type(MLA), name, value)
    capacity = {"batch": 1, "nodes": 1, "prefix": 1}
    with pytest.raises(PackError, match="is for another kgen, which launches verify_mla differently") as error:
        prepare(pack, family="verify_mla", layout="h8_p1", capacity=capacity, device="cpu")
    assert says in str(error.value)
    assert "emit the pack again with this kgen" in str(error.value)


@pytest.mark.parametrize("command", ["check", "pack verify"])
def test_commands_refuse_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    write_pack(tmp_path, invented_pack())
    monkeypatch.setattr(type(MLA), "plan_version", 7)
    where = [str(tmp_path)] if command == "pack verify" else ["--pack", str(tmp_path)]
    result = CliRunner().invoke(app, [*command.split(), *where])
    assert isinstance(result.exception, PackError)
    assert "is for another kgen, which launches verify_mla differently" in str(result.exception)
