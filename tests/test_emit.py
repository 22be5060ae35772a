"""From a tuning database to a pack: what is chosen, proven and built, and when a pack counts as stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mla_packs import (
    POINTS,
    SMALL,
    changed_default,
    make_database,
    make_trial,
    proven_trials,
    shipped_spec,
    sources_only_pack,
)

from kgen.build.toolchain import Toolchain, find_toolchain
from kgen.db import TuningDatabase
from kgen.db.reject import reject
from kgen.errors import BuildError, InputError, ValidationError
from kgen.pack import EmitReport, emit, pack_from_database, stale_reasons, verify_pack, write_pack
from kgen.pack.assemble import packed_arch, select
from kgen.records import TrialRecord
from kgen.render import render
from kgen.runtime.manifest import cubin_path
from kgen.runtime.pack_reader import Pack, load_pack
from kgen.spec import Spec, load_spec
from kgen.validate import CaseResult, Verdict

LAYOUTS = ("h8_p1", "h8_p64")


@pytest.fixture(scope="module")
def spec() -> Spec:
    return shipped_spec()


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain("sm_120")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "cubins"


@pytest.fixture(scope="module")
def database(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TuningDatabase]:
    """A winner of another source on sm_120, one that differs in its launch plan only on sm_90."""
    trials = [trial for layout in LAYOUTS for trial in proven_trials(spec, layout, changed_default(spec, **SMALL))]
    dealt = changed_default(spec, item_overhead_rows=32)
    trials += [trial for layout in LAYOUTS for trial in proven_trials(spec, layout, dealt, "sm_90")]
    url = make_database(tmp_path_factory.mktemp("db") / "tuning.sqlite", trials)
    with TuningDatabase.open(url, read_only=True) as db:
        yield db


@pytest.fixture(scope="module")
def emitted(
    spec: Spec,
    database: TuningDatabase,
    toolchain: Toolchain,
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EmitReport:
    out = tmp_path_factory.mktemp("out") / "pack"
    targets = ["sm_120", "sm_90"]
    return emit(spec, database, targets, out, toolchain=toolchain, cache_dir=cache_dir, jobs=2, layouts=LAYOUTS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_winners_default_and_oracle_are_packed_once_each(spec: Spec, emitted: EmitReport) -> None:
    assert emitted.sources_by_arch == {"sm_120": 3, "sm_90": 2}
    assert (emitted.variants, emitted.proven_now, emitted.untuned) == (4, (), ())
    manifest = load_pack(emitted.out).manifest
    assert len(manifest.sources) == 3
    assert {variant.role for variant in manifest.variants.values()} == {"default", "oracle", "tuned"}
    for target, overhead, tile_m in (("sm_120", 128, 16), ("sm_90", 32, 64)):
        for layout in LAYOUTS:
            table = manifest.dispatch[target][layout]
            assert [dict(bucket.point) for bucket in table.buckets] == POINTS
            winner = manifest.variants[table.buckets[0].variant].candidate
            assert (winner["item_overhead_rows"], winner["tile_m"]) == (overhead, tile_m)
            assert manifest.variants[table.default].candidate == spec.default
            assert manifest.variants[table.oracle].candidate == spec.oracle
            assert table.layout == spec.layout(layout)


def test_a_rejected_source_is_not_packed_and_a_rejected_default_is_an_error(
    spec: Spec, database: TuningDatabase, tmp_path: Path
) -> None:
    with TuningDatabase.open(str(tmp_path / "db")) as db:
        db.add_all(database.trials())
        small = render(spec.family, changed_default(spec, **SMALL), spec.layout("h8_p1")).name
        default = render(spec.family, spec.default, spec.layout("h8_p1")).name
        assert small in {variant.source.name for variant in select(spec, db, ["sm_120"], LAYOUTS).variants.values()}
        reject(db, small, "why")
        db.add_all(replace(trial, created_at="2099-01-01T00:00:00+00:00") for trial in db.trials(source_name=small))
        selection = select(spec, db, ["sm_120", "sm_90"], LAYOUTS)
        assert small not in {variant.source.name for variant in selection.variants.values()}
        reject(db, default, "seen wrong by hand")
        with pytest.raises(InputError, match=f"default candidate .*: its source {default} is rejected, seen wrong by"):
            select(spec, db, ["sm_90"], LAYOUTS)


def test_the_manifest_knows_resources_driver_and_proofs(spec: Spec, emitted: EmitReport) -> None:
    manifest = load_pack(emitted.out).manifest
    assert manifest.archs["sm_120"].min_cuda == (13, 0)
    assert manifest.archs["sm_120"].min_driver.startswith("580.")
    flash = manifest.sources[manifest.variants[manifest.dispatch["sm_120"]["h8_p1"].default].source]
    assert [kernel.entry for kernel in flash.kernels] == [
        "verify_mla_flash",
        "verify_mla_combine",
        "verify_mla_schedule",
    ]
    assert flash.kernels[0].shared_bytes == spec.family.kernels(spec.default, spec.layout("h8_p1"))[0].shared_bytes
    for cubin in flash.cubins.values():
        assert cubin.blocks_per_sm >= 1
        assert 32 < cubin.resources["verify_mla_flash"].registers <= 255
    for variant in manifest.variants.values():
        assert {name: proof.checked_on for name, proof in variant.proofs.items()} == dict.fromkeys(LAYOUTS, "emulator")


def test_another_cache_and_folder_give_the_same_bytes(
    spec: Spec, database: TuningDatabase, toolchain: Toolchain, emitted: EmitReport, tmp_path: Path
) -> None:
    again = emit(
        spec, database, ["sm_120", "sm_90"], tmp_path / "other", toolchain=toolchain, cache_dir=tmp_path / "cache",
        jobs=2, layouts=LAYOUTS,
    )  # fmt: skip
    assert contents(again.out) == contents(emitted.out)


def test_verify_rebuilds_every_cubin_from_the_packed_text(emitted: EmitReport, toolchain: Toolchain) -> None:
    report = verify_pack(emitted.out, rebuild=True, toolchain=toolchain, jobs=2)
    assert (report.ok, report.rebuilt, report.answers, report.stale, report.not_rebuilt) == (True, 5, 16, (), ())


def test_verify_names_a_cubin_that_is_not_its_sources(
    emitted: EmitReport, toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = load_pack(emitted.out)
    write_pack(tmp_path / "pack", with_cubins_swapped(pack))
    report = verify_pack(tmp_path / "pack", rebuild=True, toolchain=toolchain, jobs=2)
    assert not report.ok
    assert len(report.problems) == 2
    assert all("for sm_90 compiles to another cubin" in problem for problem in report.problems)


def with_cubins_swapped(pack: Pack) -> Pack:
    """The pack with the two cubins of sm_90 in each other's place, digests and all."""
    one, other = [name for name, source in pack.manifest.sources.items() if "sm_90" in source.cubins]
    sources, files = dict(pack.manifest.sources), dict(pack.files)
    for name, from_name in ((one, other), (other, one)):
        cubins = {**sources[name].cubins, "sm_90": pack.manifest.sources[from_name].cubins["sm_90"]}
        sources[name] = replace(sources[name], cubins=cubins)
        files[cubin_path("sm_90", name)] = pack.cubin(from_name, "sm_90")
    return replace(pack, manifest=replace(pack.manifest, sources=sources), files=files)


