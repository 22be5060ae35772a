"""The shape of spec and target files: pydantic models, their JSON schema, and their errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from kgen.errors import SpecError
from kgen.spec.located_yaml import FieldPath, LocatedYaml, shorten, suggest
from kgen.targets import Target

_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*$"
_NAME_RULE = "must be a name of letters, digits and underscores"


def _plain_value(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("plain_value", "must be an integer or a name")
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("plain_value", "must not be negative")
    if isinstance(value, str) and not re.fullmatch(_NAME_PATTERN, value):
        raise PydanticCustomError("plain_value", _NAME_RULE)
    return value


Name = Annotated[str, Field(pattern=_NAME_PATTERN)]
PlainValue = Annotated[Annotated[int, Field(ge=0)] | Name, BeforeValidator(_plain_value)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ToleranceSection(_Section):
    """How far an output may be from the float64 reference."""

    relative_l2: Positive = Field(description="Largest relative L2 error of the whole output.")
    max_abs: Positive = Field(description="Largest absolute error of any element.")


class WorkloadSection(_Section):
    """The shapes to tune for: every combination of the axes, weighted."""

    axes: dict[Name, Annotated[list[Count], Field(min_length=1)]] = Field(
        description="The values of each workload axis of the family."
    )
    weights: dict[Name, dict[int, Positive]] = Field(
        default_factory=dict, description="Weights of axis values, 1 where left out; a point's weight is their product."
    )
    layouts: dict[Name, Positive] = Field(
        default_factory=dict, description="Weights of layouts, 1 where left out, for summaries over layouts."
    )


class SpecFile(_Section):
    """What to generate and tune: one kernel family, its targets, head layouts, tunables and workload."""

    family: str = Field(description="A kernel family: the name of a module in kgen/families.")
    targets: list[Name] = Field(min_length=1, description="Architectures; figures are in targets/<name>.yaml.")
    layouts: dict[Name, Annotated[dict[Name, PlainValue], Field(min_length=1)]] = Field(
        min_length=1, description="Head layouts by name. All have the same fields."
    )
    tunables: dict[Name, Annotated[list[PlainValue], Field(min_length=1)]] = Field(
        min_length=1, description="The values to try for each tunable. The order is the sampler's."
    )
    default: dict[Name, PlainValue] = Field(description="The hand-picked candidate: one value for every tunable.")
    oracle: dict[Name, PlainValue] = Field(description="The naive candidate that tuned ones are compared with.")
    workload: WorkloadSection
    tolerances: dict[Name, ToleranceSection] = Field(description="One for every output of the family.")


def _target_fields() -> dict[str, Any]:
    plain: dict[Any, Any] = {int: Count, float: Positive}
    fields: dict[str, Any] = {name: (plain.get(kind), ...) for name, kind in get_type_hints(Target).items()}
    fields["compute_capability"] = (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)],
        ...,
    )
    del fields["name"]
    return fields


TargetFile: type[BaseModel] = create_model("TargetFile", __base__=_Section, **_target_fields())
"""The figures of one `Target`, without its name, which is the file's."""

_SECTIONS: Mapping[object, type[BaseModel]] = {"workload": WorkloadSection, "tolerances": ToleranceSection}
_RULES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be text",
    "string_pattern_mismatch": _NAME_RULE,
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "list_type": "must be a list",
    "too_short": "too few items",
    "too_long": "too many items",
    "invalid_key": "a key must be text",
    "missing": "the key is required",
}


def target_from(name: str, data: Mapping[str, Any]) -> Target:
    """The target of validated file data."""
    major, minor = data["compute_capability"]
    return Target(name=name, **{**data, "compute_capability": (major, minor)})


def structure_errors(model: type[BaseModel], yaml_file: LocatedYaml) -> list[tuple[FieldPath, SpecError]]:
    """What the model has against the file's data, each with its path; empty when nothing."""
    try:
        model.model_validate(yaml_file.data)
    except ValidationError as error:
        return [(detail["loc"], _plain_error(model, detail, yaml_file)) for detail in error.errors(include_url=False)]
    return []


def _plain_error(model: type[BaseModel], detail: ErrorDetails, yaml_file: LocatedYaml) -> SpecError:
    kind, path = detail["type"], detail["loc"]
    of_key = path[-1:] == ("[key]",)
    if of_key:
        path = path[:-1]
    if kind == "extra_forbidden":
        section = _SECTIONS.get(path[0], model) if len(path) > 1 else model
        present = _at(yaml_file.data, path[:-1])
        free = [name for name in section.model_fields if name not in present]
        remedy = suggest(path[-1], free or section.model_fields)
        return yaml_file.error(path, "unknown key", remedy=remedy, of_key=True)
    if kind == "missing":
        return yaml_file.error(path, _RULES[kind])
    limits = detail.get("ctx", {})
    if "gt" in limits or "ge" in limits:
        wrong = "must be greater than 0" if "gt" in limits else "must not be negative"
    else:
        wrong = _RULES.get(kind, detail["msg"])
    return yaml_file.error(path, f"the key {wrong}" if of_key else wrong, seen=shorten(detail["input"]), of_key=of_key)


def _at(data: Any, path: FieldPath) -> Any:
    for part in path:
        data = data[part]
    return data


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of spec files, for editors; specs/kernel_spec.schema.json is its text."""
    schema = SpecFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kgen kernel spec"}
