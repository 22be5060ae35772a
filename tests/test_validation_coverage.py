"""What the validation of verify_mla runs: every loop of every candidate, so that a bug planted in one is found."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from kgen.build.toolchain import find_toolchain
from kgen.family import Candidate, Layout, Plan
from kgen.render import render
from kgen.resources import SPECS, TEMPLATES
from kgen.space import enumerate_space
from kgen.spec import Spec, load_spec
from kgen.validate import Verdict, validate_in_emulator

TARGET = "sm_120"


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(SPECS / "verify_mla.yaml")


@dataclass(frozen=True)
class Loops:
    """How far the loops of one validation run go: tiles of the longest split, splits, groups of the combine."""

    tiles: int
    splits: int
    combine_groups: int
    has_empty_split: bool


def loops(candidate: Candidate, plan: Plan, keys: list[int]) -> Loops:
    """From a plan and the keys of each request; the division into tiles and splits is the kernel's."""
    splits = plan.scalars["splits"]
    tiles = [-(-count // int(candidate["tile_n"])) for count in keys]
    shares = [-(-count // splits) for count in tiles]
    empty = any(share * (splits - 1) >= count for share, count in zip(shares, tiles, strict=True))
    return Loops(max(shares), splits, plan.scalars["combine_groups"], empty)


def validation_runs(spec: Spec, candidate: Candidate, layout: Layout) -> list[Loops]:
    """Every plan of every case, as `validate` asks for them."""
    runs = []
    for case in spec.family.cases(layout):
        plans = spec.family.proving_plans(
            candidate, layout, spec.family.capacity(case), sms=spec.target(TARGET).sms, resident_blocks=1
        )
        keys = [prefix + nodes for prefix, nodes in zip(case.options["prefixes"], case.options["nodes"], strict=True)]
        runs += [loops(candidate, plan, keys) for plan in plans]
    return runs


@pytest.mark.parametrize("layout_name", ["h8_p1", "h128_p64"])
def test_validation_reaches_every_loop_of_every_candidate(spec: Spec, layout_name: str) -> None:
    layout = spec.layout(layout_name)
    candidates = enumerate_space(spec, layout_name, spec.target(TARGET)).candidates
    assert spec.default in candidates
    for candidate in candidates:
        runs = validation_runs(spec, candidate, layout)
        assert max(run.tiles for run in runs) > 2 * int(candidate["stages"]), f"the ring wraps twice: {candidate}"
        assert max(run.combine_groups for run in runs) >= 2, candidate
        assert {run.splits > 1 for run in runs} == {True, False}, candidate
        assert any(run.has_empty_split for run in runs), candidate


def test_the_plan_of_a_whole_gpu_alone_would_not_reach_them(spec: Spec) -> None:
    layout, candidate = spec.layout("h8_p1"), {**spec.default, "tile_n": 16, "stages": 4}
    case = next(case for case in spec.family.cases(layout) if case.name == "ragged")
    capacity = spec.family.capacity(case)
    plan, *_ = spec.family.proving_plans(candidate, layout, capacity, sms=spec.target(TARGET).sms, resident_blocks=1)
    assert loops(candidate, plan, [258]).tiles <= 4, "no split refills the ring"


FLASH, COMBINE = "include/kgen/verify_mla_flash.cuh", "include/kgen/verify_mla_combine.cuh"
CASES = ("ragged", "many_splits")  # enough to find the bugs below, in less time than all
DEFERRED = {"gather": "cp_async", "refill": "deferred"}


@dataclass(frozen=True)
class Mutant:
    """A bug: ``old`` becomes ``new`` in a header, for the default with ``changes``; ``reason`` is how it is seen."""

    file: str
    old: str
    new: str
    reason: str
    changes: Candidate


REFILL_WAIT = "    mbarrier_wait(empty + tile % Config::kStages * 8, tile / Config::kStages % 2);\n"
PLACE = "next_place = ring.place(tile + Config::kStages);"
PRODUCT = "    value_tile<Config>(probability_lane, stage + value_lane, o);\n"
WRONG = "relative L2 error"
MUTANTS = {
    "refill fetches the rows of the tile before": Mutant(FLASH, PLACE, "next_place = ring.place(tile);", WRONG, {}),
    "deferred refill fetches the rows of the tile before": Mutant(
        FLASH, PLACE, "next_place = ring.place(tile);", WRONG, DEFERRED
    ),
    "refill waits for no reader": Mutant(FLASH, REFILL_WAIT, "", "verify_mla_flash.cuh", {}),
    "deferred refill waits for no reader": Mutant(FLASH, REFILL_WAIT, "", "verify_mla_flash.cuh", DEFERRED),
    "a stage is left before its values are read": Mutant(
        FLASH, PRODUCT + "    ring.leave(tile);\n", "    ring.leave(tile);\n" + PRODUCT, "verify_mla_flash.cuh", {}
    ),
    "later phases of a stage are not waited for": Mutant(
        FLASH, "mbarrier_wait(full + stage * 8, tile / Config::kStages % 2);",
        "if (tile < Config::kStages) mbarrier_wait(full + stage * 8, 0);", "verify_mla_flash.cuh", {},
    ),
    "the mask of the draft rows is left out": Mutant(FLASH, "if (tail) {", "if (false) {", WRONG, {}),
    "an empty split writes no log-sum-exp": Mutant(
        FLASH, "thread_index() < Config::kTileM && row < rows", "false", WRONG, {}
    ),
    "combine groups start at the wrong split": Mutant(
        COMBINE, "int split = group;", "int split = group + 1;", WRONG, {}
    ),
    "combine leaves group 1 out": Mutant(COMBINE, "int other = 1;", "int other = 2;", WRONG, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


def validate_templates(spec: Spec, changes: Candidate, templates: Path, cache_dir: Path) -> Verdict:
    layout, candidate = spec.layout("h8_p1"), {**spec.default, **changes}
    cases = [case for case in spec.family.cases(layout) if case.name in CASES]
    return validate_in_emulator(
        render(spec.family, candidate, layout, templates),
        spec.family,
        candidate,
        layout,
        spec.tolerances,
        toolchain=find_toolchain("emulator"),
        cache_dir=cache_dir,
        target_sms=spec.target(TARGET).sms,
        resident_blocks=1,
        cases=cases,
        seeds=(0,),
    )


@pytest.mark.parametrize("changes", [{}, DEFERRED], ids=["default", "deferred"])
def test_the_kernels_are_right_without_a_planted_bug(spec: Spec, changes: Candidate, cache_dir: Path) -> None:
    verdict = validate_templates(spec, changes, TEMPLATES, cache_dir)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(spec: Spec, name: str, tmp_path: Path, cache_dir: Path) -> None:
    mutant = MUTANTS[name]
    templates = tmp_path / "templates"
    shutil.copytree(TEMPLATES, templates)
    text = (templates / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (templates / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    verdict = validate_templates(spec, mutant.changes, templates, cache_dir)
    assert not verdict.ok
    assert mutant.reason in verdict.reason, verdict.reason
