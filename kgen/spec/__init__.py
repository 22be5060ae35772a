"""Specs: what to generate, for which chips and shapes, and how to judge it. Read from YAML, checked, frozen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kgen.errors import InputError, SpecError
from kgen.family import Candidate, Family, Layout, Point, Tolerance, Value, find_family
from kgen.resources import SPECS
from kgen.spec.checks import check_sections
from kgen.spec.file import SpecFile, TargetFile, WorkloadSection, structure_errors, target_from
from kgen.spec.located_yaml import LocatedYaml, SpecFileError, label_of, read_located, suggest
from kgen.targets import Target


@dataclass(frozen=True)
class WeightedPoint:
    """A shape to time and its share of the score; the shares of a workload add up to 1."""

    point: Point
    weight: float


@dataclass(frozen=True)
class Workload:
    """Which shapes matter: values of every axis, in the order of ``Family.axes``, and weights (1 where left out).

    ``of_points``, where there is any, has the weight of each combination, and those of the axes do not count.
    """

    axes: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, Mapping[int, float]]
    layouts: Mapping[str, float]
    of_points: Mapping[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def points(self) -> tuple[WeightedPoint, ...]:
        """Every combination of axis values, the last axis fastest; its weight, or the product of its axes' weights."""
        points = [dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())]
        raw = [self.of_points.get(tuple(point.values())) or self._of_axes(point) for point in points]
        return tuple(WeightedPoint(point, weight / sum(raw)) for point, weight in zip(points, raw, strict=True))

    def _of_axes(self, point: Point) -> float:
        return math.prod(self.weights[axis][value] for axis, value in point.items())


@dataclass(frozen=True)
class Spec:
    """One checked spec file. ``sha256`` is of the file's bytes and those of its target files.

    ``tunables`` keeps the file's order; ``default`` has a value for every tunable, ``oracle`` those it needs.
    """

    path: Path
    sha256: str
    family: Family
    targets: Mapping[str, Target]
    layouts: Mapping[str, Layout]
    tunables: Mapping[str, tuple[Value, ...]]
    default: Candidate
    oracle: Candidate
    workload: Workload
    tolerances: Mapping[str, Tolerance]

    @property
    def label(self) -> str:
        """The file's path for messages."""
        return label_of(self.path)

    def layout(self, name: str) -> Layout:
        """The layout called ``name``; InputError with the known ones otherwise."""
        if name not in self.layouts:
            remedy = suggest(name, self.layouts)
            raise InputError("--layout", f"{self.label} has no such layout", seen=repr(name), remedy=remedy)
        return self.layouts[name]

    def target(self, name: str) -> Target:
        """The target called ``name``; InputError with the known ones otherwise."""
        if name not in self.targets:
            remedy = suggest(name, self.targets)
            raise InputError("--target", f"{self.label} has no such target", seen=repr(name), remedy=remedy)
        return self.targets[name]


def load_spec(path: Path) -> Spec:
    """Reads and checks a spec file and its target files.

    Target files are ``targets/<name>.yaml`` beside the spec, then among the shipped specs. Raises SpecFileError
    (a SpecError) with everything that is wrong, each with ``file:line``, field, what was seen, what would be right.
    """
    file = read_located(path)
    problems = structure_errors(SpecFile, file)
    errors = [error for _, error in problems]
    sections = _sound_sections(file, {error_path[0] if error_path else None for error_path, _ in problems})
    targets = _load_targets(file, path, sections.get("targets", []), errors)
    errors += check_sections(file, sections, {name: target for name, (target, _) in targets.items()})
    if errors:
        raise SpecFileError(errors)
    return _build(path, file, SpecFile.model_validate(file.data), targets)


def _sound_sections(file: LocatedYaml, broken: set[Any]) -> dict[str, Any]:
    """The top-level values that the models have nothing against."""
    if None in broken:
        return {}
    sections: dict[str, Any] = {name: file.data[name] for name in SpecFile.model_fields if name not in broken}
    if "workload" in sections:
        sections["workload"] = WorkloadSection.model_validate(sections["workload"])
    return sections


def _load_targets(
    file: LocatedYaml, path: Path, names: Sequence[str], errors: list[SpecError]
) -> dict[str, tuple[Target, LocatedYaml]]:
    """The targets that could be read; the errors of the others go to ``errors``."""
    targets = {}
    for index, name in enumerate(names):
        folders = (path.parent / "targets", SPECS / "targets")
        found = next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").exists()), None)
        if found is None:
            known = sorted({item.stem for folder in folders for item in folder.glob("*.yaml")})
            remedy = f"its figures are due in targets/{name}.yaml; {suggest(name, known)}"
            errors.append(file.error(("targets", index), "no such target", seen=repr(name), remedy=remedy))
            continue
        try:
            target_file = read_located(found)
        except SpecFileError as error:
            errors += error.errors
            continue
        problems = structure_errors(TargetFile, target_file)
        errors += [error for _, error in problems]
        if not problems:
            targets[name] = (target_from(name, target_file.data), target_file)
    return targets


def _build(path: Path, file: LocatedYaml, model: SpecFile, targets: Mapping[str, tuple[Target, LocatedYaml]]) -> Spec:
    digest = hashlib.sha256()
    for content in (file.content, *(target_file.content for _, target_file in targets.values())):
        digest.update(len(content).to_bytes(8, "little") + content)
    family = find_family(model.family, file.label)
    given, fields = model.workload, list(next(iter(model.layouts.values())))
    weights = {axis: given.weights.get(axis, {}) for axis in family.axes}
    workload = Workload(
        axes={axis: tuple(given.axes[axis]) for axis in family.axes},
        weights={axis: {value: weights[axis].get(value, 1.0) for value in given.axes[axis]} for axis in family.axes},
        layouts={name: given.layouts.get(name, 1.0) for name in model.layouts},
    )
    return Spec(
        path=path,
        sha256=digest.hexdigest(),
        family=family,
        targets={name: target for name, (target, _) in targets.items()},
        layouts={name: {field: layout[field] for field in fields} for name, layout in model.layouts.items()},
        tunables={name: tuple(values) for name, values in model.tunables.items()},
        default={name: model.default[name] for name in model.tunables},
        oracle=model.oracle,
        workload=workload,
        tolerances={name: Tolerance(item.relative_l2, item.max_abs) for name, item in model.tolerances.items()},
    )
