"""YAML files as plain data with the line of every node, and errors that name those lines.

YAML is data here: the YAML 1.2 core scalars (so ``on`` is text and ``5e-3`` a number), no tags, no objects.
Aliases and merge keys are resolved, within limits that keep a hostile file from using up the machine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kgen.errors import SpecError

FieldPath = tuple[str | int, ...]
"""Where a node is: keys and list indices from the top."""

_MAX_BYTES = 256 * 1024
_MAX_NODES = 20_000
_MAX_DEPTH = 16
_MAX_INT = 2**63 - 1
_INTEGER = re.compile(r"^[-+]?[0-9]+$", re.ASCII)
_NUMBER = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", re.ASCII)


class SpecFileError(SpecError):
    """All that is wrong with a file, by line, one error a line; the attributes of `SpecError` are of the first."""

    def __init__(self, errors: Sequence[SpecError]) -> None:
        self.errors = tuple(sorted(errors, key=_file_and_line))
        first = self.errors[0]
        super().__init__(first.where, first.wrong, seen=first.seen, remedy=first.remedy)
        self.args = ("\n".join(str(error) for error in self.errors),)


def _file_and_line(error: SpecError) -> tuple[str, int]:
    label, _, line = error.where.rpartition(":")
    return (label, int(line)) if line.isdecimal() else (error.where, 0)


@dataclass(frozen=True)
class LocatedYaml:
    """The content of one YAML file. Lines count from 1; a list or mapping is where its key is."""

    label: str
    content: bytes
    data: Any
    key_lines: dict[FieldPath, int]
    value_lines: dict[FieldPath, int]

    def where(self, path: FieldPath, *, of_key: bool = False) -> str:
        """``file:line`` of a node, or of its nearest ancestor in the file."""
        for end in range(len(path), -1, -1):
            lines = self.key_lines if of_key and path[:end] in self.key_lines else self.value_lines
            if path[:end] in lines:
                return f"{self.label}:{lines[path[:end]]}"
        return f"{self.label}:1"

    def error(
        self, path: FieldPath, wrong: str, *, seen: str = "", remedy: str = "", of_key: bool = False
    ) -> SpecError:
        """A SpecError at a node, with its field path before ``wrong``."""
        named = f"{spell(path)}: {wrong}" if path else wrong
        return SpecError(self.where(path, of_key=of_key), named, seen=seen, remedy=remedy)


def spell(path: FieldPath) -> str:
    """A field path as people write it: ``tunables.tile_m[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shorten(value: Any) -> str:
    """What was seen, as YAML people know it, in at most 60 characters."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def suggest(name: object, known: Iterable[object]) -> str:
    """A remedy for an unknown name: the nearest known one, or all of them."""
    names = [str(item) for item in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}" if names else ""


def label_of(path: Path) -> str:
    """The path as a person would give it: relative where it is below the current folder."""
    absolute = Path.cwd() / path
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


def read_located(path: Path) -> LocatedYaml:
    """Reads a YAML file.

    Raises SpecFileError when it cannot be read, is not UTF-8, is empty, too large or not YAML; and for tags,
    duplicate keys, and keys that are neither text nor integers.
    """
    label = label_of(path)
    content = _read_bytes(path, label)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wrong, seen = "not UTF-8 text", f"byte 0x{content[error.start]:02x}"
        raise SpecFileError([SpecError(f"{label}:{line}", wrong, seen=seen, remedy="save the file as UTF-8")]) from None
    try:
        node = _CoreLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label}:{mark.line + 1}" if mark else label
        raise SpecFileError([SpecError(where, "not YAML", seen=str(error.problem or error.context))]) from None
    except yaml.YAMLError as error:
        raise SpecFileError([SpecError(label, "not YAML", seen=str(error).splitlines()[0])]) from None
    if node is None:
        raise SpecFileError([SpecError(label, "the file is empty")])
    walk = _Walk(label)
    data = walk.value(node, ())
    if walk.errors:
        raise SpecFileError(walk.errors)
    return LocatedYaml(label, content, data, walk.key_lines, walk.value_lines)


def _read_bytes(path: Path, label: str) -> bytes:
    try:
        if not path.is_file():
            wrong = "not a file" if path.exists() else "no such file"
            raise SpecFileError([SpecError(label, wrong)])
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecFileError([SpecError(label, "cannot be read", seen=reason)]) from None
    if len(content) > _MAX_BYTES:
        raise SpecFileError([SpecError(label, "the file is too large", remedy=f"at most {_MAX_BYTES // 1024} KiB")])
    return content


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes with the scalars of the YAML 1.2 core schema, at a limited depth."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_MAX_DEPTH} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", _INTEGER.pattern, list("-+0123456789")),
    ("float", _NUMBER.pattern, list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(_pattern, re.ASCII), _first)


@dataclass
class _Walk:
    """Turns composed nodes into plain data, notes their lines, and collects what is wrong."""

    label: str
    errors: list[SpecError] = field(default_factory=list)
    key_lines: dict[FieldPath, int] = field(default_factory=dict)
    value_lines: dict[FieldPath, int] = field(default_factory=dict)
    nodes: int = 0
    open_nodes: list[yaml.Node] = field(default_factory=list)

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        """The data of one node, its children included."""
        self._enter(node, path)
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            self.value_lines.setdefault(path, line)
            return self._scalar(node, path)
        self.value_lines.setdefault(path, self.key_lines.get(path, line))
        self.open_nodes.append(node)
        kind = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        if node.tag != _TAG + kind:
            self._add(node, path, f"the tag {node.tag!r} is not allowed", "write plain data")
        if isinstance(node, yaml.SequenceNode):
            data: Any = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            data = self._mapping(node, path)
        self.open_nodes.pop()
        return data

    def _mapping(self, node: yaml.Node, path: FieldPath) -> dict[str | int, Any]:
        data: dict[str | int, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self.value(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if isinstance(key, bool) or not isinstance(key, str | int):
                self._add(key_node, path, "a key must be text or an integer")
            elif key in data:
                first = self.key_lines[(*path, key)]
                self._add(key_node, (*path, key), "the key appears twice", f"the first is on line {first}")
            else:
                self.key_lines.setdefault((*path, key), key_node.start_mark.line + 1)
                data[key] = self.value(value_node, (*path, key))
        for source in self._merge_sources(node, path):
            self._enter(source, path)
            self.open_nodes.append(source)
            for key, value in self._mapping(source, path).items():
                data.setdefault(key, value)
            self.open_nodes.pop()
        return data

    def _merge_sources(self, node: yaml.Node, path: FieldPath) -> Iterator[yaml.Node]:
        """The mappings that ``<<`` names, most important first."""
        for key_node, value_node in node.value:
            if key_node.tag != _TAG + "merge":
                continue
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if isinstance(source, yaml.MappingNode):
                    yield source
                else:
                    self._add(key_node, path, "'<<' must name a mapping, or a list of mappings")

    def _enter(self, node: yaml.Node, path: FieldPath) -> None:
        """Counts a node; SpecFileError where going on would not end, or not soon."""
        self.nodes += 1
        if any(node is outer for outer in self.open_nodes):
            wrong = "an alias contains itself"
        elif self.nodes > _MAX_NODES:
            wrong = f"more than {_MAX_NODES} values once aliases are expanded"
        elif len(self.open_nodes) > _MAX_DEPTH:
            wrong = f"nested deeper than {_MAX_DEPTH} levels"
        else:
            return
        top = path[:1]  # the node itself is where its anchor is
        where = f"{self.label}:{self.key_lines.get(top, node.start_mark.line + 1)}"
        raise SpecFileError([SpecError(where, f"{spell(top)}: {wrong}" if top else wrong)])

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind in ("str", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == "int" and _INTEGER.match(text):
            if len(text) < 40 and abs(int(text)) <= _MAX_INT:
                return int(text)
            self._add(node, path, "the integer does not fit 64 bits")
        elif kind == "float" and _NUMBER.match(text):
            return float(text)
        else:
            self._add(node, path, f"the tag {node.tag!r} is not allowed", "write plain data")
        return None

    def _error(self, node: yaml.Node, path: FieldPath, wrong: str, remedy: str = "") -> SpecError:
        named = f"{spell(path)}: {wrong}" if path else wrong
        return SpecError(f"{self.label}:{node.start_mark.line + 1}", named, remedy=remedy)

    def _add(self, node: yaml.Node, path: FieldPath, wrong: str, remedy: str = "") -> None:
        self.errors.append(self._error(node, path, wrong, remedy))
