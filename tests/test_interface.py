"""A pack says how its kernels are launched, and a kgen that launches them in another way refuses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packs import invented_pack

from kgen.errors import PackError
from kgen.family import Family, Parameter, ParameterStruct, families
from kgen.pack.writer import write_pack
from kgen.resources import SPECS
from kgen.runtime import load_pack
from kgen.spec import load_spec

RECORDED = {
    "kv_defrag": (1, "fe703ef8479fafe5"),
    "slot_remap": (1, "0c75dd478190a1ce"),
    "verify_mla": (2, "f27a4ca912c0e1b1"),
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


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object) -> str:
    write_pack(folder, invented_pack())
    assert load_pack(folder).manifest.family == "verify_mla"
    monkeypatch.setattr(type(families()["verify_mla"]), attribute, value)
    with pytest.raises(PackError) as error:
        load_pack(folder)
    return str(error.value)


def test_a_pack_of_another_plan_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(tmp_path, monkeypatch, "plan_version", 7)
    assert "manifest.json: is for another kgen, which launches verify_mla differently" in message
    assert "'2: pointer q' where this has '7: pointer q'" in message
    assert "emit the pack again with this kgen" in message


def test_a_pack_with_other_parameters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family: Family = families()["verify_mla"]
    longer = ParameterStruct((*family.params.parameters, Parameter("extra", "int32")))
    message = refused(tmp_path, monkeypatch, "params", longer)
    assert "'nothing' where this has 'int32 extra'" in message


def test_a_pack_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    pack = invented_pack()
    write_pack(tmp_path, replace(pack, manifest=replace(pack.manifest, family="tree_build")))
    with pytest.raises(PackError, match="holds kernels of a family that this kgen does not have, 'tree_build'"):
        load_pack(tmp_path)
