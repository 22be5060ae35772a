"""Tuning: ask for candidates, build, judge, record; prove what wins. The database is also the memory of a run.

A run is replayed from its seed every time: what the database holds is not done again, so a run that was killed goes
on where it stopped, a finished one takes seconds, and both end in the same winners as a run without interruption.
"""

from __future__ import annotations

from kgen.tune.report import EvaluatorName, Listener, TuneOptions, TuneReport
from kgen.tune.tuning import tune

__all__ = ["EvaluatorName", "Listener", "TuneOptions", "TuneReport", "tune"]
