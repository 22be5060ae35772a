"""Real packs of verify_mla in memory, from trials that are made up: for tests that launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kgen.bench.peers import tensor_of
from kgen.db import TuningDatabase
from kgen.family import Array, Candidate
from kgen.pack import pack_from_database
from kgen.records import PointTime, TrialRecord
from kgen.render import render
from kgen.resources import SPECS
from kgen.runtime.pack_reader import Pack
from kgen.spec import Spec, load_spec

POINTS = [{"batch": batch, "nodes": nodes, "prefix": 256} for batch in (1, 4) for nodes in (1, 32)]
SMALL = {"tile_m": 16, "warps": 4, "row_groups": 1, "k_split": 4}
"""Changes to the default candidate that give another source."""


def shipped_spec() -> Spec:
    """The spec that kgen ships."""
    return load_spec(SPECS / "verify_mla.yaml")


def changed_default(spec: Spec, **changes: Any) -> Candidate:
    """The default candidate with some other values."""
    return {**spec.default, **changes}


def make_trial(
    spec: Spec, layout: str, candidate: Candidate, time_us: float | None, *, target: str = "sm_120", **fields: Any
) -> TrialRecord:
    """An ok trial that took ``time_us`` at each of `POINTS`; None: it was proven and never timed."""
    source = render(spec.family, candidate, spec.layout(layout))
    times = [PointTime(point, time_us, time_us, time_us) for point in POINTS] if time_us else []
    values: dict[str, Any] = {
        "run_id": "run",
        "family": spec.family.name,
        "spec_sha256": spec.sha256,
        "layout_name": layout,
        "layout": dict(spec.layout(layout)),
        "target": target,
        "arch": target,
        "envelope": target,
        "candidate": dict(candidate),
        "source_name": source.name,
        "source_sha256": source.sha256,
        "toolchain": "invented",
        "flags": "",
        "evaluator": "model",
        "evidence": "modelled",
        "protocol_version": 1,
        "status": "ok",
        "checked_on": "emulator",
        "relative_error": 1.5e-3,
        "times": tuple(times),
    }
    return TrialRecord(**(values | fields))


def make_database(path: Path, trials: Sequence[TrialRecord]) -> str:
    """The URL of a new database with these trials."""
    with TuningDatabase.open(f"sqlite:///{path}") as db:
        for trial in trials:
            db.add_trial(trial)
    return f"sqlite:///{path}"


def proven_trials(spec: Spec, layout: str, winner: Candidate, target: str = "sm_120") -> list[TrialRecord]:
    """Proofs of default and oracle, and a winner that is faster than the default."""
    return [
        make_trial(spec, layout, spec.default, 20.0, target=target),
        make_trial(spec, layout, spec.oracle, None, target=target),
        make_trial(spec, layout, winner, 10.0, target=target),
    ]


def sources_only_pack(spec: Spec, folder: Path, layouts: Sequence[str] = ("h8_p1",)) -> Pack:
    """A pack without cubins, in which a small-tile candidate won at every point."""
    winner = changed_default(spec, **SMALL)
    trials = [trial for layout in layouts for trial in proven_trials(spec, layout, winner)]
    return pack_from_database(spec, make_database(folder / "tuning.sqlite", trials), ["sm_120"], layouts)


def to_torch(array: Array | None) -> torch.Tensor | None:
    """A tensor on the same memory."""
    return None if array is None else tensor_of(array, "cpu")


def tensors_of(arrays: Mapping[str, Array | None]) -> dict[str, Any]:
    """`to_torch` of every array."""
    return {name: to_torch(array) for name, array in arrays.items()}
