"""The command line as a whole: help that teaches, one JSON document, exit codes, no tracebacks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kgen.cli
from kgen.cli import app, console, main
from kgen.cli.options import first_gpu
from kgen.errors import DeviceError, KgenError

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "tune", "emit", "render", "check", "bench", "why", "doctor", "show winners", "show trials", "show summary",
    "show rejected", "show resources", "show space", "db export", "db import", "db merge", "db migrate", "db reject",
    "pack verify", "defrag demo", "coverage",
)  # fmt: skip


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every runnable command with its name."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


FOUND = list(commands())


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``kgen`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kgen", *words], capture_output=True, text=True, check=False, **options
    )


def test_the_commands_are_those_that_are_documented() -> None:
    assert sorted(name for name, _ in commands()) == sorted(COMMANDS)


@pytest.mark.parametrize(("name", "command"), FOUND, ids=[name for name, _ in FOUND])
def test_help_has_a_summary_examples_and_where_results_go(name: str, command: Any) -> None:
    paragraphs = command.help.split("\n\n")
    assert len(paragraphs[0]) <= 100
    assert f"\n  kgen {name}" in command.help
    assert "stdout" in paragraphs[-1] or " go to " in paragraphs[-1] or " goes to " in paragraphs[-1]
    for parameter in command.params:
        assert parameter.name == "help" or parameter.help, f"{name}: {parameter.name}"


@pytest.mark.parametrize(("name", "command"), FOUND, ids=[name for name, _ in FOUND])
def test_every_command_takes_json(name: str, command: Any) -> None:
    assert any("--json" in parameter.opts for parameter in command.params), name


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    code = "import sys, kgen.cli; print(*(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(loaded.stdout.split()).isdisjoint({"numpy", "torch", "optuna", "sqlalchemy", "jinja2", "yaml", "rich"})


QUICK = (
    ("render", "--layout", "h8_p1"),
    ("render", "--oracle"),
    ("show", "space", "--layout", "h8_p1"),
    ("show", "winners", "--db", "{db}"),
    ("show", "trials", "--db", "{db}"),
    ("show", "summary", "--db", "{db}"),
    ("db", "migrate", "--db", "{db}"),
    ("db", "export", "--db", "{db}", "--out", "{folder}/text"),
    ("db", "merge", "{db}", "--db", "{folder}/other.sqlite"),
    ("show", "winners", "--db", "{folder}/none.sqlite"),
    ("show", "space", "--layout", "h9"),
    ("pack", "verify", "{folder}"),
    ("tune", "--bogus"),
)


@pytest.fixture
def filled(tmp_path: Path) -> dict[str, str]:
    """Names for command lines: a database without trials, and a folder."""
    from kgen.db import TuningDatabase

    TuningDatabase.open(str(tmp_path / "empty.sqlite")).close()
    return {"db": str(tmp_path / "empty.sqlite"), "folder": str(tmp_path)}


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_with_json_stdout_is_one_document(
    words: tuple[str, ...], filled: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    code = main([*(word.format(**filled) for word in words), "--json"])
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert (code == 0) == ("error" not in document)
    if code:
        assert set(document["error"]) == {"where", "wrong", "seen", "remedy"}
        assert err.startswith("error: ")


def test_a_second_document_would_be_seen(capfd: pytest.CaptureFixture[str]) -> None:
    console.write_json({"one": 1})
    console.write_json({"two": 2})
    with pytest.raises(json.JSONDecodeError):
        json.loads(capfd.readouterr().out)


HOSTILE = (
    (("bogus",), 2, "No such command 'bogus'"),
    (("tune", "--trials", "x"), 2, "--trials"),
    (("tune", "--trials", "0"), 2, "--trials"),
    (("tune", "--time-budget", "soon"), 2, "not a duration, 'soon'; write it like 90s"),
    (("tune", "--spec", "nope.yaml"), 2, "no such spec, 'nope.yaml'; give a path, or one of: kv_defrag.yaml"),
    (("tune", "--spec", "{folder}"), 2, "{folder}"),
    (("tune", "--layout", "h9"), 2, "no such layout, 'h9'"),
    (("tune", "--target", "sm_70"), 2, "no such target, 'sm_70'"),
    (("tune", "--db", "postgresql://host/db"), 2, "postgresql"),
    (("render", "--set", "tile_m"), 2, "not NAME=VALUE, 'tile_m'"),
    (("render", "--set", "tile_q=1"), 2, "no such tunable, 'tile_q'; known: algorithm, tile_m"),
    (("render", "--set", "tile_m=33"), 2, "does not list this value of tile_m, 33; one of: 16, 32, 64"),
    (("render", "--oracle", "--default"), 2, "--oracle: excludes --default"),
    (("render", "--out", "{folder}"), 1, "{folder}: cannot be written"),
    (("check", "--layout", "h9"), 2, "no such layout"),
    (("check", "--default", "--device", "cuda"), 2, "need neither --pack nor --device cuda"),
    (("check", "--pack", "{folder}"), 2, "{folder}"),
    (("why", "--pack", "{folder}", "--batch", "4"), 2, "{folder}"),
    (("why", "--batch", "0"), 2, "--batch"),
    (("bench", "--at", "depth=3"), 2, "no such workload axis, 'depth'; known: batch, nodes, prefix"),
    (("bench", "--at", "batch"), 2, "not AXIS=N, 'batch'"),
    (("show", "trials", "--db", "{folder}/none.sqlite"), 2, "no such database"),
    (("show", "trials", "--db", "{text}"), 2, "{text}"),
    (("db", "import", "{folder}/none.jsonl", "--db", "{folder}/new.sqlite"), 2, "none.jsonl"),
    (("db", "import", "{text}", "--db", "{folder}/new.sqlite"), 2, "{text}:1"),
    (("db", "merge", "{folder}/none.sqlite", "--db", "{folder}/new.sqlite"), 2, "none.sqlite"),
    (("db", "migrate", "--db", "{text}"), 2, "{text}"),
    (("emit", "--db", "{folder}/none.sqlite", "--out", "{folder}/pack"), 2, "no such database"),
    (("emit", "--target", "sm_70"), 2, "no such target"),
    (("pack", "verify", "{folder}/none"), 2, "is no kernel pack"),
    (("pack", "verify", "{long}"), 2, "{long}: cannot be read, File name too long"),
    (("show", "space", "--spec", "{long}"), 2, "cannot be used, File name too long"),
    (("db", "migrate", "--db", "{long}"), 2, "{long}: cannot be used, File name too long"),
    (("db", "import", "{deep}", "--db", "{folder}/new.sqlite"), 2, "{deep}:1: not the text form"),
    (("coverage", "--capture", "{deep}"), 2, "{deep}:1: is no record of a captured shape"),
)


@pytest.mark.parametrize(("words", "code", "says"), HOSTILE, ids=[" ".join(words) for words, _, _ in HOSTILE])
def test_a_mistake_is_one_line_and_an_exit_code(
    words: tuple[str, ...], code: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("not a database, not JSON\n" * 100, encoding="utf-8")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n", encoding="utf-8")
    names = {"folder": tmp_path, "text": tmp_path / "text.txt", "deep": tmp_path / "deep.jsonl", "long": "x" * 300}
    assert main([word.format(**names) for word in words]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert says.format(**names) in line


def test_a_gpu_command_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(ordinal: int) -> None:
        raise DeviceError("CUDA driver", "not found")

    monkeypatch.setattr("kgen.device.Device.open", no_driver)
    with pytest.raises(DeviceError, match=r"^GPU: this needs one and none is usable, CUDA driver: not found; see kgen"):
        first_gpu()


def test_a_machine_without_room_is_no_bug(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kgen.doctor.examine", _raise(OSError(errno.ENOMEM, "Cannot allocate memory")))
    assert main(["doctor"]) == 1
    said = "error: operating system: refused what kgen needs, Cannot allocate memory\n"
    assert capfd.readouterr().err == said


def _raise(error: BaseException) -> Any:
    def command() -> None:
        raise error

    return command


def test_a_bug_is_one_line_and_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kgen.doctor.examine", _raise(ZeroDivisionError("division by zero")))
    assert main(["doctor"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: this is a bug in kgen: ZeroDivisionError: division by zero; run 'kgen --debug")
    assert "Traceback" not in err
    assert main(["--debug", "doctor"]) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (KgenError("here", "broken"), 1)])
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.doctor.examine", _raise(error))
    assert main(["doctor"]) == code


def test_control_c_exits_130_without_a_traceback() -> None:
    code = (
        "import sys, time, kgen.cli, kgen.doctor\n"
        "kgen.doctor.examine = lambda: [print('on', flush=True), time.sleep(60)]\n"
        "sys.exit(kgen.cli.main(['doctor']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted; what was done is kept\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "kgen", "render"], cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_colour_only_on_a_terminal() -> None:
    assert "\033" not in run("show", "space", "--layout", "h9", cwd=ROOT).stderr
    assert "\033[1;31merror:" in _on_terminal({})
    assert "\033" not in _on_terminal({"NO_COLOR": "1"})


def _on_terminal(extra: dict[str, str]) -> str:
    """stderr of a failing command that believes to be on a terminal."""
    leader, follower = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    words = [sys.executable, "-m", "kgen", "bogus"]
    subprocess.run(words, cwd=ROOT, stderr=follower, env=environment | {"TERM": "xterm"} | extra, check=False)
    os.close(follower)
    text = os.read(leader, 10_000).decode()
    os.close(leader)
    return text


def test_the_version() -> None:
    done = run("--version", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"kgen {kgen.__version__}\n")


def test_a_piped_table_is_not_cropped(capfd: pytest.CaptureFixture[str]) -> None:
    console.write_table(["name", "time (us)"], [("x" * 150, "1.5"), ("y", "12.0")])
    lines = capfd.readouterr().out.splitlines()
    assert lines[1] == "x" * 150 + "        1.5"
    assert lines[2] == "y" + " " * 149 + "       12.0"


def test_progress_without_a_terminal_is_a_line_a_tenth(capfd: pytest.CaptureFixture[str]) -> None:
    with console.progress("work") as advance:
        for number in range(101):
            advance(number, 100)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "work: 0/100"
    assert lines[-1] == "work: 100/100"
    assert len(lines) == 11


@pytest.mark.parametrize("words", [("show", "space"), ("show", "space", "--json"), ("bogus", "--json")])
def test_a_closed_stdout_is_no_bug(words: tuple[str, ...]) -> None:
    command = f'exec "$0" -m kgen {" ".join(words)} >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "bogus" in words else 0)
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


def test_an_empty_database_flag_is_refused() -> None:
    done = run("show", "trials", "--db", "")
    assert (done.returncode, done.stderr) == (2, "error: --db: is empty; name a file, or leave it out\n")


def test_render_refuses_what_cannot_compile() -> None:
    done = run("render", "--set", "tile_m=16")
    assert done.returncode == 2
    assert "tiles divide evenly among warps" in done.stderr
