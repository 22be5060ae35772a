"""Frozen kernel packs: chosen from the tuning database, written, verified. `kgen.runtime` reads them."""

from __future__ import annotations

from kgen.pack.assemble import EmitReport, emit, freeze, pack_from_database, select
from kgen.pack.verify import VerifyReport, stale_reasons, verify_pack
from kgen.pack.writer import write_pack

__all__ = [
    "EmitReport",
    "VerifyReport",
    "emit",
    "freeze",
    "pack_from_database",
    "select",
    "stale_reasons",
    "verify_pack",
    "write_pack",
]
