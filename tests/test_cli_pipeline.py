"""From a spec to a dispatched, checked kernel with nothing but commands; each prints one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kgen.cli import main

POINT = ("--layout", "h8_p1", "--batch", "4", "--nodes", "16", "--prefix", "16384")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which two candidates of one layout were tuned and packed."""
    path = tmp_path_factory.mktemp("pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", str(path / "cache"))
        yield path


def run(folder: Path, capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON document of a command that must succeed."""
    code = main([*words, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_the_pipeline(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    database, pack = str(folder / "tuning.sqlite"), str(folder / "pack")
    tune = ("tune", "--layout", "h8_p1", "--trials", "2", "--evaluator", "model", "--db", database)
    tuned = run(folder, capfd, *tune)
    assert len(tuned["winners"]) == 80
    assert {winner["evidence"] for winner in tuned["winners"]} == {"modelled"}
    assert {winner["checked_on"] for winner in tuned["winners"]} == {"emulator"}
    again = run(folder, capfd, *tune)
    assert (again["winners"], again["new_trials"]) == (tuned["winners"], 0)

    shown = run(folder, capfd, "show", "winners", "--layout", "h8_p1", "--db", database)
    assert [item["time_us"] for item in shown["winners"]] == [item["time_us"] for item in tuned["winners"]]
    trials = run(folder, capfd, "show", "trials", "--layout", "h8_p1", "--db", database)["trials"]
    assert {trial["status"] for trial in trials} == {"ok"}

    emitted = run(folder, capfd, "emit", "--layout", "h8_p1", "--db", database, "--out", pack)
    assert emitted["targets"] == ["sm_120"]
    verified = run(folder, capfd, "pack", "verify", pack, "--rebuild", "--fail-if-stale")
    assert (verified["ok"], verified["report"]["not_rebuilt"]) == (True, [])

    from_pack = run(folder, capfd, "why", *POINT, "--pack", pack)
    assert from_pack["match"]["how"] == "exact"
    (expected,) = (
        winner for winner in tuned["winners"] if winner["point"] == {"batch": 4, "nodes": 16, "prefix": 16384}
    )
    assert (from_pack["source"], from_pack["candidate"]) == (expected["source_name"], expected["candidate"])
    from_database = run(folder, capfd, "why", *POINT, "--db", database)
    assert from_database["match"] == from_pack["match"]

    assert main(["why", *POINT, "--pack", pack]) == 0
    assert expected["source_name"] in capfd.readouterr().out
    assert main(["tune", *tune[1:]]) == 0
    lines = capfd.readouterr().out.splitlines()
    won = [int(line.split()[2]) for line in lines if line.startswith("h8_p1 ")]
    assert sum(won) == 80
    assert len(won) <= 2, "a row a kernel"

    (source, *_) = sorted((folder / "pack" / "sources").iterdir())
    content = source.read_bytes()
    source.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert main(["pack", "verify", pack]) == 2
    assert source.name in capfd.readouterr().err


def test_check_tells_a_wrong_kernel_from_a_right_one(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["check", "--layout", "h8_p1", "--oracle", "--json"]
    assert main(words) == 0
    (right,) = json.loads(capfd.readouterr().out)["results"]
    assert right["ok"]
    assert right["relative_l2"] > 0

    from kgen.families.verify_mla import VerifyMla

    reference = VerifyMla.reference
    monkeypatch.setattr(VerifyMla, "reference", lambda *words: {k: v + 1 for k, v in reference(*words).items()})
    assert main(words) == 1
    (wrong,) = json.loads(capfd.readouterr().out)["results"]
    assert not wrong["ok"]
    assert "relative L2 error" in wrong["reason"]
