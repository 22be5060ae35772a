"""ARCHITECTURE.md's layer table, enforced: imports go down, the runtime stays light, modules stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kgen"
TABLE_ROW = re.compile(r"^\| (\d+|R) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
RUNTIME = "R"
RUNTIME_MAY_IMPORT = {
    "kgen", "kgen.errors", "kgen.targets", "kgen.records", "kgen.resources", "kgen.bf16", "kgen.binding", "kgen.family",
    "kgen.families",
    "kgen.build", "kgen.emulator", "kgen.device",
}  # fmt: skip
HEAVY = ("jinja2", "optuna", "sqlalchemy", "alembic", "yaml", "pydantic", "typer", "rich")
DISCOVERY = ("kgen.family", "kgen.families")  # the folder that is searched; its __init__ is empty
MOST_MODULE_LINES, MOST_FAMILY_LINES = 400, 700  # a family is one file
MOST_BODY_LINES = 50


def read_layers(text: str) -> dict[str, str]:
    """Module (or package, which stands for all in it) -> layer, from the table in ARCHITECTURE.md."""
    return {name: layer for layer, names, _ in TABLE_ROW.findall(text) for name in re.findall(r"`([\w.]+)`", names)}


def layer_of(module: str, layers: Mapping[str, str]) -> str | None:
    """The layer of a module: its own row, or that of the nearest package above it that has one."""
    if module == "kgen":
        return "0"
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return layers.get(module)


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_run_time(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every kgen module that the code imports, wherever it does so; imports for type checkers alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide the layer"
            yield from _imported_from(node)
        yield from imports_at_run_time(node)


def _imported_from(node: ast.ImportFrom) -> Iterator[tuple[str, int]]:
    assert node.module
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        path = ROOT / inner.replace(".", "/")
        is_module = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
        yield (inner if is_module else node.module), node.lineno


def layer_faults(module: str, source: str, layers: Mapping[str, str]) -> list[str]:
    """What is wrong with a module's imports, one line each."""
    own = layer_of(module, layers)
    if own is None:
        return [f"{module}: not in the layer table of ARCHITECTURE.md"]
    faults = []
    for imported, line in imports_at_run_time(ast.parse(source)):
        if not imported.startswith("kgen.") or (module, imported) == DISCOVERY:
            continue
        other = layer_of(imported, layers)
        if other is None:
            faults.append(f"{module}:{line} imports {imported}, which the layer table lacks")
        elif own == RUNTIME and other != RUNTIME and not _within(imported, RUNTIME_MAY_IMPORT):
            faults.append(f"{module}:{line} imports {imported}: not for the runtime")
        elif own != RUNTIME and _rank(other) > _rank(own):
            faults.append(f"{module}:{line} (layer {own}) imports {imported} (layer {other})")
    return faults


def _within(module: str, allowed: set[str]) -> bool:
    return module in allowed or any(module.startswith(f"{name}.") for name in allowed - {"kgen"})


def _rank(layer: str) -> float:
    return 4.5 if layer == RUNTIME else float(layer)


def layers() -> dict[str, str]:
    return read_layers((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    assert layer_faults(module_name(path), path.read_text(encoding="utf-8"), layers()) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("kgen.space", "import kgen.tune", "kgen.space:1 (layer 3) imports kgen.tune (layer 6)"),
        ("kgen.space", "def f():\n    from kgen import tune", "kgen.space:2 (layer 3) imports kgen.tune (layer 6)"),
        ("kgen.runtime.launch", "from kgen.render import Source", "kgen.runtime.launch:1 imports kgen.render: not for"),
        ("kgen.nowhere", "", "kgen.nowhere: not in the layer table"),
        ("kgen.tune", "import kgen.nowhere", "kgen.tune:1 imports kgen.nowhere, which the layer table lacks"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str, fault: str) -> None:
    faults = layer_faults(module, source, layers())
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_imports_for_type_checkers_are_free() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kgen.tune import tune\n"
    assert layer_faults("kgen.space", source, layers()) == []


def test_the_table_names_only_what_exists() -> None:
    for name in layers():
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), name


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_runtime_imports_nothing_of_the_tuner() -> None:
    statement = "import kgen.runtime; from kgen.family import families; assert 'verify_mla' in families()"
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_the_purity_check_sees_a_heavy_import() -> None:
    assert "yaml" in loaded_by("import kgen.runtime, yaml")


def long_functions(source: str) -> list[str]:
    """Functions with too long a body; flags and docstrings do not count."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if body_lines(node) > MOST_BODY_LINES]


def body_lines(function: ast.FunctionDef) -> int:
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_and_functions_stay_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    most = MOST_FAMILY_LINES if path.parent.name == "families" else MOST_MODULE_LINES
    assert len(source.splitlines()) <= most
    assert long_functions(source) == []


def test_a_long_function_is_found() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * MOST_BODY_LINES) == []
    assert long_functions("def f():\n" + "    x = 1\n" * (MOST_BODY_LINES + 1)) == ["f"]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_names_say_what_is_inside(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc", "manager"}
