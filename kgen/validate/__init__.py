"""Proving a built kernel right: every output of every case against the family's float64 reference.

A result counts only if every element was written (outputs start as NaN, so does the workspace), every
error is inside the tolerances, no input was changed, nothing was written around the arrays, and the same
launches, replayed after the lengths changed in place, are right again. All cases run as the target would run
them and under the family's other plans (`Family.proving_plans`), whose blocks are longer or more; calls that may share
what they make, alone and sharing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kgen.build import build
from kgen.emulator import EmulatedModule
from kgen.errors import BuildError, EmulatorError
from kgen.family import Array, Candidate, Case, Family, Layout, Plan, Tolerance
from kgen.validate.launchers import Call, EmulatorLauncher, Launcher, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from kgen.build.toolchain import Toolchain
    from kgen.render import Source

REPLAY_SEED = 1000  # added to a case's seed for the call that replays its launches


@dataclass(frozen=True)
class CaseResult:
    """One output of one call. ``max_abs`` and ``relative_l2`` are infinite where elements are missing or not finite."""

    name: str
    seed: int
    output: str
    relative_l2: float
    max_abs: float
    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel is right. ``worst`` is the result with the largest relative error, failures first."""

    ok: bool
    cases: tuple[CaseResult, ...]
    worst: CaseResult | None
    reason: str


def compare(found: Array, reference: Array, tolerance: Tolerance, *, name: str, seed: int, output: str) -> CaseResult:
    """Compare one output (float64) with its reference: ||found - reference|| / ||reference||, and max |difference|.

    Elements whose reference is infinite (the log-sum-exp of a row that sees nothing) must be equal.
    """

    def failed(reason: str) -> CaseResult:
        return CaseResult(name, seed, output, np.inf, np.inf, False, f"{output} of {name}, seed {seed}: {reason}")

    if found.shape != reference.shape:
        return failed(f"has shape {found.shape}, its reference {reference.shape}")
    missing = np.isnan(found)
    if missing.any():
        return failed(
            f"{int(missing.sum())} of {found.size} elements are NaN or never written, first {_first(missing)}"
        )
    finite = np.isfinite(reference)
    unequal = ~finite & (found != reference)
    if unequal.any():
        return failed(f"{int(unequal.sum())} elements must be infinite and are not, first {_first(unequal)}")
    difference = np.abs(found[finite] - reference[finite])
    max_abs = float(difference.max(initial=0.0))
    error, scale = float(np.linalg.norm(difference)), float(np.linalg.norm(reference[finite]))
    relative = error / scale if scale > 0 else (0.0 if error == 0 else np.inf)
    if relative <= tolerance.relative_l2 and max_abs <= tolerance.max_abs:
        return CaseResult(name, seed, output, relative, max_abs, True)
    seen = f"relative L2 error {relative:.3g} (at most {tolerance.relative_l2:g}), "
    seen += f"largest {max_abs:.3g} (at most {tolerance.max_abs:g})"
    reason = f"{output} of {name}, seed {seed}: {seen}"
    return CaseResult(name, seed, output, relative, max_abs, False, reason)


def _first(mask: Array) -> str:
    return str([int(index[0]) for index in np.nonzero(mask)])


def reversed_lengths(case: Case) -> Case:
    """The case with every per-request list in reverse: other lengths, same totals, shapes and capacities."""
    options = {name: value[::-1] if isinstance(value, list) else value for name, value in case.options.items()}
    return Case(f"{case.name}, replayed", options)


@dataclass(frozen=True)
class Problem:
    """One call, what made it, and what it must compute (float64, by output)."""

    case: Case
    seed: int
    call: Call
    reference: Mapping[str, Array]


class Problems:
    """The problems of a family and layout, each made once: references take longer than kernels."""

    def __init__(self, family: Family, layout: Layout) -> None:
        self.family, self.layout = family, layout
        self._made: dict[tuple[str, int], Problem] = {}

    def first(self, case: Case, seed: int) -> Problem:
        """The problem of a case and seed."""
        key = (case.name, seed)
        if key not in self._made:
            inputs = self.family.make_inputs(self.layout, case, seed)
            outputs = self.family.output_arrays(self.layout, case, inputs)
            call = Call(inputs, outputs, self.family.scalars(self.layout, case, inputs))
            self._made[key] = Problem(case, seed, call, self.family.reference(self.layout, case, inputs))
        return self._made[key]

    def replays(self, case: Case, seed: int) -> list[Problem]:
        """What may replay the launches of `first`: other lengths where the parameter struct allows it."""
        first = self.first(case, seed)
        same_lengths = Case(f"{case.name}, again", case.options)
        for other in (reversed_lengths(case), same_lengths):
            problem = self.first(other, seed + REPLAY_SEED)
            if self.family.capacity(other) == self.family.capacity(case) and _struct(problem.call) == _struct(
                first.call
            ):
                return [problem]
        return []


