"""Tuning: what is tried, what is recorded, what wins; with doubles, and once with compiler and emulator."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tuning_doubles import Heard, Log, PretendedEvaluator, Task, install, options, pretended_us, small_spec

from kgen.db import TuningDatabase
from kgen.db.reject import reject, rejected, undo
from kgen.errors import BuildError, DeviceError, EmulatorError, InputError
from kgen.family import Candidate, Value
from kgen.records import PointTime, TrialRecord
from kgen.render import render
from kgen.space import Space, candidate_key, enumerate_space
from kgen.tune import TuneReport, run, tune, tuning
from kgen.tune import prove as proving
from kgen.tune.evaluate import Variant
from kgen.tune.prove import MIN_GAIN, Proof, _interrupts_held, _pool, choose_few
from kgen.tune.sampler import ListSampler, Sampler, TpeSampler, make_sampler

Tuned = Callable[..., tuple[TuneReport, Log]]
SPEC = small_spec()
LAYOUT = SPEC.layouts["h8_p1"]
SPACE = enumerate_space(SPEC, "h8_p1", SPEC.targets["sm_120"])


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Tunes with doubles; the database is ``name`` in the test's folder."""

    def go(name: str, log: Log | None = None, **changes: Any) -> tuple[TuneReport, Log]:
        log = log or Log()
        install(monkeypatch, log)
        return tune(options(tmp_path / name, **changes), Heard()), log

    return go


def stored(path: Path) -> list[TrialRecord]:
    with TuningDatabase.open(f"sqlite:///{path}", read_only=True) as database:
        return database.trials()


# The sampler


def ask_all(sampler: Sampler, count: int) -> list[Candidate]:
    asked: list[Candidate] = []
    while len(asked) < count and (proposals := sampler.ask(min(8, count - len(asked)))):
        asked += [proposal.candidate for proposal in proposals]
        for proposal in proposals:
            failed = proposal.candidate["stages"] == 4
            sampler.tell(proposal, None if failed else pretended_us("h8_p1", proposal.candidate, 0))
    return asked


@dataclass(frozen=True)
class LeakySpace(Space):
    """A space whose choices forget the constraints."""

    def choices(self, partial: Candidate) -> tuple[Value, ...]:
        return tuple(self.tunables[list(self.tunables)[len(partial)]])


def all_feasible(asked: list[Candidate]) -> bool:
    return all(candidate in SPACE for candidate in asked)


def drawn_by(space: Space, count: int) -> list[Candidate]:
    """What optuna itself was asked and answered, before anything is put right."""
    sampler = TpeSampler(space, [SPEC.default], seed=0)
    ask_all(sampler, count)
    tunables = list(space.tunables)
    return [
        {tunables[place]: value for place, value in enumerate(trial.params.values())} for trial in sampler._study.trials
    ]


def test_only_feasible_points_reach_optuna() -> None:
    assert all_feasible(drawn_by(SPACE, 60))


def test_an_infeasible_point_that_reaches_optuna_is_seen() -> None:
    leaky = LeakySpace(**{name: getattr(SPACE, name) for name in Space.__dataclass_fields__})
    assert not all_feasible(drawn_by(leaky, 20))


def test_nothing_is_proposed_twice_and_the_default_comes_first() -> None:
    asked = ask_all(make_sampler(SPACE, [SPEC.default], trials=120, seed=0), 120)
    assert asked[0] == SPEC.default
    assert len({candidate_key(candidate) for candidate in asked}) == 120


def test_the_seed_decides() -> None:
    def asked(seed: int) -> list[Candidate]:
        return ask_all(make_sampler(SPACE, [SPEC.default], trials=40, seed=seed), 40)

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)


def test_tpe_can_use_the_space_up() -> None:
    few = replace(SPACE, candidates=SPACE.candidates[:20])
    asked = ask_all(TpeSampler(few, [SPACE.candidates[3]], seed=0), 99)
    assert sorted(map(candidate_key, asked)) == sorted(map(candidate_key, few.candidates))


