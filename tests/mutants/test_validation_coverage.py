"""What the validation of verify_mla runs: every loop of every candidate, so that a bug planted in one is found."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from mla_schedule import dealt_by_plan

from kgen.build.toolchain import find_toolchain
from kgen.family import Candidate, Case, Layout, Plan, Value
from kgen.render import render
from kgen.resources import SPECS, TEMPLATES
from kgen.space import enumerate_space
from kgen.spec import Spec, load_spec
from kgen.validate import Verdict, validate_in_emulator

TARGET = "sm_120"
SMS = 188
WARP = 32
COMBINE_LOADS = 12  # splits that a thread of the combine has in flight


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(SPECS / "verify_mla.yaml")


@dataclass(frozen=True)
class Loops:
    """How far the loops of one validation run go, each at its longest.

    ``tiles`` of a block, ``splits`` of a request and by how many tiles two of them differ, ``row_tiles`` of a split
    request, ``combine_groups`` of threads, the ``combine_rounds`` of loads that each does, ``requests`` of the batch.
    """

    tiles: int
    splits: int
    uneven: int
    row_tiles: int
    combine_groups: int
    combine_rounds: int
    requests: int
    has_idle_block: bool
    has_more_tiles_than_slots: bool


def loops(candidate: Candidate, plan: Plan, layout: Layout, case: Case) -> Loops:
    """Of one case under one plan; the division into blocks is the kernel's."""
    heads, tile_n = int(layout["heads"]), int(candidate["tile_n"])
    items = dealt_by_plan(plan, candidate, heads, case.options["prefixes"], case.options["nodes"])
    lengths: dict[int, list[int]] = {}
    rows: dict[int, set[int]] = {}
    for item in items:
        lengths.setdefault(item.request, []).append(item.tiles(tile_n))
        rows.setdefault(item.request if item.splits > 1 else -1, set()).add(item.first_row)
    (flash,) = [launch for launch in plan.launches if launch.entry == "verify_mla_flash"]
    splits, groups = max(item.splits for item in items), plan.scalars["combine_groups"]
    return Loops(
        tiles=max(max(tiles) for tiles in lengths.values()),
        splits=splits,
        uneven=max(max(tiles) - min(tiles) for tiles in lengths.values()),
        row_tiles=max((len(first) for request, first in rows.items() if request >= 0), default=0),
        combine_groups=groups,
        combine_rounds=-(-splits // (groups * COMBINE_LOADS)) if groups else 0,
        requests=len(case.options["prefixes"]),
        has_idle_block=len(items) < flash.grid[0],
        has_more_tiles_than_slots=len(items) > plan.scalars["work_slots"],
    )


def validation_runs(spec: Spec, candidate: Candidate, layout: Layout) -> list[Loops]:
    """Every plan of every case, as `validate` asks for them."""
    runs = []
    for case in spec.family.cases(layout):
        plans = spec.family.proving_plans(
            candidate, layout, spec.family.capacity(case), sms=spec.target(TARGET).sms, resident_blocks=1
        )
        runs += [loops(candidate, plan, layout, case) for plan in plans]
    return runs


@pytest.mark.parametrize("layout_name", ["h8_p1", "h128_p64"])
def test_validation_reaches_every_loop_of_every_candidate(spec: Spec, layout_name: str) -> None:
    layout = spec.layout(layout_name)
    candidates = enumerate_space(spec, layout_name, spec.target(TARGET)).candidates
    assert spec.default in candidates
    for candidate in candidates:
        runs = validation_runs(spec, candidate, layout)
        assert max(run.tiles for run in runs) > 2 * int(candidate["stages"]), f"the ring wraps twice: {candidate}"
        assert {run.splits > 1 for run in runs} == {True, False}, candidate
        assert max(run.uneven for run in runs) >= 1, candidate
        assert max(run.row_tiles for run in runs) >= 2, candidate
        assert any(run.combine_groups >= 2 and run.combine_rounds >= 2 for run in runs), candidate
        assert max(run.combine_groups for run in runs) >= 16, candidate
        assert any(run.splits > 1 and run.requests > WARP for run in runs), candidate
        assert any(run.has_idle_block for run in runs), candidate
        assert any(run.has_more_tiles_than_slots for run in runs), candidate


def test_the_plan_of_a_whole_gpu_alone_would_not_reach_them(spec: Spec) -> None:
    layout, candidate = spec.layout("h8_p1"), spec.default
    case = next(case for case in spec.family.cases(layout) if case.name == "ragged")
    capacity = spec.family.capacity(case)
    plan, *_ = spec.family.proving_plans(candidate, layout, capacity, sms=spec.target(TARGET).sms, resident_blocks=1)
    assert loops(candidate, plan, layout, case).tiles <= int(candidate["stages"]), "no split refills the ring"


FLASH, COMBINE = "include/kgen/verify_mla_flash.cuh", "include/kgen/verify_mla_combine.cuh"
SCHEDULE, PROBLEM = "include/kgen/verify_mla_schedule.cuh", "include/kgen/verify_mla_problem.cuh"
REDUCTIONS, ELEMENTS = "include/kgen/reductions.cuh", "include/kgen/verify_mla_elements.cuh"
CASES = ("ragged", "many_splits")  # enough to find most of the bugs below, in less time than all
EAGER: Candidate = {"refill": "eager", "gather": "cp_async"}
ALONE: Candidate = {"refill": "eager", "row_groups": 1, "tile_m": 32}
GROUP: Candidate = {"copiers": "group"}
ONE_WARP: Candidate = {"copiers": "warp", "gather": "cp_async"}
KEYS: Candidate = {"tile_n": 32, "stages": 2, "k_split": 2, "key_split": 2, "tile_m": 32, "row_groups": 1, "warps": 4}


CHANGES: Mapping[str, Candidate] = {
    "default": {}, "eager": EAGER, "alone": ALONE, "keys": KEYS, "group": GROUP, "warp": ONE_WARP,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A bug: in a header, ``old`` becomes ``new``, and ``also`` another; it is in the default with ``changes``.

    ``reason`` is how it is seen, in one of ``cases`` on a GPU of ``sms``, in a layout with other ``fields``.
    """

    file: str
    old: str
    new: str
    reason: str
    changes: Candidate = field(default_factory=dict)
    cases: Sequence[str] = CASES
    also: tuple[str, str] | None = None
    sms: int = SMS
    fields: Mapping[str, Value] = field(default_factory=dict)


REFILL_WAIT = """\
    if constexpr (Config::kRowGroups > 1 || Config::kEagerRefill) named_barrier_sync(kLeft + stage, T::kThreads);
"""
ARRIVE = "      if (refilled(tile) && !mine(tile)) named_barrier_arrive(kLeft + stage, T::kThreads);\n"
MET = "    named_barrier_sync(1 + group, T::kGroupWarps * 32);\n"
LATE_REFILL = "    if (!Config::kEagerRefill) ring.refill(tile - 1, last_stage, next_place);\n"
PLACE = "next_place = ring.place(tile + Config::kStages);"
PRODUCT = "    value_tile.accumulate(probabilities_at, o);\n"
LEAVE = "    ring.leave(tile, stage);\n"
PARITY, STAYS = "parity = stage == 0 ? parity ^ 1 : parity;", "parity = stage == 0 ? parity : parity;"
COPY_WAIT = """\
      if (tile >= Config::kStages) mbarrier_wait(full + (Config::kStages + stage) * 8, parity);
"""
COPY_FILL = "      fill(stage, here);\n"
COPY_SYNC = "      block_sync();\n      ring.copy_tiles();\n"
LEFT = "      mbarrier_arrive(full + (Config::kStages + stage) * 8);\n"
OWNER, SLOT = "eight ^ sharer : eight * 8 / T::kOwnRows;", "eight - 1 : sharer;"
TAIL = "    if (first_key + Config::kTileN > request.prefix) {\n"
ITEM = "split = divide(place, work.row_tiles),"
FIRST = "first = work.first_tile(split);"
LENGTH = "work.first_tile(split + 1) - first,"
LOADED = "word(b.x), word(b.y), word(b.z), word(b.w)"
STORED = "if (thread_index() % 32 == 0) store"
SCHEDULED = "block_index_x() * Config::kScheduleWarps + thread_index() / 32;"
ROUND = "start < splits; start += kInFlight * params.combine_groups"
IN_FLASH, WRONG, NAN = "verify_mla_flash.cuh", "relative L2 error", "are NaN or never written"
OUTSIDE, RACE = "outside every buffer", "race on global memory"
SHARP = {"scale_dim": 1}  # scores so far apart that the peak of most rows rises on the way
E4M3: Mapping[str, Value] = {"dtype": "e4m3"}
REQUESTS = ("many_requests",)
MUTANTS = {
    # The ring.
    "refill fetches the rows of the tile before": Mutant(FLASH, PLACE, "next_place = ring.place(tile);", WRONG),
    "eager refill fetches the rows of the tile before": Mutant(
        FLASH, PLACE, "next_place = ring.place(tile);", WRONG, EAGER
    ),
    "refill does not meet the other row group": Mutant(FLASH, REFILL_WAIT, "", IN_FLASH),
    "row groups refill without a word": Mutant(FLASH, REFILL_WAIT, "", IN_FLASH, also=(ARRIVE, "")),
    "row groups refill eagerly without a word": Mutant(FLASH, REFILL_WAIT, "", IN_FLASH, EAGER, also=(ARRIVE, "")),
    "eager refill does not wait for its own group": Mutant(
        FLASH, "Config::kRowGroups > 1 || Config::kEagerRefill", "Config::kRowGroups > 1", IN_FLASH, ALONE
    ),
    "late refill comes before its group has met": Mutant(
        FLASH, MET + LATE_REFILL, LATE_REFILL + MET, IN_FLASH, {**ALONE, "refill": "late"}
    ),
    "a stage is left before its values are read": Mutant(FLASH, PRODUCT + LEAVE, LEAVE + PRODUCT, IN_FLASH),
    "later phases of a stage are not waited for": Mutant(
        FLASH, "ring.wait(stage, parity);", "if (tile < Config::kStages) ring.wait(stage, 0);", IN_FLASH
    ),
    "the parity stays": Mutant(FLASH, f"\n    {PARITY}", f"\n    {STAYS}", IN_FLASH),
    "both row groups fill the first stages": Mutant(
        FLASH, "stage = group + i * Config::kRowGroups;", "stage = i * Config::kRowGroups;", IN_FLASH
    ),
    # Warps that only copy.
    "copying warps do not wait until a stage is left": Mutant(FLASH, COPY_WAIT, "", IN_FLASH, GROUP),
    "one copying warp does not wait until a stage is left": Mutant(FLASH, COPY_WAIT, "", IN_FLASH, ONE_WARP),
    "copying warps wait for the phase before": Mutant(
        FLASH, "int stage = 0, parity = 1, next_place", "int stage = 0, parity = 0, next_place", IN_FLASH, GROUP
    ),
    "the parity of copying warps stays": Mutant(FLASH, f"\n      {PARITY}", f"\n      {STAYS}", IN_FLASH, GROUP),
    "a thread does not tell copying warps that it has left": Mutant(
        FLASH, LEFT, LEFT.replace("mbar", "if (thread_index() != 0) mbar"), IN_FLASH, GROUP
    ),
    "a stage is left before its values are read, beside copying warps": Mutant(
        FLASH, PRODUCT + LEAVE, LEAVE + PRODUCT, IN_FLASH, GROUP
    ),
    "copying warps fetch the tile before": Mutant(
        FLASH, "next_place = place(tile + 1);", "next_place = place(tile);", WRONG, GROUP
    ),
    "the first copy comes before the barriers are there": Mutant(
        FLASH, COPY_SYNC, "      ring.copy_tiles();\n", IN_FLASH, GROUP,
        also=(COPY_FILL, COPY_FILL + "      if (tile == 0) block_sync();\n"),
    ),
    # Scores and softmax.
    "scores go to the wrong owner": Mutant(FLASH, OWNER, OWNER.replace("sharer", "sharer ^ 1"), WRONG),
    "scores of parts of the keys go to the wrong owner": Mutant(FLASH, OWNER, OWNER.replace(";", " ^ 1;"), WRONG, KEYS),
    "scores go to the next sender's inbox": Mutant(FLASH, SLOT, SLOT.replace(" - 1", ""), IN_FLASH),
    "a warp's own share of the scores is left out": Mutant(
        FLASH, "sum = {own[i], own[i + 1], own[i + 2], own[i + 3]};", "sum = {0, 0, 0, 0};", WRONG
    ),
    "rows of Q stay in order": Mutant(FLASH, "((m * 2 + half) ^ first_eight)", "(m * 2 + half)", WRONG),
    "the keys of two parts change places": Mutant(
        FLASH, "received + key_part *", "received + (Config::kKeySplit - 1 - key_part) *", WRONG, KEYS
    ),
    "a slice of the head dimension is left out": Mutant(
        FLASH, "sender < Config::kKSplit -", "sender + 1 < Config::kKSplit -", WRONG
    ),
    "the last chunk of Q is left out": Mutant(
        ELEMENTS, "exists && !(first_only && lane >= 2)", "exists && !first_only", WRONG
    ),
    "the mask of the draft rows is left out": Mutant(FLASH, TAIL, "    if (false) {\n", WRONG),
    "the mask is left out where a tile has keys of the prefix too": Mutant(
        FLASH, TAIL, "    if (first_key >= request.prefix) {\n", WRONG
    ),
    "the mask is that of the next node": Mutant(
        FLASH, "divide(tile_row + row, params.heads)", "divide(tile_row + row, params.heads) + 1", OUTSIDE
    ),
    "weights are relative to a stale peak": Mutant(
        FLASH, "float rescale = 1;", "float rescale = 1, stale = base;", WRONG,
        also=("from = base == -infinity() ? 0 : base;", "from = stale == -infinity() ? 0 : stale;"),
    ),
    "older sums keep their scale": Mutant(FLASH, "total *= rescale;", "", WRONG, fields=SHARP),
    "older outputs keep their scale": Mutant(FLASH, "if (rescaled) rescale", "if (false) rescale", WRONG, fields=SHARP),
    "factors overwrite weights": Mutant(
        FLASH, "(at + Config::kTileN / 2, rescale)", "(at + Config::kTileN / 2 - 4, rescale)", "that nothing wrote"
    ),
    "factors are those of the next row": Mutant(
        FLASH, "T::probability_row(group, 0, lane / 4) + C", "T::probability_row(group, 0, lane / 4 ^ 1) + C", WRONG,
        fields=SHARP,
    ),
    "only a warp's own rows are rescaled": Mutant(
        FLASH, "if (rescaled) rescale", "if (warp_any(rescale != 1)) rescale", WRONG, fields=SHARP
    ),
    "sums in the order of columns": Mutant(
        REDUCTIONS, "x[i] = upper ? other : x[i];", "x[i] = upper ? x[i] : other;", WRONG
    ),
    "P is read before its group has met": Mutant(
        FLASH, "const bool rescaled = named_barrier_any(1 + group, T::kGroupWarps * 32, rescale != 1);",
        "const bool rescaled = true;", IN_FLASH,
    ),
    "the scale of the rows is left out of O": Mutant(
        FLASH, "params.kv_scale / total", "1 / total", WRONG, cases=("scaled",)
    ),
    # Rows in e4m3.
    "steps of a fetch change places": Mutant(
        ELEMENTS, "fetched[2 * half + step];", "fetched[2 * half + 1 - step];", WRONG, fields=E4M3
    ),
    "half a fetch lies behind the row": Mutant(
        FLASH, "step_lane<Config>() / 8 % 2 * 16 : 0;", "0 : 0;", "that nothing wrote", fields=E4M3
    ),
    "even and odd columns change places": Mutant(
        ELEMENTS, "if (tile % 2 == 0) return", "if (tile % 2 != 0) return", WRONG, fields=E4M3
    ),
    "the last keys' bytes stay in order": Mutant(
        ELEMENTS, "last = swap_middle_bytes(fetched[tile / 2 * 2 + 1]);", "last = fetched[tile / 2 * 2 + 1];", WRONG,
        fields=E4M3,
    ),
    "odd lanes send the columns that they keep": Mutant(
        ELEMENTS, "odd ? pairs[0] : pairs[2], 1", "odd ? pairs[2] : pairs[0], 1", WRONG, fields=E4M3
    ),
    "the last step of Q is left out": Mutant(
        ELEMENTS, "exists && !(first_only && step > k)", "exists && !first_only", WRONG, fields=E4M3
    ),
    "weights overflow fp16": Mutant(ELEMENTS, "kLift = 7;", "kLift = 9;", WRONG, fields={**E4M3, **SHARP}),
    # The schedule.
    "left-over tiles are dropped": Mutant(
        SCHEDULE, "work.longer = work.key_tiles - work.share * work.splits;", "work.longer = 0;", WRONG
    ),
    "every other split is done twice": Mutant(SCHEDULE, ITEM, ITEM.replace("),", ") / 2 * 2,"), NAN),
    "a split starts one tile early": Mutant(
        SCHEDULE, FIRST, FIRST.replace(";", " - (split > 0);"), WRONG
    ),
    "a split ends one tile early": Mutant(
        SCHEDULE, LENGTH, LENGTH.replace("first,", "first - (split + 1 < work.splits),"), WRONG
    ),
    "row tiles and splits change places": Mutant(
        SCHEDULE, ITEM, "split = divide(place, work.splits),", OUTSIDE, cases=("many_nodes",)
    ),
    "items start after the request's own": Mutant(
        SCHEDULE, "work.first_item = shuffle(end - mine, owner);", "work.first_item = shuffle(end, owner);", OUTSIDE,
    ),
    "requests past a warp's lanes are not counted": Mutant(
        SCHEDULE, "items = shuffle(end, 31);", "items = 0;", NAN, cases=REQUESTS
    ),
    "requests past a warp's lanes are not read again": Mutant(
        SCHEDULE, "if (first > 0) work =", "if (first > 32) work =", RACE, cases=REQUESTS
    ),
    "requests past a warp's lanes are left out of the items that are split": Mutant(
        SCHEDULE, "first == 0 ? first_work : request_work<Config>(params, first + lane);", "first_work;", NAN,
        cases=REQUESTS,
    ),
    "items of requests that are not split start anew": Mutant(
        SCHEDULE, "int items = is_split ? 0 : cut.split_items;", "int items = 0;", NAN
    ),
    "requests that are split and others change places": Mutant(
        SCHEDULE, "(work.splits > 1) == is_split", "(work.splits > 1) != is_split", OUTSIDE
    ),
    # The schedule that calls share; blocks that find their own work do not see these.
    "the schedule is stored with another request's first node": Mutant(
        SCHEDULE, "{word(request.first_node), word(request.nodes),", "{word(request.nodes), word(request.nodes),", RACE
    ),
    "the schedule is stored without row tiles": Mutant(
        SCHEDULE, "{word(item.row_tiles), 0", "{0, 0", WRONG, cases=("chain",)
    ),
    "the schedule is loaded with the first tile and their number changed": Mutant(
        SCHEDULE, LOADED, "word(b.x), word(b.z), word(b.y), word(b.w)", NAN
    ),
    "the schedule is loaded with the first row left out": Mutant(
        SCHEDULE, LOADED, LOADED.replace("word(b.x)", "0"), RACE, cases=("many_nodes",)
    ),
    "the schedule is loaded with a prefix of another request": Mutant(
        SCHEDULE, "word(a.z), word(a.w)}", "word(a.z), word(a.z)}", OUTSIDE
    ),
    "the schedule is loaded for the next block": Mutant(
        SCHEDULE, "load_item<Config>(params.schedule, index)", "load_item<Config>(params.schedule, index + 1)", OUTSIDE
    ),
    "one warp of a block makes the schedule": Mutant(
        SCHEDULE, SCHEDULED, SCHEDULED.replace("+ thread_index() / 32", ""), RACE
    ),
    "blocks of the schedule leave the last item out": Mutant(
        SCHEDULE, STORED, STORED.replace("(t", "(thread_index() < 96 && t"), OUTSIDE
    ),
    "items that nobody has are not stored": Mutant(
        SCHEDULE, STORED, STORED.replace("(t", "(item.splits > 0 && t"), OUTSIDE
    ),
    # The combine.
    "combine groups start at the wrong split": Mutant(COMBINE, "int start = group;", "int start = group + 1;", WRONG),
    "combine leaves group 1 out": Mutant(
        COMBINE, "  for (int other = 1; other < params.combine_groups; other++) {",
        "  for (int other = 2; other < params.combine_groups; other++) {", WRONG,
    ),
    "combine leaves all groups but two out": Mutant(
        COMBINE, "    sum = {sum.x + weight * part.x,", "if (other > 1) break; sum = {sum.x + weight * part.x,", WRONG
    ),
    "combine's groups keep their own scale": Mutant(
        COMBINE, "weight = exp2_approx(peaks.load(other) - base)", "weight = 1", WRONG, fields=SHARP
    ),
    "combine's first group keeps its own scale": Mutant(
        COMBINE, "own = exp2_approx(peaks.load(0) - base)", "own = 1", WRONG, fields=SHARP
    ),
    "combine's later rounds keep the scale of the first": Mutant(
        COMBINE, "fade = exp2_approx(peak - base)", "fade = 1", WRONG, fields=SHARP
    ),
    "combine leaves out a round that is not full": Mutant(
        COMBINE, ROUND, ROUND.replace("start <", "start + (kInFlight - 1) * params.combine_groups <"), WRONG
    ),
    "combine does one round": Mutant(COMBINE, ROUND, ROUND.replace("start < splits", "start == group"), WRONG),
    "combine reads past the last split": Mutant(COMBINE, "      if (split >= splits) continue;\n", "", NAN),
    "combine blocks all write the first columns": Mutant(
        COMBINE, "(block_index_y() * column_threads + place)", "place", "verify_mla_combine.cuh"
    ),
    "combine is told the splits of another row tile": Mutant(
        FLASH, "stride = item.row_tiles * Config::kTileM,", "stride = Config::kTileM,", NAN, cases=("chain",)
    ),
    "combine is told of the first row tile only": Mutant(
        FLASH, "(first_tile == 0) tell_combine", "(first_tile + tile_row == 0) tell_combine", NAN, cases=("chain",)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


def validate_templates(
    spec: Spec,
    changes: Candidate,
    templates: Path,
    cache_dir: Path,
    cases: Sequence[str] = CASES,
    *,
    sms: int = SMS,
    fields: Mapping[str, Value] | None = None,
) -> Verdict:
    layout, candidate = {**spec.layout("h8_p1"), **(fields or {})}, {**spec.default, **changes}
    return validate_in_emulator(
        render(spec.family, candidate, layout, templates),
        spec.family,
        candidate,
        layout,
        spec.tolerances,
        toolchain=find_toolchain("emulator"),
        cache_dir=cache_dir,
        target_sms=sms,
        resident_blocks=1,
        cases=[case for case in spec.family.cases(layout) if case.name in cases],
        seeds=(0,),
    )


def planted(mutant: Mutant, folder: Path) -> Path:
    """The templates with the bug."""
    templates = folder / "templates"
    shutil.copytree(TEMPLATES, templates)
    for old, new in [(mutant.old, mutant.new), *([mutant.also] if mutant.also else [])]:
        text = (templates / mutant.file).read_text()
        assert text.count(old) == 1, old
        (templates / mutant.file).write_text(text.replace(old, new))
    return templates


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_kernels_are_right_without_a_planted_bug(spec: Spec, changes: Candidate, cache_dir: Path) -> None:
    runs: tuple[tuple[int, Mapping[str, Value], Sequence[str]], ...] = (
        (SMS, {}, (*CASES, "chain", "many_nodes", *REQUESTS)),
        (5, {}, (*CASES, *REQUESTS)),
        (SMS, SHARP, CASES),
        (SMS, E4M3, (*CASES, "scaled")),
        (SMS, {**E4M3, **SHARP}, CASES),
    )
    for sms, fields, cases in runs:
        verdict = validate_templates(spec, changes, TEMPLATES, cache_dir, cases, sms=sms, fields=fields)
        assert verdict.ok, verdict.reason


def test_the_target_is_the_one_that_bugs_are_looked_for_on(spec: Spec) -> None:
    assert spec.target(TARGET).sms == SMS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(spec: Spec, name: str, tmp_path: Path, cache_dir: Path) -> None:
    mutant = MUTANTS[name]
    templates = planted(mutant, tmp_path)
    verdict = validate_templates(
        spec, mutant.changes, templates, cache_dir, mutant.cases, sms=mutant.sms, fields=mutant.fields
    )
    assert not verdict.ok
    assert mutant.reason in verdict.reason, verdict.reason


def test_a_schedule_of_too_few_blocks_is_found(spec: Spec, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(spec.family).plan

    def one_less(*arguments: Any, **more: Any) -> Plan:
        plan = plain(*arguments, **more)
        grids = [(max(1, launch.grid[0] - 1), 1, 1) for launch in plan.shared_launches]
        shared = [replace(launch, grid=grid) for launch, grid in zip(plan.shared_launches, grids, strict=True)]
        return replace(plan, shared_launches=tuple(shared))

    monkeypatch.setattr(type(spec.family), "plan", one_less)
    verdict = validate_templates(spec, {}, TEMPLATES, cache_dir)
    assert OUTSIDE in verdict.reason, verdict.reason


def test_every_case_is_run_with_a_schedule_and_without(spec: Spec) -> None:
    layout = spec.layout("h8_p1")
    for case in spec.family.cases(layout):
        plans = spec.family.proving_plans(spec.default, layout, spec.family.capacity(case), sms=SMS, resident_blocks=1)
        alone, sharing, *_ = plans
        assert sharing.launches[1:] == alone.launches
        assert ["schedule" in plan.workspace_bytes for plan in (alone, sharing)] == [False, True]
