"""The tuning database: append-only trials, winners as a query, and a text form for review."""

from __future__ import annotations

from kgen.db.database import Added, TrialFilter, TrialIdentity, TuningDatabase
from kgen.db.migration import MigrationReport, migrate
from kgen.db.record_form import StoredTrial, trial_sha256

__all__ = [
    "Added",
    "MigrationReport",
    "StoredTrial",
    "TrialFilter",
    "TrialIdentity",
    "TuningDatabase",
    "migrate",
    "trial_sha256",
]
