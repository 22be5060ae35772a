"""Alembic's environment and the schema's history, shipped inside the package."""