def validate(
    family: Family,
    candidate: Candidate,
    layout: Layout,
    tolerances: Mapping[str, Tolerance],
    launcher: Launcher,
    *,
    target_sms: int,
    resident_blocks: int,
    cases: Sequence[Case] | None = None,
    seeds: Sequence[int] = (0, 1),
    problems: Problems | None = None,
) -> Verdict:
    """Run every case with every seed, stopping at the first failure; with the first seed also replay and other plans.

    An emulator fault is a failed verdict whose reason is the fault's text; CudaError is the caller's, who knows
    whether the process survives it. Validating many candidates of a layout is faster with shared ``problems``.
    """
    problems = problems or Problems(family, layout)
    results: list[CaseResult] = []
    for case in family.cases(layout) if cases is None else cases:
        capacity = family.capacity(case)
        plans = family.proving_plans(candidate, layout, capacity, sms=target_sms, resident_blocks=resident_blocks)
        for run in _runs(case, plans, seeds, problems):
            reason = _run(family, run, tolerances, launcher, results)
            if reason:
                return _verdict(results, reason)
    return _verdict(results, "")


@dataclass(frozen=True)
class _Run:
    """Calls that share one plan's launches, in turn; ``suffix`` tells the plan from the target's in names."""

    plan: Plan
    sequence: Sequence[Problem]
    suffix: str = ""


def _runs(case: Case, plans: Sequence[Plan], seeds: Sequence[int], problems: Problems) -> Iterator[_Run]:
    """All seeds and the replay under the first plan, then the first seed under each of the others.

    The replay is also done where more is launched first: what calls may share has to be made anew.
    """
    sharing = next((plan for plan in plans if len(plan.launches) > len(plans[0].launches)), None)
    for seed in seeds:
        replays = problems.replays(case, seed) if seed == seeds[0] else []
        yield _Run(plans[0], [problems.first(case, seed), *replays])
    for plan in plans[1:] if seeds else ():
        blocks = " + ".join(f"{math.prod(launch.grid)} x {launch.threads}" for launch in plan.launches)
        replays = problems.replays(case, seeds[0]) if plan is sharing else []
        yield _Run(plan, [problems.first(case, seeds[0]), *replays], f" in {blocks} threads")


def _run(
    family: Family, run: _Run, tolerances: Mapping[str, Tolerance], launcher: Launcher, results: list[CaseResult]
) -> str:
    """Run and compare, adding to ``results``; returns what is wrong, or nothing."""
    try:
        outcomes = launcher.run(family, run.plan, [problem.call for problem in run.sequence])
    except EmulatorError as error:
        first = run.sequence[0]
        return f"{first.case.name}{run.suffix}, seed {first.seed}: {error}"
    for problem, outcome in zip(run.sequence, outcomes, strict=True):
        name = problem.case.name + run.suffix
        compared = list(_compare_all(family, problem, outcome, tolerances, name))
        results += compared
        reason = next((result.reason for result in compared if not result.ok), _damage(problem, outcome, name))
        if reason:
            return reason
    return ""


def validate_in_emulator(
    source: Source,
    family: Family,
    candidate: Candidate,
    layout: Layout,
    tolerances: Mapping[str, Tolerance],
    *,
    toolchain: Toolchain,
    cache_dir: Path,
    target_sms: int,
    resident_blocks: int,
    cases: Sequence[Case] | None = None,
    seeds: Sequence[int] = (0, 1),
) -> Verdict:
    """Build one source for the emulator and validate it; one that does not compile fails with its log's error.

    Raises BuildError where the machine stopped the compiler, which is no verdict on the source.
    """
    (built,) = build([source], arch="emulator", toolchain=toolchain, cache_dir=cache_dir, jobs=1)
    if built.stopped:
        remedy = "free memory, or use fewer --jobs, and run it again"
        raise BuildError(source.name, "not built for the emulator", seen=built.reason, remedy=remedy)
    if built.path is None:
        return Verdict(False, (), None, f"{source.name} for the emulator: {built.status}: {built.reason}")
    launcher = EmulatorLauncher(EmulatedModule(built.path))
    return validate(
        family,
        candidate,
        layout,
        tolerances,
        launcher,
        target_sms=target_sms,
        resident_blocks=resident_blocks,
        cases=cases,
        seeds=seeds,
    )


def _struct(call: Call) -> tuple[Mapping[str, int | float], set[str]]:
    """What a captured call has fixed: its scalars, and which arrays it has."""
    arrays = {**call.inputs, **call.outputs}
    return call.scalars, {name for name, array in arrays.items() if array is not None}


def _compare_all(
    family: Family, problem: Problem, outcome: Outcome, tolerances: Mapping[str, Tolerance], name: str
) -> Iterator[CaseResult]:
    for output, array in outcome.outputs.items():
        found = family.as_float(output, array)
        yield compare(
            found,
            problem.reference[output],
            tolerances[output],
            name=name,
            seed=problem.seed,
            output=output,
        )


def _damage(problem: Problem, outcome: Outcome, name: str) -> str:
    where = f"{name}, seed {problem.seed}"
    if outcome.changed_inputs:
        return f"{where}: the kernel changed its inputs: {', '.join(outcome.changed_inputs)}"
    if outcome.broken_guards:
        return f"{where}: the kernel wrote outside of: {', '.join(outcome.broken_guards)}"
    return ""


def _verdict(results: Sequence[CaseResult], reason: str) -> Verdict:
    worst = max(results, key=lambda result: (not result.ok, result.relative_l2), default=None)
    reason = reason or ("" if results else "no output of any case was checked")
    return Verdict(not reason, tuple(results), worst, reason)