def test_a_small_space_is_listed() -> None:
    sampler = make_sampler(SPACE, [SPEC.default], trials=len(SPACE.candidates), seed=0)
    assert isinstance(sampler, ListSampler)
    asked = ask_all(sampler, 10_000)
    assert asked[0] == SPEC.default
    assert len(asked) == len(SPACE.candidates)
    assert all_feasible(asked)


# Runs


def winner_list(report: TuneReport) -> list[dict[str, Any]]:
    found = report.as_json()["winners"]
    assert isinstance(found, list)
    return found


def test_same_seed_same_winners_on_two_databases(tuned: Tuned) -> None:
    first, _ = tuned("a.db")
    second, _ = tuned("b.db")
    assert winner_list(first) == winner_list(second) != []
    assert winner_list(first) != winner_list(tuned("c.db", seed=5)[0])


def test_jobs_do_not_change_what_is_tried(tuned: Tuned) -> None:
    assert tuned("a.db", jobs=1)[1].evaluated == tuned("b.db", jobs=4)[1].evaluated


def test_a_batch_that_follows_jobs_is_seen(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tuned("a.db", jobs=1)[1].evaluated
    monkeypatch.setattr(run, "BATCH", 4)
    assert tuned("b.db", jobs=4)[1].evaluated != one


def test_every_trial_is_a_row_with_all_times(tuned: Tuned, tmp_path: Path) -> None:
    report, log = tuned("a.db")
    rows = stored(tmp_path / "a.db")
    tried = [row for row in rows if not row.checked_on]
    assert [(row.layout_name, candidate_key(row.candidate)) for row in tried] == log.evaluated
    assert len(tried) == 2 * (20 + 1) == sum(report.statuses.values())
    assert report.new_trials == len(rows)
    assert {row.status for row in tried} == {"ok", "compile_error"}
    points = [dict(item.point) for item in SPEC.workload.points]
    assert all([time.point for time in row.times] == points for row in tried if row.status == "ok")
    assert {candidate_key(row.candidate) for row in tried} >= {candidate_key(SPEC.default), candidate_key(SPEC.oracle)}


def test_a_second_run_does_nothing_again(tuned: Tuned, tmp_path: Path) -> None:
    first, _ = tuned("a.db")
    rows = stored(tmp_path / "a.db")
    second, log = tuned("a.db")
    assert (log.evaluated, log.proven, second.new_trials) == ([], [], 0)
    assert winner_list(second) == winner_list(first)
    assert second.statuses == first.statuses
    assert stored(tmp_path / "a.db") == rows


def test_winners_are_proven_and_few(tuned: Tuned) -> None:
    report, log = tuned("a.db", proofs=3)
    assert report.winners
    assert {winner.checked_on for winner in report.winners} == {"emulator"}
    for layout_name in ("h8_p1", "h16_p64"):
        assert 2 <= sum(place[0] == layout_name for place in log.proven) <= 4  # at most 3, and the oracle
    assert {winner.layout_name for winner in report.winners} == {"h8_p1", "h16_p64"}


def test_a_wrong_winner_is_recorded_and_replaced(tuned: Tuned, tmp_path: Path) -> None:
    right, _ = tuned("a.db")
    best = {winner.source_sha256 for winner in right.winners}

    def is_wrong(variant: Variant) -> bool:
        return variant.source.sha256 in best

    report, _ = tuned("b.db", Log(is_wrong=is_wrong))
    assert {winner.source_sha256 for winner in report.winners}.isdisjoint(best)
    assert len(report.winners) == len(right.winners)
    wrong = [row for row in stored(tmp_path / "b.db") if row.status == "wrong_result"]
    assert {row.source_sha256 for row in wrong} == best
    assert all(row.checked_on == "emulator" and row.reason == "pretended" and not row.times for row in wrong)
    assert tuned("b.db", Log(is_wrong=is_wrong))[1].proven == []


def test_the_order_in_which_trials_end_changes_nothing(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = tuned("a.db")
    in_order = PretendedEvaluator.evaluate

    def last_first(self: PretendedEvaluator, variants: Sequence[Variant]) -> Iterator[TrialRecord]:
        yield from reversed(list(in_order(self, variants)))

    monkeypatch.setattr(PretendedEvaluator, "evaluate", last_first)
    second, _ = tuned("b.db")
    assert winner_list(second) == winner_list(first)
    assert second.statuses == first.statuses


def test_a_rejected_source_is_never_tried_again(tuned: Tuned, tmp_path: Path) -> None:
    first, _ = tuned("a.db")
    best = {winner.source_name for winner in first.winners} - {render(SPEC.family, SPEC.default, LAYOUT).name}
    with TuningDatabase.open(f"sqlite:///{tmp_path / 'a.db'}") as database:
        for name in best:
            reject(database, name, "seen wrong by hand")
        out = set(rejected(database))
    second, log = tuned("a.db")
    assert {winner.source_name for winner in second.winners}.isdisjoint(best)
    assert len(second.winners) == len(first.winners)
    third, log = tuned("a.db", seed=1, trials=10_000)
    layouts = dict.fromkeys(("h8_p1", "h16_p64"))
    candidates = [candidate for candidate in SPACE.candidates if is_of(candidate, out)]
    assert candidates
    assert not {(name, candidate_key(candidate)) for name in layouts for candidate in candidates} & set(log.evaluated)
    assert {winner.source_name for winner in third.winners}.isdisjoint(best)
    named = {"tries": candidates[:1]}
    with pytest.raises(
        InputError, match=r"^candidate .* of .*verify_mla.yaml: its source .* is rejected, seen wrong by"
    ):
        tuned("a.db", **named)


def is_of(candidate: Candidate, sources: set[str]) -> bool:
    return render(SPEC.family, candidate, LAYOUT).sha256 in sources


def test_a_rejected_default_or_oracle_stops_tuning(tuned: Tuned, tmp_path: Path) -> None:
    tuned("a.db", trials=1)
    for candidate in (SPEC.default, SPEC.oracle):
        name = render(SPEC.family, candidate, LAYOUT).name
        with TuningDatabase.open(f"sqlite:///{tmp_path / 'a.db'}") as database:
            reject(database, name, "why")
            with pytest.raises(InputError, match=f"{name} is rejected, why; choose another, or run: kgen db reject"):
                tuned("a.db")
            undo(database, name, "no")
        assert tuned("a.db", trials=1)[0].winners


def test_what_the_machine_stopped_is_tried_again(tuned: Tuned) -> None:
    _, log = tuned("a.db", Log(does_not_compile=lambda candidate: True, how_it_fails="compile_timeout"))
    assert log.proven == []
    report, _ = tuned("a.db")
    assert winner_list(report) == winner_list(tuned("b.db")[0])


def test_a_proof_that_the_machine_stops_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool dies, and so does the process in which it is done again."""
    monkeypatch.setattr(proving, "_build_for_emulator", lambda study, variants: None)
    monkeypatch.setattr(proving, "_task", lambda study, signum, resident: Task(signum))
    found: list[Proof] = []

    def prove_one(signum: int) -> None:
        study: Any = SimpleNamespace(jobs=1)
        variants: Any = {("layout", "source"): (signum, 1)}
        proving.prove(study, variants, lambda place, proof: found.append(proof))

    prove_one(signal.SIGSEGV)
    assert found == [Proof(False, None, "the emulator's process died, exit code -11")]
    with pytest.raises(EmulatorError, match=r"^some_kernel: the process that proves it was killed; free memory"):
        prove_one(signal.SIGKILL)
    with pytest.raises(BuildError, match=r"^cache: full, really; free some$"):
        prove_one(0)
    assert len(found) == 1


def test_ctrl_c_keeps_what_there_is(tuned: Tuned, tmp_path: Path) -> None:
    def interrupt(number: int) -> None:
        if number == 17:
            raise KeyboardInterrupt

    report, _ = tuned("a.db", Log(before_trial=interrupt))
    assert report.interrupted
    assert len(stored(tmp_path / "a.db")) == 17
    resumed, log = tuned("a.db")
    assert not resumed.interrupted
    assert len(log.evaluated) == 2 * 21 - 17
    assert winner_list(resumed) == winner_list(tuned("b.db")[0])


@pytest.mark.parametrize("moment", ["starting", "proving"])
def test_ctrl_c_ends_the_processes_of_proofs_without_a_word(moment: str) -> None:
    script = Path(__file__).with_name("slow_proofs.py")
    env = os.environ | {"PYTHONPATH": str(script.parent.parent)}
    tuning = subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert tuning.stdout is not None
    while tuning.stdout.readline() != f"{moment}\n":
        assert tuning.poll() is None
    os.killpg(tuning.pid, signal.SIGINT)  # as a terminal does
    _, err = tuning.communicate(timeout=30)  # to the end of what any of the processes may say
    assert (tuning.returncode, err) == (130, "")


def test_proofs_from_a_thread_leave_the_processes_of_others_alone() -> None:
    def prove_and_fail() -> None:
        with _pool(1) as pool:
            with _interrupts_held():
                pool.submit(time.sleep, 60)
            raise LookupError

    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    with ThreadPoolExecutor(1) as threads, pytest.raises(LookupError):
        threads.submit(prove_and_fail).result(timeout=30)
    assert other.is_alive()
    other.kill()
    other.join()


def test_kill_9_loses_at_most_the_trial_in_flight(tuned: Tuned, tmp_path: Path) -> None:
    script = Path(__file__).with_name("tuning_doubles.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent.parent), str(script.parent)])}
    killed = subprocess.run([sys.executable, str(script), str(tmp_path / "a.db"), "31"], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(stored(tmp_path / "a.db")) == 31
    resumed, log = tuned("a.db")
    assert len(log.evaluated) == 2 * 21 - 31
    assert winner_list(resumed) == winner_list(tuned("b.db")[0])


def test_the_time_budget_ends_the_asking_not_the_proofs(tuned: Tuned) -> None:
    report, log = tuned("a.db", time_budget_s=1e-9)
    assert report.budget_spent
    assert len(log.evaluated) == 2 * (run.BATCH + 1)
    assert report.winners


def test_what_the_listener_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Log(does_not_compile=lambda candidate: candidate not in (SPEC.default, SPEC.oracle)))
    heard = Heard()
    tune(options(tmp_path / "a.db", layouts=("h8_p1",), trials=2), heard)
    assert heard.lines == [
        "started 3 model: asked for: nothing is timed, results are modelled",
        "phase trying candidates for h8_p1",
        "trial ok",  # the default, and the oracle
        "trial ok",
        "trial compile_error",
        "phase proving winners in the emulator",
        "proofs 0/2",
        "proofs 1/2",
        "proofs 2/2",
        "finished",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "--trials: must be at least 1, 0"),
        ({"jobs": 0}, "--jobs: must be at least 1, 0"),
        ({"seed": -1}, "--seed: must not be negative, -1"),
        ({"time_budget_s": 0.0}, "--time-budget: must be more than nothing, 0 s"),
        ({"layouts": ("h8_p2",)}, "no such layout, 'h8_p2'; did you mean 'h8_p1'?"),
        ({"target": "sm_12"}, "no such target, 'sm_12'; did you mean 'sm_121'?"),
        ({"envelope": "sm_9"}, "no such target, 'sm_9'; did you mean 'sm_90'?"),
    ],
)
def test_wrong_input_is_named(changes: dict[str, Any], message: str, tuned: Tuned, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        tuned("a.db", **changes)
    assert str(error.value).endswith(message)
    assert not (tmp_path / "a.db").exists()


# Choosing an evaluator


def no_driver() -> int:
    raise DeviceError("CUDA driver", "not found")


def test_auto_without_a_gpu_models_and_says_why(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "device_count", no_driver)
    report, _ = tuned("a.db", evaluator="auto", trials=1)
    assert (report.evaluator, report.why) == ("model", "CUDA driver: not found: results are modelled")
    with pytest.raises(DeviceError, match="no usable GPU"):
        tuned("b.db", evaluator="device")


@pytest.mark.parametrize(
    ("target", "envelope", "why"),
    [
        ("sm_90", None, "a GPU of sm_90 is here: results are measured"),
        ("sm_90", "sm_120", "a GPU of sm_90 is here: results are measured"),
        (
            "sm_120",
            None,
            "a GPU of sm_90 is here, not sm_120: results are a proxy inside the limits of sm_120",
        ),
    ],
)
def test_auto_with_a_gpu_times_on_it(
    target: str, envelope: str | None, why: str, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        arch = "sm_90"

        @classmethod
        def open(cls) -> Gpu:
            return cls()

        def close(self) -> None:
            pass

    monkeypatch.setattr(tuning, "device_count", lambda: 1)
    monkeypatch.setattr(tuning, "Device", Gpu)
    monkeypatch.setattr(tuning, "_make_evaluator", lambda study, arch, stack: PretendedEvaluator(study, Log()))
    report, _ = tuned("a.db", target=target, envelope=envelope, evaluator="auto", trials=1)
    assert report.why == why


# Few winners that serve all points


def trial(name: str, *times_us: float) -> TrialRecord:
    times = tuple(PointTime({"n": number}, time, time, time) for number, time in enumerate(times_us))
    return TrialRecord(
        "run", "family", "spec", "layout", {}, "sm_120", "sm_120", "sm_120", {"name": name}, name, name, "", "",
        "model", "modelled", 1, "ok", times=times,
    )  # fmt: skip


def chosen(most: int, *trials: TrialRecord) -> list[str]:
    return [record.source_name for record in choose_few(trials, [0.5, 0.5], {"name": "default"}, most)]


def test_few_candidates_are_chosen_greedily() -> None:
    default, left, right = trial("default", 10, 10), trial("left", 1, 20), trial("right", 20, 2)
    assert chosen(3, right, default, left) == ["default", "left", "right"]
    assert chosen(2, right, default, left) == ["default", "left"]
    assert chosen(2, left, right) == ["left", "right"]
    assert chosen(3) == []


def test_a_gain_too_small_is_not_worth_a_proof() -> None:
    small, enough = 10 * (1 - MIN_GAIN), 10 * (1 - 3 * MIN_GAIN)
    assert chosen(3, trial("default", 10, 10), trial("b", small, 10)) == ["default"]
    assert chosen(3, trial("default", 10, 10), trial("b", enough, 10)) == ["default", "b"]


def test_what_the_model_cannot_tell_apart_is_decided_by_likeness_to_the_default() -> None:
    def staged(stages: int, time_us: float) -> TrialRecord:
        candidate = {"name": "tuned" if time_us < 10 else "default", "stages": stages}
        return replace(trial(f"s{stages}", time_us, time_us), candidate=candidate)

    default = staged(2, 10.0)
    alike = replace(staged(2, 5.001), source_name="alike")
    few = choose_few([staged(1, 5.0), default, alike], [0.5, 0.5], default.candidate, 3)
    assert [record.source_name for record in few] == ["s2", "alike"]
    faster = choose_few([staged(1, 4.9), default, alike], [0.5, 0.5], default.candidate, 3)
    assert [record.source_name for record in faster] == ["s2", "s1"]


# The real thing


def test_two_candidates_for_real(tmp_path: Path) -> None:
    settings = options(tmp_path / "a.db", layouts=("h8_p1",), trials=2)
    report = tune(settings, Heard())
    assert dict(report.statuses) == {"ok": 3}
    assert len(report.winners) == len(SPEC.workload.points)
    assert {(winner.evidence, winner.checked_on) for winner in report.winners} == {("modelled", "emulator")}
    assert all(0 < (winner.relative_error or 0) < 5e-3 and winner.registers for winner in report.winners)
    for winner, floor_us in zip(report.winners, report.floors_us["h8_p1"], strict=True):
        assert winner.time_us > floor_us
    again = tune(settings, Heard())
    assert (again.new_trials, winner_list(again)) == (0, winner_list(report))
    assert again.wall_s < 10
