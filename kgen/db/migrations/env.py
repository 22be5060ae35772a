"""Run by alembic: migrates over the connection that `kgen.db.migration` hands in, inside its transaction."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
