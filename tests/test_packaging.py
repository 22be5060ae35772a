"""The wheel: pure Python, complete, and working where the checkout is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, cwd: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder from which neither the checkout nor an editable install of it can be imported."""
    hide = f"import sys; sys.path = [{str(installed)!r}] + [p for p in sys.path if p not in ('', {str(ROOT)!r})]\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", hide + code, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def kgen(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_installed(installed, cwd, "import kgen.cli; sys.exit(kgen.cli.main())", *words)


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        ("templates", "**/*.c*"),
        ("specs", "**/*.yaml"),
        ("tuning_db", "*.jsonl"),
        ("kgen", "**/*.py"),
    ):
        for path in (ROOT / folder).glob(inside):
            name = path.relative_to(ROOT).as_posix()
            assert (name if folder == "kgen" else f"kgen/_data/{name}") in names
    for path in (ROOT / "generated" / "pack").rglob("*.*"):
        assert not path.is_file() or f"kgen/_data/{path.relative_to(ROOT).as_posix()}" in names
    assert all(name.startswith(("kgen/", "kgen-")) for name in names)
    assert not any(name.endswith((".sqlite", ".pyc")) or "__pycache__" in name for name in names)


def test_the_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    done = run_installed(installed, tmp_path, "import kgen.resources; print(kgen.__file__, kgen.resources.ROOT)")
    assert done.stdout.split() == [str(installed / "kgen" / "__init__.py"), str(installed / "kgen" / "_data")]


def test_render_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = kgen(installed, tmp_path, "render", "--spec", "verify_mla.yaml", "--layout", "h8_p1")
    assert done.returncode == 0, done.stderr
    from_checkout = subprocess.run(
        [sys.executable, "-m", "kgen", "render", "--layout", "h8_p1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == from_checkout.stdout


def test_doctor_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = kgen(installed, tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = {item["name"]: item["status"] for item in json.loads(done.stdout)["findings"]}
    assert found["python"] == found["C++ compiler"] == found["emulator"] == "ok"


def test_databases_can_be_made_and_migrated_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "from kgen.db import TuningDatabase; TuningDatabase.open('new.sqlite').close()"
    assert run_installed(installed, tmp_path, code).stderr == ""
    done = kgen(installed, tmp_path, "db", "migrate", "--db", "new.sqlite", "--json")
    assert json.loads(done.stdout)["backup"] is None


def test_outside_a_checkout_the_database_is_in_this_folder(installed: Path, tmp_path: Path) -> None:
    done = kgen(installed, tmp_path, "show", "summary")
    assert done.returncode == 2
    assert done.stderr.startswith("error: tuning.sqlite: no such database")


def test_the_core_is_light() -> None:
    assert not any(re.match(r"torch|cuda|nvidia", name) for name in PROJECT["dependencies"])
    assert any(name.startswith("torch") for name in PROJECT["optional-dependencies"]["gpu"])


def test_constraints_fit_the_bounds_and_pin_everything() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    for entry in (*PROJECT["dependencies"], *extras["test"], *extras["nvcc"]):
        requirement = Requirement(entry)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), entry


def readme_command(text: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*)\n```\n<!-- end -->", text)
    assert found, name
    return found[1]


@pytest.mark.parametrize(
    ("name", "ends_with"), [("tune-command", "kgen tune --spec verify_mla.yaml"), ("test-command", "pytest")]
)
def test_readme_has_one_command_for_each_job(name: str, ends_with: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = readme_command(text, name)
    assert command.endswith(f" && {ends_with}")
    assert "-c requirements/constraints.txt" in command


def test_ci_runs_the_test_command_of_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.search(r"^command=\$\((.*)\)$", script, re.MULTILINE)
    assert extract
    done = subprocess.run(["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert done.stdout == readme_command(text, "test-command") + "\n"


DOCUMENTS = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md")) if ".venv" not in path.parts]


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative Markdown links that lead nowhere."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if not (folder / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert broken_links(text, (ROOT / document).parent) == []


def test_a_broken_link_is_found() -> None:
    assert broken_links("[a](README.md) [b](nowhere.md#x) [c](https://example.org)", ROOT) == ["nowhere.md"]