def test_verify_says_why_it_did_not_rebuild(emitted: EmitReport, toolchain: Toolchain) -> None:
    other = replace(toolchain, nvcc_version="13.9.9")
    report = verify_pack(emitted.out, rebuild=True, toolchain=other)
    assert report.ok
    assert report.rebuilt == 0
    assert [line.split(":")[0] for line in report.not_rebuilt] == ["sm_120", "sm_90"]
    assert "this is nvcc 13.9.9" in report.not_rebuilt[0]


def test_an_up_to_date_pack_is_not_stale(emitted: EmitReport, database: TuningDatabase) -> None:
    assert stale_reasons(emitted.out, database) == []


def test_a_changed_template_makes_a_pack_stale(emitted: EmitReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.pack.verify.render", lambda *given: replace(render(*given), sha256="0" * 64))
    reasons = stale_reasons(emitted.out)
    assert len(reasons) == 4
    assert all(reason.endswith("renders to another source") for reason in reasons)


def test_a_changed_spec_makes_a_pack_stale(emitted: EmitReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.pack.verify.load_spec", lambda path: replace(load_spec(path), sha256="0" * 64))
    assert stale_reasons(emitted.out) == ["spec verify_mla has changed"]


def test_a_changed_winner_makes_a_pack_stale(spec: Spec, emitted: EmitReport, tmp_path: Path) -> None:
    trials = [
        trial
        for target in ("sm_120", "sm_90")
        for layout in LAYOUTS
        for trial in proven_trials(spec, layout, changed_default(spec, **SMALL), target)
    ]
    with TuningDatabase.open(make_database(tmp_path / "tuning.sqlite", trials), read_only=True) as db:
        reasons = stale_reasons(emitted.out, db)
    assert reasons == ["winners of sm_90 h8_p1 have changed", "winners of sm_90 h8_p64 have changed"]


def emit_trials(
    spec: Spec, trials: list[TrialRecord], folder: Path, toolchain: Toolchain, cache_dir: Path, **options: Any
) -> EmitReport:
    with TuningDatabase.open(make_database(folder / "tuning.sqlite", trials), read_only=True) as db:
        return emit(
            spec, db, ["sm_120"], folder / "pack", toolchain=toolchain, cache_dir=cache_dir, jobs=2, layouts=LAYOUTS,
            **options,
        )  # fmt: skip


def unproven_trials(spec: Spec) -> list[TrialRecord]:
    """One layout is proven; of the other nothing is, not even the default."""
    unchecked: dict[str, Any] = {"checked_on": "", "relative_error": None}
    return [
        *proven_trials(spec, "h8_p64", spec.default),
        make_trial(spec, "h8_p1", spec.default, 20.0, **unchecked),
        make_trial(spec, "h8_p1", changed_default(spec, **SMALL), 5.0, **unchecked),
    ]


def verdict(ok: bool) -> Callable[..., Verdict]:
    worst = CaseResult("ragged", 0, "out", 0.002 if ok else 9.0, 0.01, ok)
    return lambda *_, **__: Verdict(ok, (worst,), worst, "" if ok else "out of ragged, seed 0: 9 is too much")


def test_what_has_no_proof_is_proven_first(
    spec: Spec, toolchain: Toolchain, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def prove(source: Any, family: Any, candidate: Any, layout: Any, *_: Any, **__: Any) -> Verdict:
        asked.append((family.label(candidate), layout["page_size"]))
        return verdict(ok=True)()

    monkeypatch.setattr("kgen.pack.assemble.validate_in_emulator", prove)
    told: list[Any] = []
    report = emit_trials(
        spec, unproven_trials(spec), tmp_path, toolchain, cache_dir, on_proof=lambda *a: told.append(a)
    )
    winner = changed_default(spec, **SMALL)
    assert asked == [(spec.family.label(candidate), 1) for candidate in (spec.default, spec.oracle, winner)]
    assert [(number, count) for number, count, _ in told] == [(0, 3), (1, 3), (2, 3)]
    assert len(report.proven_now) == 3
    manifest = load_pack(report.out).manifest
    packed = manifest.variants[manifest.dispatch["sm_120"]["h8_p1"].buckets[0].variant]
    assert packed.candidate == winner
    assert packed.proofs["h8_p1"].relative_error == 0.002
    assert "h8_p64" not in packed.proofs


def test_a_wrong_winner_is_refused_by_name_and_nothing_is_written(
    spec: Spec, toolchain: Toolchain, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgen.pack.assemble.validate_in_emulator", verdict(ok=False))
    with pytest.raises(ValidationError, match=r"flash_m64_.* for h8_p1: is wrong, so it is not packed, out of ragged"):
        emit_trials(spec, unproven_trials(spec), tmp_path, toolchain, cache_dir)
    assert not (tmp_path / "pack").exists()


def test_a_winner_that_does_not_build_is_refused_by_name(
    spec: Spec, toolchain: Toolchain, tmp_path: Path, cache_dir: Path
) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'kernel.cu(1): error: planted'; exit 1\n")
    broken.chmod(0o755)
    tools = replace(toolchain, nvcc=broken)
    with pytest.raises(BuildError, match=r"does not build for sm_120: compile_error, .*planted"):
        emit_trials(spec, unproven_trials(spec), tmp_path, tools, tmp_path / "cache")


def test_a_target_that_was_never_tuned_is_refused(spec: Spec, database: TuningDatabase, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"toolchain": None, "cache_dir": tmp_path, "jobs": 1}
    with pytest.raises(InputError, match=r"holds no trial of verify_mla for sm_121 .*; kgen tune .*--target sm_121"):
        emit(spec, database, ["sm_121"], tmp_path / "pack", **arguments)


def test_a_trial_of_another_template_does_not_win(spec: Spec, tmp_path: Path) -> None:
    winner = changed_default(spec, **SMALL)
    trials = [*proven_trials(spec, "h8_p1", winner)]
    trials[2] = replace(trials[2], source_sha256="f" * 64)
    url = make_database(tmp_path / "tuning.sqlite", trials)
    table = pack_from_database(spec, url, ["sm_120"], ["h8_p1"]).manifest.dispatch["sm_120"]["h8_p1"]
    assert {bucket.variant for bucket in table.buckets} == {table.default}


def test_an_unproven_candidate_does_not_win_beside_proven_ones(spec: Spec, tmp_path: Path) -> None:
    faster = make_trial(spec, "h8_p1", changed_default(spec, **SMALL), 1.0, checked_on="", relative_error=None)
    url = make_database(tmp_path / "tuning.sqlite", [*proven_trials(spec, "h8_p1", spec.default), faster])
    table = pack_from_database(spec, url, ["sm_120"], ["h8_p1"]).manifest.dispatch["sm_120"]["h8_p1"]
    assert {bucket.variant for bucket in table.buckets} == {table.default}


def test_a_layout_without_trials_has_the_default_only(spec: Spec, tmp_path: Path) -> None:
    url = make_database(tmp_path / "tuning.sqlite", proven_trials(spec, "h8_p1", spec.default))
    tables = pack_from_database(spec, url, ["sm_120"], LAYOUTS).manifest.dispatch["sm_120"]
    assert (len(tables["h8_p1"].buckets), len(tables["h8_p64"].buckets)) == (4, 0)


def test_a_pack_from_a_database_has_sources_and_no_cubins(spec: Spec, tmp_path: Path) -> None:
    pack = sources_only_pack(spec, tmp_path)
    assert {name.split("/")[0] for name in pack.files} == {"sources"}
    assert pack.where.startswith("sqlite:///")


@pytest.mark.parametrize(
    ("version", "arch", "cuda"),
    [("13.0.88", "sm_120", (13, 0)), ("12.9.1", "sm_120", (12, 9)), ("12.9.1", "sm_90", (12, 0))],
)
def test_the_smallest_driver(toolchain: Toolchain, version: str, arch: str, cuda: tuple[int, int]) -> None:
    packed = packed_arch(arch, replace(toolchain, nvcc_version=version))
    assert packed.min_cuda == cuda
    assert packed.min_driver
