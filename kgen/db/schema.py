"""The tables of the tuning database, as its newest migration leaves them.

Only types and constraints that every SQL database has. ``layout``, ``candidate``, ``point`` and ``samples_us`` are
canonical JSON (`kgen.canonical`), so that equal values are equal text.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

BIG = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; SQLite numbers rows by itself only in a column of type INTEGER."""

metadata = MetaData()

trial = Table(
    "trial",
    metadata,
    Column("id", BIG, primary_key=True, autoincrement=True),
    Column("trial_sha256", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("number", BIG, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("kgen_version", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("spec_sha256", Text, nullable=False),
    Column("layout_name", Text, nullable=False),
    Column("layout", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("arch", Text, nullable=False),
    Column("envelope", Text, nullable=False),
    Column("candidate", Text, nullable=False),
    Column("candidate_key", Text, nullable=False),
    Column("source_name", Text, nullable=False),
    Column("source_sha256", Text, nullable=False),
    Column("toolchain", Text, nullable=False),
    Column("flags", Text, nullable=False),
    Column("evaluator", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("protocol_version", BIG, nullable=False),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("registers", BIG),
    Column("shared_bytes", BIG),
    Column("spill_bytes", BIG),
    Column("blocks_per_sm", BIG),
    Column("checked_on", Text, nullable=False),
    Column("relative_error", Double),
    Column("seed", BIG, nullable=False),
    Column("device_compute_capability", Text),
    Column("device_sms", BIG),
    Column("device_shared_bytes_per_block", BIG),
    Column("device_l2_bytes", BIG),
    Column("device_memory_clock_khz", BIG),
    Column("device_name", Text),
    Column("device_driver_version", Text),
    Column("reference", Text, nullable=False),
    UniqueConstraint("trial_sha256", name="trial_once"),
    CheckConstraint(
        "status IN ('ok', 'infeasible', 'compile_error', 'compile_timeout', 'wrong_result', 'launch_error', 'hang',"
        " 'device_degraded')",
        name="trial_status",
    ),
    CheckConstraint("evidence IN ('measured', 'proxy', 'modelled')", name="trial_evidence"),
    CheckConstraint("evaluator IN ('device', 'model')", name="trial_evaluator"),
    CheckConstraint("checked_on IN ('', 'emulator', 'device')", name="trial_checked_on"),
    CheckConstraint("status <> 'ok' OR evidence = 'modelled' OR checked_on <> ''", name="trial_proven_before_timed"),
    Index("trial_by_target", "family", "target"),
    Index("trial_by_envelope", "family", "envelope"),
    Index("trial_by_source", "source_sha256"),
)
"""One row a trial, failures too; `kgen.records.TrialRecord` names the columns."""

point_time = Table(
    "point_time",
    metadata,
    Column("trial_id", BIG, ForeignKey("trial.id", name="point_time_of_trial"), primary_key=True),
    Column("position", BIG, primary_key=True),
    Column("point", Text, nullable=False),
    Column("point_key", Text, nullable=False),
    Column("time_us", Double, nullable=False),
    Column("time_us_min", Double, nullable=False),
    Column("time_us_max", Double, nullable=False),
    Column("samples_us", Text, nullable=False),
    Column("relative_error", Double),
    Column("reference_us", Double),
    UniqueConstraint("trial_id", "point_key", name="point_time_once"),
    CheckConstraint(
        "0 < time_us_min AND time_us_min <= time_us AND time_us <= time_us_max", name="point_time_in_order"
    ),
)
"""The times of an ok trial, one row a workload point, in the order in which the trial lists them."""

rejection = Table(
    "rejection",
    metadata,
    Column("id", BIG, primary_key=True, autoincrement=True),
    Column("rejection_sha256", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("source_name", Text, nullable=False),
    Column("source_sha256", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("undoes", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("kgen_version", Text, nullable=False),
    UniqueConstraint("rejection_sha256", name="rejection_once"),
    CheckConstraint("reason <> ''", name="rejection_has_a_reason"),
)
"""One row a `kgen.records.Rejection`."""
