"""Trials and their times, append-only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", BIG, primary_key=True, autoincrement=True),
        *_text("trial_sha256", "run_id"),
        sa.Column("number", BIG, nullable=False),
        *_text("created_at", "kgen_version", "family", "spec_sha256", "layout_name", "layout", "target", "arch"),
        *_text("envelope", "candidate", "candidate_key", "source_name", "source_sha256", "toolchain", "flags"),
        *_text("evaluator", "evidence"),
        sa.Column("protocol_version", BIG, nullable=False),
        *_text("status", "reason"),
        sa.Column("registers", BIG),
        sa.Column("shared_bytes", BIG),
        sa.Column("spill_bytes", BIG),
        sa.Column("blocks_per_sm", BIG),
        *_text("checked_on"),
        sa.Column("relative_error", sa.Double),
        sa.Column("seed", BIG, nullable=False),
        sa.Column("device_compute_capability", sa.Text),
        sa.Column("device_sms", BIG),
        sa.Column("device_shared_bytes_per_block", BIG),
        sa.Column("device_l2_bytes", BIG),
        sa.Column("device_memory_clock_khz", BIG),
        sa.Column("device_name", sa.Text),
        sa.Column("device_driver_version", sa.Text),
        sa.UniqueConstraint("trial_sha256", name="trial_once"),
        sa.CheckConstraint(
            "status IN ('ok', 'infeasible', 'compile_error', 'compile_timeout', 'wrong_result', 'launch_error',"
            " 'hang', 'device_degraded')",
            name="trial_status",
        ),
        sa.CheckConstraint("evidence IN ('measured', 'proxy', 'modelled')", name="trial_evidence"),
        sa.CheckConstraint("evaluator IN ('device', 'model')", name="trial_evaluator"),
        sa.CheckConstraint("checked_on IN ('', 'emulator', 'device')", name="trial_checked_on"),
        sa.CheckConstraint(
            "status <> 'ok' OR evidence = 'modelled' OR checked_on <> ''", name="trial_proven_before_timed"
        ),
    )
    op.create_index("trial_by_target", "trial", ["family", "target"])
    op.create_index("trial_by_envelope", "trial", ["family", "envelope"])
    op.create_index("trial_by_source", "trial", ["source_sha256"])


def _point_time() -> None:
    op.create_table(
        "point_time",
        sa.Column("trial_id", BIG, sa.ForeignKey("trial.id", name="point_time_of_trial"), primary_key=True),
        sa.Column("position", BIG, primary_key=True),
        *_text("point", "point_key"),
        sa.Column("time_us", sa.Double, nullable=False),
        sa.Column("time_us_min", sa.Double, nullable=False),
        sa.Column("time_us_max", sa.Double, nullable=False),
        *_text("samples_us"),
        sa.Column("relative_error", sa.Double),
        sa.UniqueConstraint("trial_id", "point_key", name="point_time_once"),
        sa.CheckConstraint(
            "0 < time_us_min AND time_us_min <= time_us AND time_us <= time_us_max", name="point_time_in_order"
        ),
    )


def _append_only(table: str, same_row: str) -> None:
    """Refuses UPDATE, DELETE, and the delete hidden in INSERT OR REPLACE."""
    refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    op.execute(f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}")
    op.execute(f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse}")
    replaces = f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {same_row})"  # noqa: S608 - constants of this file
    op.execute(f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} {replaces} {refuse}")


def upgrade() -> None:
    """Makes both tables; the triggers are SQLite's."""
    _trial()
    _point_time()
    if op.get_bind().dialect.name == "sqlite":
        _append_only("trial", "id = NEW.id OR trial_sha256 = NEW.trial_sha256")
        _append_only("point_time", "trial_id = NEW.trial_id AND (position = NEW.position OR point_key = NEW.point_key)")
