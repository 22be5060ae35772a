"""The `golden` fixture: expected texts in tests/golden, written by ``--update-golden`` and reviewed like code."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str], None]


def pytest_configure() -> None:
    """A shell starts what it runs in the background deaf to Ctrl-C, and so would the processes of tests be."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write expected texts instead of comparing")


def compare_text(path: Path, text: str, *, update: bool) -> None:
    """Fails where the file's text is another one, or where there is no file; writes it with ``update``."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        pytest.fail(f"{path.name} does not exist: run with --update-golden, and review it")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} is stale: run with --update-golden, and review it"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with tests/golden/<test file>/<test name>.txt."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", request.node.name).strip("_")
    path = GOLDEN / request.path.stem / f"{name}.txt"
    update = bool(request.config.getoption("--update-golden"))
    return lambda text: compare_text(path, text, update=update)
