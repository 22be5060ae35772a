"""Proves pretended variants until it is interrupted, in the processes of `kgen.tune.prove`; for tests of Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

if __name__ == "__mp_main__":
    os.write(1, b"starting\n")
    time.sleep(0.3)  # of the longer time that a process takes to import what it needs

from kgen.tune import prove as proving


@dataclass(frozen=True)
class SlowTask:
    """A proof that takes longer than any test."""

    number: int

    def run(self) -> None:
        """Say that it began, and sleep."""
        os.write(1, b"proving\n")
        time.sleep(60)


def main() -> None:
    """Exit with 130 when interrupted."""
    parts: Any = proving
    parts._build_for_emulator = lambda study, variants: None
    parts._task = lambda study, variant, resident: SlowTask(variant)
    study: Any = SimpleNamespace(jobs=2)
    variants: Any = {("layout", str(number)): (number, 1) for number in range(6)}
    try:
        proving.prove(study, variants, lambda place, proof: None)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
