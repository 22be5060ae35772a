"""verify_mla where scores are far apart or absent, in the emulator: peaks that rise, rows that see nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from mla_schedule import dealt_by_plan

from kgen.bf16 import from_bf16, to_bf16
from kgen.build import build
from kgen.build.toolchain import find_toolchain
from kgen.e4m3 import to_e4m3
from kgen.emulator import EmulatedModule
from kgen.families.verify_mla_problem import present
from kgen.family import Array, Candidate, Case, Layout
from kgen.render import render
from kgen.resources import SPECS
from kgen.spec import load_spec
from kgen.validate import compare
from kgen.validate.launchers import Call, EmulatorLauncher

SPEC = load_spec(SPECS / "verify_mla.yaml")
FAMILY = SPEC.family
LAYOUTS: dict[str, Layout] = {name: SPEC.layout(name) for name in ("h8_p1", "h8_p1_e4m3")}
ONE_GROUP: Candidate = {**SPEC.default, "row_groups": 1, "k_split": 2, "stages": 2}
KERNELS: dict[str, Candidate] = {
    "two row groups": SPEC.default,
    "two parts of the rows": {**ONE_GROUP, "tile_m": 64, "k_split": 4},
    "two parts of the keys": {**ONE_GROUP, "tile_m": 16, "tile_n": 32, "warps": 4, "key_split": 2},
    "four row groups": {**SPEC.default, "row_groups": 4, "k_split": 2, "copiers": "group"},
    "oracle": SPEC.oracle,
}
PAIRS = [(kernel, "h8_p1") for kernel in KERNELS] + [("two row groups", "h8_p1_e4m3")]
NAN = {"bf16": 0x7FC0, "e4m3": 0x7F}
Inputs = dict[str, Array | None]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "emulator"


def found(kernel: str, layout: Layout, case: Case, inputs: Inputs, sms: int, cache_dir: Path) -> Mapping[str, Array]:
    """The outputs of a kernel in float64; its plan splits requests where there are SMs for it."""
    candidate = KERNELS[kernel]
    source = render(FAMILY, candidate, layout)
    (built,) = build([source], arch="emulator", toolchain=find_toolchain("emulator"), cache_dir=cache_dir, jobs=1)
    assert built.path is not None, built.log
    plan = FAMILY.plan(candidate, layout, FAMILY.capacity(case), sms=sms, resident_blocks=1)
    if candidate != SPEC.oracle:
        items = dealt_by_plan(plan, candidate, 8, case.options["prefixes"], case.options["nodes"])
        assert any(item.splits > 1 for item in items) == (sms > 1), "something to combine, or nothing"
    call = Call(inputs, FAMILY.output_arrays(layout, case, inputs), FAMILY.scalars(layout, case, inputs))
    (outcome,) = EmulatorLauncher(EmulatedModule(built.path)).run(FAMILY, plan, [call])
    return {name: FAMILY.as_float(name, array) for name, array in outcome.outputs.items()}


def check(outputs: Mapping[str, Array], layout: Layout, case: Case, inputs: Inputs) -> Mapping[str, Array]:
    """Within the spec's tolerances of the reference, which it gives."""
    reference = FAMILY.reference(layout, case, inputs)
    for name, expected in reference.items():
        result = compare(outputs[name], expected, SPEC.tolerances[name], name=case.name, seed=0, output=name)
        assert result.ok, result.reason
    return reference


# --- Peaks that rise and fall ----------------------------------------------------------------------------------------

