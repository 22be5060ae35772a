"""What goes into a tuning run, what is heard of it, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kgen.db.winners import Winner
from kgen.family import Candidate
from kgen.records import TrialRecord
from kgen.spec import Spec

EvaluatorName = Literal["auto", "device", "model"]


@dataclass(frozen=True)
class TuneOptions:
    """What to tune and how.

    ``trials`` is per layout, the default included, the oracle not; ``envelope`` and ``layouts`` are the target itself
    and all layouts where None; ``db`` is a database URL; of modelled candidates at most ``proofs`` a layout are chosen
    to be proven, the default among them. ``tries`` are tried first, after the default.
    """

    spec: Spec
    target: str
    db: str
    cache_dir: Path
    envelope: str | None = None
    layouts: Sequence[str] | None = None
    trials: int = 24
    time_budget_s: float | None = None
    seed: int = 0
    jobs: int = 2
    evaluator: EvaluatorName = "auto"
    proofs: int = 4
    tries: Sequence[Candidate] = ()


@dataclass(frozen=True)
class TuneReport:
    """How a run ended.

    ``statuses`` counts its trials, reused ones too, as they were judged; ``new_trials`` rows are new in the database,
    proofs too. ``floors_us``, and the default candidate's times (none where it failed), are by layout name, in the
    order of the workload's points.
    """

    target: str
    envelope: str
    evaluator: str
    why: str
    winners: tuple[Winner, ...]
    floors_us: Mapping[str, tuple[float, ...]]
    default_us: Mapping[str, tuple[float, ...]]
    statuses: Mapping[str, int]
    new_trials: int
    interrupted: bool
    budget_spent: bool
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; ``winners`` holds nothing that differs between two runs of one seed."""
        return {
            "target": self.target,
            "envelope": self.envelope,
            "evaluator": self.evaluator,
            "why": self.why,
            "winners": [_winner_json(winner) for winner in self.winners],
            "trials": dict(self.statuses),
            "new_trials": self.new_trials,
            "interrupted": self.interrupted,
            "budget_spent": self.budget_spent,
            "wall_s": round(self.wall_s, 1),
        }


class Listener(Protocol):
    """Hears how a run goes."""

    def started(self, total: int, evaluator: str, why: str) -> None:
        """``total`` trials will be made or found in the database; ``why`` says how the evaluator was chosen."""

    def phase(self, name: str) -> None:
        """What is done from now on."""

    def trial_done(self, record: TrialRecord) -> None:
        """A trial was made, or found in the database."""

    def proofs(self, done: int, total: int) -> None:
        """``done`` of the ``total`` chosen candidates are proven; a wrong one makes the total grow."""

    def finished(self, report: TuneReport) -> None:
        """The last thing that is said."""


def _winner_json(winner: Winner) -> dict[str, Any]:
    names = (
        "layout_name", "point", "candidate", "source_name", "source_sha256", "evidence", "time_us",
        "registers", "shared_bytes", "spill_bytes", "blocks_per_sm", "checked_on", "relative_error", "tie",
    )  # fmt: skip
    return {name: getattr(winner, name) for name in names}
