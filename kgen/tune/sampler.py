"""Which candidates to try next: all of a small space, else what optuna's TPE proposes inside the constraints."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from kgen.family import Candidate, Value
from kgen.space import Space, candidate_key

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Proposal:
    """A candidate to try. ``trial`` is the number of the optuna trial that waits for its score, if one does."""

    candidate: Candidate
    trial: int | None = None


class Sampler(Protocol):
    """Proposes every candidate at most once, feasible ones only."""

    def ask(self, count: int) -> list[Proposal]:
        """The next candidates, at most ``count``; none when the space is used up."""

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """The score of a proposal, lower is better; None if it failed."""


def make_sampler(space: Space, first: Sequence[Candidate], *, trials: int, seed: int) -> Sampler:
    """A sampler over ``space`` that proposes the feasible ones of ``first`` first, in their order.

    A space of no more than ``trials`` candidates is listed in its own order.
    """
    once = {candidate_key(candidate): candidate for candidate in first if candidate in space}
    first = list(once.values())
    if len(space.candidates) > trials:
        return TpeSampler(space, first, seed)
    return ListSampler([*first, *(candidate for candidate in space.candidates if candidate not in first)])


class ListSampler:
    """The candidates as they are listed."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._left = list(candidates)

    def ask(self, count: int) -> list[Proposal]:
        """The next ``count`` candidates of the list."""
        taken, self._left = self._left[:count], self._left[count:]
        return [Proposal(candidate) for candidate in taken]

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """A list is not swayed by scores."""


class TpeSampler:
    """optuna's TPE, told the scores in the order of its proposals.

    A tunable is asked among the values that some feasible candidate has after the values drawn before it, so that
    no infeasible point can be drawn. optuna wants one set of choices a parameter: the parameter's name says which.
    Where a candidate is drawn again, its nearest neighbour that was not yet drawn is tried in its place.
    """

    def __init__(self, space: Space, first: Sequence[Candidate], seed: int) -> None:
        self._space = space
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        for candidate in first:
            self._study.enqueue_trial(self._parameters(candidate))
        shuffled = list(space.candidates)
        random.Random(seed).shuffle(shuffled)  # noqa: S311 - which neighbour is taken must not follow the listing
        self._left = {candidate_key(candidate): candidate for candidate in shuffled}

    def ask(self, count: int) -> list[Proposal]:
        """What TPE draws with the scores told so far."""
        return [self._ask_one() for _ in range(min(count, len(self._left)))]

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Let later draws know: a failed candidate counts as worse than every score."""
        state = TrialState.PRUNED if score is None else TrialState.COMPLETE  # TPE ranks a pruned trial last
        if proposal.trial is not None:
            self._study.tell(proposal.trial, score, state=state)
            return
        parameters, distributions = self._parameters(proposal.candidate), self._distributions(proposal.candidate)
        self._study.add_trial(create_trial(state=state, value=score, params=parameters, distributions=distributions))

    def _ask_one(self) -> Proposal:
        trial = self._study.ask()
        drawn: dict[str, Value] = {}
        for tunable in self._space.tunables:
            choices = self._space.choices(drawn)
            drawn[tunable] = cast("Value", trial.suggest_categorical(_parameter_name(tunable, choices), choices))
        candidate = self._left.pop(candidate_key(drawn), None)
        if candidate is not None:
            return Proposal(candidate, trial.number)
        self._study.tell(trial.number, state=TrialState.FAIL)
        return Proposal(self._left.pop(self._nearest_left(drawn)))

    def _nearest_left(self, drawn: Candidate) -> str:
        def distance(key: str) -> int:
            return sum(self._left[key][tunable] != value for tunable, value in drawn.items())

        return min(self._left, key=distance)

    def _parameters(self, candidate: Candidate) -> dict[str, Value]:
        return {_parameter_name(tunable, choices): candidate[tunable] for tunable, choices in self._choices(candidate)}

    def _distributions(self, candidate: Candidate) -> dict[str, BaseDistribution]:
        return {
            _parameter_name(tunable, choices): CategoricalDistribution(choices)
            for tunable, choices in self._choices(candidate)
        }

    def _choices(self, candidate: Candidate) -> Iterator[tuple[str, tuple[Value, ...]]]:
        """Each tunable with what it was chosen among, given those before it."""
        partial: dict[str, Value] = {}
        for tunable in self._space.tunables:
            yield tunable, self._space.choices(partial)
            partial[tunable] = candidate[tunable]


def _parameter_name(tunable: str, choices: Sequence[Value]) -> str:
    return f"{tunable} of {', '.join(map(str, choices))}"