PREFIX = 100
RAMP = np.linspace(-120, 120, PREFIX)
SCORES: dict[str, Array] = {  # base 2, by position of the key
    "rising": RAMP,
    "falling": RAMP[::-1],
    "just within the slack, then beyond": np.repeat([0.0, 7.9, 15.8, 16.2, 24.3], PREFIX // 5),
    "one key outweighs all before and after": np.where(np.arange(PREFIX) == 57, 100.0, 0.0),
    "all far below zero": np.full(PREFIX, -3.0e4),
}


def with_scores(layout: Layout, case: Case, scores: Array) -> Inputs:
    """Inputs whose prefix keys score so for each row, by the last column; the others add less than 1."""
    inputs = FAMILY.make_inputs(layout, case, 0)
    q, pool, draft = (present(inputs, name) for name in ("q", "kv_pool", "draft_kv"))
    encode = to_bf16 if layout["dtype"] == "bf16" else to_e4m3
    per_unit = np.sqrt(int(layout["scale_dim"])) / np.log2(np.e)  # of q k, in a score
    most = np.abs(scores).max()
    q[:] = to_bf16((from_bf16(q) / 64).astype(np.float32).reshape(-1)).reshape(q.shape)
    q[..., -1] = to_bf16(np.array([most * per_unit / 128], np.float32))[0]
    pool[present(inputs, "kv_indices"), -1] = encode((scores / most * 128).astype(np.float32))
    draft[:, -1] = encode(np.array([scores[-1] / most * 128], np.float32))[0]
    return inputs


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("kernel", "layout_name"), PAIRS)
def test_scores_far_apart(kernel: str, name: str, layout_name: str, cache_dir: Path) -> None:
    case = Case(name, {"prefixes": [PREFIX], "nodes": [5], "lse": True})
    layout = LAYOUTS[layout_name]
    inputs = with_scores(layout, case, SCORES[name])
    for sms in (1, 188):
        lse = check(found(kernel, layout, case, inputs, sms, cache_dir), layout, case, inputs)["lse"]
        peak = SCORES[name].max()
        assert np.abs(lse * np.log2(np.e) - peak).max() < 8 + abs(peak) / 64, "the scores are not what was asked for"


# --- Rows that see nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [1, 188])
@pytest.mark.parametrize(("kernel", "layout_name"), PAIRS)
def test_rows_that_see_nothing_are_zero_and_bits_past_the_nodes_say_nothing(
    kernel: str, sms: int, layout_name: str, cache_dir: Path
) -> None:
    """Every other node of a tree without a prefix is blind, in a request that is split and in one that is not."""
    case = Case("blind", {"prefixes": [0, 0], "nodes": [40, 3], "lse": True})
    layout = LAYOUTS[layout_name]
    inputs = FAMILY.make_inputs(layout, case, 0)
    mask = present(inputs, "tree_mask")
    mask[::2] = 0
    mask[:40, 1] |= 0xFFFFFF00  # bits of nodes 40 to 63
    mask[40:, 0] |= 0xFFFFFFF8
    mask[40:, 1] = 0xFFFFFFFF
    lse = check(found(kernel, layout, case, inputs, sms, cache_dir), layout, case, inputs)["lse"]
    assert np.isneginf(lse[::2]).all()
    assert np.isfinite(lse[1::2]).all()


# --- Rows of the pool that are nobody's ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "layout_name"), PAIRS)
def test_nan_in_slots_and_columns_of_nobody_is_never_met(kernel: str, layout_name: str, cache_dir: Path) -> None:
    """Rows lie apart, their ends and all other slots hold NaN; the last tile has fewer keys than rows."""
    layout = LAYOUTS[layout_name]
    case = Case("apart", {"prefixes": [37, 0, 1], "nodes": [2, 1, 3], "lse": True, "draft": "pool"})
    inputs = FAMILY.make_inputs(layout, case, 0)
    pool = present(inputs, "kv_pool")
    used = np.concatenate([present(inputs, "kv_indices"), present(inputs, "draft_slots")])
    apart = np.full((len(pool), pool.shape[1] + 16), NAN[str(layout["dtype"])], pool.dtype)
    apart[used, : pool.shape[1]] = pool[used]
    outputs = found(kernel, layout, case, {**inputs, "kv_pool": apart}, 188, cache_dir)
    check(outputs, layout, case, inputs)
