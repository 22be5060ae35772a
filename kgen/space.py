"""The feasible candidates of one layout on one target, enumerated before anything samples or compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from kgen.errors import InputError
from kgen.family import Candidate, Value
from kgen.spec import Spec
from kgen.spec.checks import violation
from kgen.spec.located_yaml import suggest
from kgen.targets import Target

_Tree = dict[Value, "_Tree"]


class InfeasibleError(InputError):
    """A candidate breaks one of its family's constraints; ``rule`` is the constraint's name."""

    def __init__(self, where: str, rule: str, *, seen: str) -> None:
        self.rule = rule
        super().__init__(where, f"the candidate breaks the rule {rule!r}", seen=seen)


@dataclass(frozen=True)
class Space:
    """What may be tried: ``candidates`` in the order of the spec's tunables, the last one fastest.

    ``rejected`` counts the other combinations by the first constraint that each breaks; ``total`` is all of them.
    """

    layout_name: str
    target_name: str
    tunables: Mapping[str, tuple[Value, ...]]
    candidates: tuple[Candidate, ...]
    rejected: Mapping[str, int]
    total: int

    @cached_property
    def _tree(self) -> _Tree:
        tree: _Tree = {}
        for candidate in self.candidates:
            branch = tree
            for name in self.tunables:
                branch = branch.setdefault(candidate[name], {})
        return tree

    def choices(self, partial: Candidate) -> tuple[Value, ...]:
        """Values of the next tunable that still lead to a candidate, in the spec's order.

        ``partial`` has a feasible value for each of the first tunables, and none for the rest. A sampler that
        asks for every tunable in turn and picks among the choices can only arrive at a candidate.
        """
        branch, names = self._tree, list(self.tunables)
        for name in names[: len(partial)]:
            if name not in partial:
                raise InputError("choices", "tunables are decided in order", seen=f"no {name} yet")
            if partial[name] not in branch:
                seen = f"{name}={partial[name]} after {candidate_key(partial)}"
                raise InputError("choices", "no candidate has these values", seen=seen)
            branch = branch[partial[name]]
        return tuple(branch)

    def __contains__(self, candidate: Candidate) -> bool:
        branch: _Tree | None = self._tree
        for name in self.tunables:
            branch = branch.get(candidate[name]) if branch is not None and name in candidate else None
        return branch is not None and len(candidate) == len(self.tunables)


def candidate_key(candidate: Candidate) -> str:
    """One text per candidate, whatever the order of its tunables: ``stages=2,tile_m=64,...``."""
    return ",".join(f"{name}={candidate[name]}" for name in sorted(candidate))


def enumerate_space(spec: Spec, layout_name: str, target: Target) -> Space:
    """All combinations of the spec's tunables that meet the family's constraints.

    Raises InputError for an unknown layout, and when no combination fits, with the constraints that reject them.
    """
    layout = spec.layout(layout_name)
    candidates: list[Candidate] = []
    rejected: Counter[str] = Counter()
    where = spec.label
    for candidate in _combinations(spec):
        rule = violation(spec.family, candidate, layout, target, where)
        if rule is None:
            candidates.append(candidate)
        else:
            rejected[rule] += 1
    total = len(candidates) + rejected.total()
    reasons = dict(rejected.most_common())
    if not candidates:
        listed = ", ".join(f"{count} {rule!r}" for rule, count in reasons.items())
        wrong = f"no candidate of layout {layout_name} fits {target.name} (0 of {total})"
        raise InputError(where, wrong, seen=f"rejected by: {listed}", remedy="widen the tunables")
    return Space(layout_name, target.name, spec.tunables, tuple(candidates), reasons, total)


def check_candidate(spec: Spec, candidate: Candidate, layout_name: str, target: Target) -> None:
    """Whether a candidate may be built: in the spec's space, or the spec's oracle, and within the target's limits.

    Raises InputError for unknown, missing or unlisted values, InfeasibleError for a broken constraint.
    """
    layout = spec.layout(layout_name)
    where = f"candidate {candidate_key(candidate)}"
    if dict(candidate) != dict(spec.oracle):
        _check_values(spec, candidate, where)
    rule = violation(spec.family, candidate, layout, target, spec.label)
    if rule is not None:
        raise InfeasibleError(where, rule, seen=f"layout {layout_name} on {target.name}")


def _check_values(spec: Spec, candidate: Candidate, where: str) -> None:
    for name, value in candidate.items():
        if name not in spec.tunables:
            raise InputError(where, "no such tunable", seen=repr(name), remedy=suggest(name, spec.tunables))
        if value not in spec.tunables[name]:
            listed = ", ".join(str(item) for item in spec.tunables[name])
            raise InputError(where, f"{name} has no such value", seen=repr(value), remedy=f"use one of: {listed}")
    missing = [name for name in spec.tunables if name not in candidate]
    if missing:
        raise InputError(where, "tunables are missing", seen=", ".join(missing))


def _combinations(spec: Spec) -> Iterator[Candidate]:
    for values in product(*spec.tunables.values()):
        yield dict(zip(spec.tunables, values, strict=True))
