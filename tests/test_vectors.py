"""The golden vectors: the reference, the oracle kernel and the default kernel all still give what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kgen.build import build
from kgen.build.toolchain import find_toolchain
from kgen.emulator import EmulatedModule
from kgen.family import Array, Candidate, Case, Layout, find_family
from kgen.render import render
from kgen.resources import SPECS
from kgen.spec import load_spec
from kgen.validate import compare
from kgen.validate.launchers import Call, EmulatorLauncher

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.npz"))
FAMILY = find_family("verify_mla", "test_vectors")
SPEC = load_spec(SPECS / "verify_mla.yaml")


def read_vector(path: Path) -> tuple[Layout, Case, dict[str, Array | None], dict[str, Array]]:
    """Layout, case, inputs and expected outputs (float64) of one file."""
    with np.load(path) as arrays:
        layout = json.loads(arrays["layout"].tobytes())
        case = Case(path.stem, json.loads(arrays["options"].tobytes()))
        inputs: dict[str, Array | None] = {name: arrays.get(name) for name in FAMILY.inputs}
        expected = {name: arrays[f"expected_{name}"].astype(np.float64) for name in FAMILY.outputs}
    return layout, case, inputs, expected


def run(candidate: Candidate, layout: Layout, case: Case, inputs: dict[str, Array | None], cache: Path) -> Any:
    """The outputs of a candidate in the emulator, as float64."""
    source = render(FAMILY, candidate, layout)
    (built,) = build(
        [source], arch="emulator", toolchain=find_toolchain(), cache_dir=cache, jobs=1, timeout_s=120
    )  # fmt: skip
    assert built.path is not None, built.log
    plan = FAMILY.plan(candidate, layout, FAMILY.capacity(case), sms=3, resident_blocks=1)
    call = Call(inputs, FAMILY.output_arrays(layout, case, inputs), FAMILY.scalars(layout, case, inputs))
    (outcome,) = EmulatorLauncher(EmulatedModule(built.path)).run(FAMILY, plan, [call])
    return {name: FAMILY.as_float(name, array) for name, array in outcome.outputs.items()}


def test_there_are_vectors() -> None:
    """An empty folder would make every test below pass."""
    assert [path.stem for path in VECTORS] == ["chain", "pool_draft", "tree"]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_reference_gives_the_vectors(path: Path) -> None:
    """To float32 rounding: the reference is float64 and the file float32."""
    layout, case, inputs, expected = read_vector(path)
    for name, found in FAMILY.reference(layout, case, inputs).items():
        np.testing.assert_allclose(found, expected[name], rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["default", "oracle"])
def test_kernels_give_the_vectors(kind: str, path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Inside the spec's tolerances, and outside them as soon as one key is another."""
    layout, case, inputs, expected = read_vector(path)
    candidate = SPEC.default if kind == "default" else SPEC.oracle
    cache = tmp_path_factory.getbasetemp() / "vector_cache"
    found = run(candidate, layout, case, inputs, cache)
    for name, tolerance in SPEC.tolerances.items():
        assert compare(found[name], expected[name], tolerance, name=path.stem, seed=0, output=name).ok

    indices = inputs["kv_indices"]
    assert indices is not None
    other = indices.copy()
    other[0] = indices[-1]
    wrong = run(candidate, layout, case, {**inputs, "kv_indices": other}, cache)
    verdict = compare(wrong["out"], expected["out"], SPEC.tolerances["out"], name="wrong", seed=0, output="out")
    assert not verdict.ok
