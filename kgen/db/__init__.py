"""The tuning database: append-only trials, winners as a query, and a text form for review."""

from __future__ import annotations

from kgen.db.database import Added, TuningDatabase
from kgen.db.migration import MigrationReport, migrate
from kgen.db.record_form import StoredTrial, trial_sha256
from kgen.db.text_form import export_text, import_text, merge
from kgen.db.winners import Winner, device_key, winners

__all__ = [
    "Added",
    "MigrationReport",
    "StoredTrial",
    "TuningDatabase",
    "Winner",
    "device_key",
    "export_text",
    "import_text",
    "merge",
    "migrate",
    "trial_sha256",
    "winners",
]
