"""Numbers that an operator sets for a server."""

from __future__ import annotations

import os

from kgen.errors import InputError

MOST_DIGITS = 18  # below 2**63


def positive_number(variable: str, default: int) -> int:
    """What an environment variable says, ``default`` where it is not set or empty. Raises InputError."""
    text = os.environ.get(variable) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or int(text) == 0:
        raise InputError(variable, "must be a positive whole number", seen=repr(text[:40]), remedy=f"such as {default}")
    return int(text)
