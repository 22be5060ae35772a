"""Which samples to take and what to make of them: interleaving, medians, early drops, the canary."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.records import PointTime

REPEATS = 7  # replays a reported time is the median of
ESTIMATE_REPLAYS = 3  # replays of the quick estimate
DROP_FACTOR = 1.6  # an estimate this much slower than the best known time is not refined
CANARY_DRIFT = 0.10  # a canary this far from the session's first one means a degraded device
LAUNCHES = 20  # launches a replayed graph holds, so that events and the graph's start do not weigh
REPLAY_US = 1000.0  # a replay that takes this long needs no more launches
COLD_FACTOR = 2.5  # rotated inputs are this many times the L2 cache


def summarise(point: Mapping[str, int], samples_us: Sequence[float], relative_error: float | None = None) -> PointTime:
    """Median, fastest and slowest of the samples, in microseconds."""
    return PointTime(
        point=dict(point),
        time_us=statistics.median(samples_us),
        time_us_min=min(samples_us),
        time_us_max=max(samples_us),
        samples_us=tuple(samples_us),
        relative_error=relative_error,
    )


def interleaved(count: int, rounds: int) -> Iterator[int]:
    """Indices 0 to count - 1 once a round; each round starts one further on, so that nobody always follows the same."""
    for number in range(rounds):
        for place in range(count):
            yield (place + number) % count


def input_sets(set_bytes: int, l2_bytes: int, budget_bytes: int) -> int:
    """How many copies of the inputs to rotate: `COLD_FACTOR` times the L2 cache, inside the budget."""
    wanted = -(-int(COLD_FACTOR * l2_bytes) // max(set_bytes, 1))
    return max(1, min(wanted, budget_bytes // max(set_bytes, 1), 256))


def launches_per_replay(sets: int, floor_us: float, *, in_place: bool = False) -> int:
    """A multiple of ``sets``: `LAUNCHES` or more, or fewer that take `REPLAY_US` at ``floor_us`` each.

    ``in_place``: an odd multiple, so that one replay leaves what one launch would, where each launch undoes the last.
    """
    wanted = min(LAUNCHES, max(1, round(REPLAY_US / floor_us)))
    rotations = -(-wanted // sets)
    return sets * (rotations | 1 if in_place else rotations)


@dataclass
class BestTimes:
    """The best time seen so far at each point, by any key."""

    factor: float = DROP_FACTOR
    best_us: dict[str, float] = field(default_factory=dict)

    def note(self, key: str, time_us: float) -> None:
        """Remember a time if it is the best at its point."""
        self.best_us[key] = min(time_us, self.best_us.get(key, time_us))

    def drop_reason(self, key: str, estimate_us: float) -> str:
        """Why an estimate is not worth refining; empty if it is."""
        best = self.best_us.get(key, estimate_us)
        if estimate_us <= self.factor * best:
            return ""
        return f"estimated at {estimate_us:.1f} us, more than {self.factor:g} times the best of {best:.1f} us"


@dataclass
class Canary:
    """Compares a fixed job's times with its first one."""

    drift: float = CANARY_DRIFT
    first_us: float | None = None

    def degraded(self, time_us: float) -> str:
        """What is wrong with the device; empty if nothing. The first call sets what later ones are compared with."""
        if self.first_us is None:
            self.first_us = time_us
        if abs(time_us - self.first_us) <= self.drift * self.first_us:
            return ""
        return f"the canary copy took {time_us:.1f} us, {self.first_us:.1f} us at the session's start"
