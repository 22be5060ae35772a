"""What must hold between the parts of a spec, beyond the shape of each: names that agree, a default that fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kgen.errors import SpecError
from kgen.family import Candidate, Family, Layout, Value, families
from kgen.spec.file import WorkloadSection
from kgen.spec.located_yaml import FieldPath, LocatedYaml, suggest
from kgen.targets import Target

MAX_CANDIDATES = 1_000_000
MAX_AXIS_VALUE = 1 << 24  # a point's inputs and indices are made for it
MAX_POINTS = 10_000
WEIGHTS = (1e-9, 1e9)  # of an axis value or a layout: products of several, and their sums, stay finite and above 0
_MAX_REPORTED = 8


def violation(family: Family, candidate: Candidate, layout: Layout, target: Target, where: str) -> str | None:
    """Name of the first constraint that a candidate breaks, or None.

    Raises SpecError at ``where`` when the family cannot even evaluate its constraints: a tunable or layout field
    that it needs is missing, or has a value of the wrong kind.
    """
    try:
        return family.violation(candidate, layout, target)
    except KeyError as error:
        wrong = f"family {family.name} needs a tunable or layout field called {error}"
    except (TypeError, ValueError, ArithmeticError) as error:
        wrong = f"family {family.name} cannot use these values: {error}"
    raise SpecError(where, wrong, remedy="compare with a shipped spec of this family")


def check_sections(file: LocatedYaml, sections: Mapping[str, Any], targets: Mapping[str, Target]) -> list[SpecError]:
    """Everything wrong between the sections that are sound in themselves (the others are absent)."""
    checks = _Checks(file, sections)
    errors = [*checks.family_name(), *checks.lists(), *checks.layouts(), *checks.tunables(), *checks.default()]
    errors += [*checks.oracle(), *checks.workload(), *checks.tolerances()]
    if not errors and {"family", "layouts", "default"} <= sections.keys():
        errors += checks.default_fits(targets)
    return errors


def _kind(value: Value) -> str:
    return "an integer" if isinstance(value, int) else "a name"


class _Checks:
    """Each method yields what it finds, and nothing where a section that it needs is absent."""

    def __init__(self, file: LocatedYaml, sections: Mapping[str, Any]) -> None:
        self.error = file.error
        self.where = file.where
        self.sections = sections
        self.family = families().get(sections.get("family", ""))

    def family_name(self) -> Iterator[SpecError]:
        name = self.sections.get("family")
        if name is not None and self.family is None:
            remedy = suggest(name, sorted(families()))
            yield self.error(("family",), "unknown kernel family", seen=repr(name), remedy=remedy)

    def lists(self) -> Iterator[SpecError]:
        """No list may hold a value twice."""
        lists: dict[FieldPath, Sequence[Value]] = {("targets",): self.sections.get("targets", [])}
        lists |= {("tunables", name): values for name, values in self.sections.get("tunables", {}).items()}
        if "workload" in self.sections:
            axes = self.sections["workload"].axes
            lists |= {("workload", "axes", name): values for name, values in axes.items()}
        for path, values in lists.items():
            for index, value in enumerate(values):
                if value in values[:index]:
                    yield self.error((*path, index), "the value appears twice", seen=repr(value))

    def layouts(self) -> Iterator[SpecError]:
        layouts: Mapping[str, Layout] = self.sections.get("layouts", {})
        needed = set(self.family.layout_constants) if self.family else set()
        first: Layout = next(iter(layouts.values()), {})
        uses = Counter(field for layout in layouts.values() for field in layout)
        needed |= {field for field, count in uses.items() if 2 * count >= len(layouts)}
        for name, layout in layouts.items():
            yield from self._names(("layouts", name), layout, needed, "field of a layout")
            problem = self.family.layout_problem(layout) if self.family else None
            if problem and problem[0] in layout:
                yield self.error(("layouts", name, problem[0]), problem[1], seen=problem[2])
            elif problem and problem[0] not in needed:
                yield self.error(("layouts", name), f"{problem[0]} {problem[1]}", seen=f"it is {problem[2]}")
            for field, value in layout.items():
                if field in first and type(value) is not type(first[field]):
                    kind = "an integer" if isinstance(first[field], int) else "a name"
                    yield self.error(
                        ("layouts", name, field), f"must be {kind} as in the first layout", seen=repr(value)
                    )

    def tunables(self) -> Iterator[SpecError]:
        tunables: Mapping[str, Sequence[Value]] = self.sections.get("tunables", {})
        for name, values in tunables.items():
            for index, value in enumerate(values):
                if type(value) is not type(values[0]):
                    wrong = "integers and names are mixed in one tunable"
                    yield self.error(("tunables", name, index), wrong, seen=repr(value))
                elif isinstance(value, int) and value < 1:
                    yield self.error(("tunables", name, index), "must be at least 1", seen=repr(value))
                else:
                    yield from self._known_value(("tunables", name, index), name, value)
        total = math.prod(len(values) for values in tunables.values())
        if total > MAX_CANDIDATES:
            yield self.error(
                ("tunables",),
                "the space is too large",
                seen=f"{total} combinations",
                remedy=f"at most {MAX_CANDIDATES}",
            )

    def default(self) -> Iterator[SpecError]:
        if not {"tunables", "default"} <= self.sections.keys():
            return
        tunables, default = self.sections["tunables"], self.sections["default"]
        yield from self._names(("default",), default, tunables.keys(), "tunable")
        for name, value in default.items():
            if name in tunables and value not in tunables[name]:
                listed = ", ".join(str(item) for item in tunables[name])
                wrong = "the default is not among the tunable's values"
                yield self.error(("default", name), wrong, seen=repr(value), remedy=f"use one of: {listed}")

    def oracle(self) -> Iterator[SpecError]:
        if not {"tunables", "oracle"} <= self.sections.keys():
            return
        tunables, oracle = self.sections["tunables"], self.sections["oracle"]
        if not oracle:
            yield self.error(("oracle",), "is empty", remedy="name the tunables that the oracle kernel needs")
        yield from self._names(("oracle",), oracle, tunables.keys(), "tunable", complete=False)
        for name, value in oracle.items():
            if name in tunables and type(value) is not type(tunables[name][0]):
                yield self.error(("oracle", name), f"must be {_kind(tunables[name][0])}", seen=repr(value))
            elif name in tunables:
                yield from self._known_value(("oracle", name), name, value)

    def workload(self) -> Iterator[SpecError]:
        workload: WorkloadSection | None = self.sections.get("workload")
        if workload is None:
            return
        at = ("workload", "axes")
        if self.family:
            yield from self._names(at, workload.axes, self.family.axes, f"axis of {self.family.name}")
        yield from self._names(("workload", "weights"), workload.weights, workload.axes.keys(), "axis", complete=False)
        for axis, weights in workload.weights.items():
            for value in weights:
                if value not in workload.axes.get(axis, [value]):
                    listed = ", ".join(str(item) for item in workload.axes[axis])
                    yield self.error(
                        ("workload", "weights", axis, value),
                        "no such value on the axis",
                        remedy=f"use one of: {listed}",
                        of_key=True,
                    )
        if "layouts" in self.sections:
            names = self.sections["layouts"].keys()
            yield from self._names(("workload", "layouts"), workload.layouts, names, "layout", complete=False)
        yield from self._axis_values(workload.axes)
        yield from self._weights(workload)
        total = math.prod(len(values) for values in workload.axes.values())
        if total > MAX_POINTS:
            yield self.error(at, "too many points", seen=f"{total} combinations", remedy=f"at most {MAX_POINTS}")

    def _axis_values(self, axes: Mapping[str, Sequence[int]]) -> Iterator[SpecError]:
        for axis, values in axes.items():
            for index, value in enumerate(values):
                if value > MAX_AXIS_VALUE:
                    at = ("workload", "axes", axis, index)
                    yield self.error(at, f"must be at most {MAX_AXIS_VALUE}", seen=str(value))

    def _weights(self, workload: WorkloadSection) -> Iterator[SpecError]:
        least, most = WEIGHTS
        given: dict[FieldPath, float] = {("layouts", name): weight for name, weight in workload.layouts.items()}
        for axis, weights in workload.weights.items():
            given |= {("weights", axis, value): weight for value, weight in weights.items()}
        for path, weight in given.items():
            if not least <= weight <= most:
                yield self.error(("workload", *path), f"must be from {least:g} to {most:g}", seen=f"{weight:g}")

    def tolerances(self) -> Iterator[SpecError]:
        if self.family and "tolerances" in self.sections:
            known = (*self.family.outputs, *self.family.inouts)
            yield from self._names(("tolerances",), self.sections["tolerances"], known, f"output of {self.family.name}")

    def default_fits(self, targets: Mapping[str, Target]) -> Iterator[SpecError]:
        """The default candidate must meet the family's constraints on every target, for every layout."""
        family = self.family
        assert family is not None
        where = self.where(("default",))
        broken: dict[str, list[str]] = {}
        for target in targets.values():
            for name, layout in self.sections["layouts"].items():
                try:
                    rule = violation(family, self.sections["default"], layout, target, where)
                except SpecError as error:
                    yield error
                    return
                if rule:
                    broken.setdefault(rule, []).append(f"{target.name}/{name}")
        for rule, places in broken.items():
            named = ", ".join(places[:_MAX_REPORTED]) + (", ..." if len(places) > _MAX_REPORTED else "")
            yield self.error(
                ("default",),
                f"the default candidate breaks the rule {rule!r}",
                seen=f"on {named}",
                remedy="pick one that fits everywhere",
            )

    def _known_value(self, path: FieldPath, tunable: str, value: Value) -> Iterator[SpecError]:
        """An error for a value that the family's template does not know: another name, or one where a number is due."""
        if self.family is None:
            return
        known = self.family.known_names.get(tunable)
        if known is not None and value not in known:
            wrong, remedy = f"{self.family.name} has no such {tunable}", f"known: {', '.join(known)}"
            yield self.error(path, wrong, seen=repr(value), remedy=remedy)
        elif known is None and not isinstance(value, int):
            yield self.error(path, "must be an integer", seen=repr(value))

    def _names(
        self, path: FieldPath, given: Collection[str], known: Collection[str], what: str, *, complete: bool = True
    ) -> Iterator[SpecError]:
        """Errors for given names that are not known and, where all are needed, for known ones not given."""
        for name in given:
            if name not in known:
                free = [item for item in known if item not in given] or known
                yield self.error((*path, name), f"no such {what}", remedy=suggest(name, sorted(free)), of_key=True)
        for name in sorted(set(known) - set(given)) if complete else ():
            yield self.error((*path, name), f"the {what} is missing")
