"""``python -m kgen`` is ``kgen``."""

from __future__ import annotations

import sys

from kgen.cli import main

sys.exit(main())
