"""Rejections, which outlast trials, and the reference that a trial was timed beside."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Adds a table and two columns; old trials had no reference. The triggers are SQLite's."""
    op.add_column("trial", sa.Column("reference", sa.Text, nullable=False, server_default=""))
    op.add_column("point_time", sa.Column("reference_us", sa.Double))
    names = ("family", "source_name", "source_sha256", "reason", "undoes", "created_at", "kgen_version")
    op.create_table(
        "rejection",
        sa.Column("id", BIG, primary_key=True, autoincrement=True),
        sa.Column("rejection_sha256", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in names),
        sa.UniqueConstraint("rejection_sha256", name="rejection_once"),
        sa.CheckConstraint("reason <> ''", name="rejection_has_a_reason"),
    )
    if op.get_bind().dialect.name == "sqlite":
        refuse = "BEGIN SELECT RAISE(ABORT, 'rejection is append-only'); END"
        same = "EXISTS (SELECT 1 FROM rejection WHERE id = NEW.id OR rejection_sha256 = NEW.rejection_sha256)"
        op.execute(f"CREATE TRIGGER rejection_no_update BEFORE UPDATE ON rejection {refuse}")
        op.execute(f"CREATE TRIGGER rejection_no_delete BEFORE DELETE ON rejection {refuse}")
        op.execute(f"CREATE TRIGGER rejection_no_replace BEFORE INSERT ON rejection WHEN {same} {refuse}")
