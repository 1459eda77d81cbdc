"""Eviction policies: the order in which rows leave the cache.

A policy is one function. It gets arrays of ages and visits, and what the cache has measured, and returns one score for
each pair; the row with the smallest score is evicted first. Only the order of the scores counts:

>>> lru(np.array([0.0, 5.0]), np.array([1.0, 9.0]), Measured())
array([-0., -5.])

To add a policy, write the function and add it to POLICIES below. Nothing else has to change: `cluster.eviction`
(config.py) takes its values from POLICIES, and the native code (eviction.cpp) reads scores from a table that `Eviction`
fills with the function. tests/mem/test_eviction.py runs every policy of POLICIES.

Age is the number of batches since the last pull of the row. Visits is the number of its pulls, as it was at the last
one: the weight of a pull is halved every `Measured.half_life` batches. Rows that a batch in flight pins are never
evicted. Rows with a known next use (`next_use` of an entry; nothing sets it yet) are evicted after all others by every
policy, the nearest use last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Doubles: TypeAlias = npt.NDArray[np.float64]

HALF_LIFE = (
    6  # in turnovers of the cache: the weight of a pull is halved after as many pulls as 6 times the cached rows
)
OVERDUE = 1.5  # a row is overdue after the time in which this many pulls were expected
LEAST_RETURNING = 1 / 64
MEMORY = 0.8  # weight of all earlier batches, relative to the newest one, in what is measured


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures that a cache measures of the stream of keys, beside the entries of the rows."""

    turnover: float = 1.0  # batches in which as many keys are pulled as the cache has rows
    returning: float = 1.0  # pulls of overdue rows divided by the pulls that their visits promised; at most 1

    @property
    def half_life(self) -> float:
        """Return the number of batches after which a pull counts half."""
        return HALF_LIFE * self.turnover

    @property
    def overdue(self) -> float:
        """Return the limit of age * visits above which a row is overdue."""
        return OVERDUE * self.half_life / math.log(2)  # visits * ln 2 / half_life is the rate of pulls per batch


Policy: TypeAlias = Callable[[Doubles, Doubles, Measured], Doubles]


def lru(age: Doubles, visits: Doubles, measured: Measured) -> Doubles:
    """Evict the rows that were not pulled for the longest time (least recently used)."""
    return -age


def lfu(age: Doubles, visits: Doubles, measured: Measured) -> Doubles:
    """Evict the rows with the fewest pulls, old pulls counting less (least frequently used, with ageing)."""
    return visits * 2.0 ** (-age / measured.half_life)


def lru_lfu(age: Doubles, visits: Doubles, measured: Measured) -> Doubles:
    """Evict the rows with the fewest expected pulls: as `lfu`, but frequent rows must return in time, as in `lru`.

    A row that was pulled often and has not come for long is either late or out of use. How likely the second is depends
    on the data, so the cache measures it: of the pulls that overdue rows promised, the fraction that came. With keys
    that stay popular this is 1 and the policy is `lfu`; with drifting keys overdue rows lose most of their score.
    """
    overdue = age * visits > measured.overdue
    return lfu(age, visits, measured) * np.where(overdue, measured.returning, 1.0)


POLICIES: dict[str, Policy] = {"lru_lfu": lru_lfu, "lru": lru, "lfu": lfu}
DEFAULT_POLICY = "lru_lfu"

# Figures of entry.cuh.
ONE_VISIT = 4  # visits are stored in units of 1/4
VISIT_LEVELS = 64
AGE_LEVELS = 112
SCORES = 512
MOST_AHEAD = 255
SCORE_LEVELS = SCORES + MOST_AHEAD  # scores of the policy, then those of rows with a known next use

REBUILD_CHANGE = 1 / 16  # tables are made anew when a measured figure has changed by this fraction


def _level_ages() -> Doubles:
    """Return the smallest age of each age level (age_level in entry.cuh)."""
    exact, coarse = np.arange(16), np.arange(16, AGE_LEVELS)
    return np.concatenate([exact, (coarse % 8 + 8) << (coarse // 8 - 1)]).astype(np.float64)


LEVEL_AGES = _level_ages()
LEVEL_VISITS = np.arange(VISIT_LEVELS) / ONE_VISIT


class Eviction:
    """The eviction policy of one cache: what it has measured, and the tables that the native code reads."""

    def __init__(self, policy: str) -> None:
        """Prepare the tables of a policy of POLICIES; they are filled when the first batch is visited."""
        self.measured = Measured()
        self.scores = np.zeros((AGE_LEVELS, VISIT_LEVELS), np.uint16)
        self.decay = np.zeros(AGE_LEVELS, np.uint8)
        self.overdue = 0  # Measured.overdue in units of stored visits
        self._policy = POLICIES[policy]
        self._built: Measured | None = None  # what the tables were made from
        self._keys = 0.0  # keys per batch, moving average
        self._visited: tuple[int, int] | None = None  # of this batch, until measured: overdue rows pulled, their visits
        self._returned = 0.0  # overdue rows that were pulled, moving sum
        self._expected = 0.0  # how many should have been

    def visited(self, keys: int, cache_rows: int, overdue: int, overdue_visits: int) -> None:
        """Take note of a batch of `keys` keys, among them `overdue` cached rows that were overdue."""
        self._keys = MEMORY * self._keys + (1 - MEMORY) * keys if self._keys else float(keys)
        self._visited = (overdue, overdue_visits)
        self._update(replace(self.measured, turnover=max(1.0, cache_rows) / max(1.0, self._keys)))

    def searched(self, overdue_visits: float) -> None:
        """Take note of the decayed visits of all overdue rows that the batch visited last did not pull.

        Only the first search of a batch counts: after it, overdue rows have been evicted.
        """
        if self._visited is None:
            return
        (pulled, pulled_visits), self._visited = self._visited, None
        visits = (pulled_visits + overdue_visits) / (256 * ONE_VISIT)
        self._returned = MEMORY * self._returned + pulled
        self._expected = MEMORY * self._expected + visits * math.log(2) / self.measured.half_life
        returning = (self._returned + 1) / (self._expected + 1)
        self._update(replace(self.measured, returning=min(1.0, max(LEAST_RETURNING, returning))))

    def _update(self, measured: Measured) -> None:
        """Make the tables anew if the measured figures have changed."""
        self.measured = measured
        built = self._built
        if built is not None and all(
            abs(new - old) <= REBUILD_CHANGE * old
            for new, old in ((measured.turnover, built.turnover), (measured.returning, built.returning))
        ):
            return
        self._built = measured
        scores = self._policy(*np.meshgrid(LEVEL_AGES, LEVEL_VISITS, indexing="ij"), measured)
        values, ranks = np.unique(scores, return_inverse=True)
        self.scores[:] = (ranks * min(SCORES, len(values)) // len(values)).reshape(scores.shape)
        self.decay[:] = np.rint(255 * 2.0 ** (-LEVEL_AGES / measured.half_life))
        self.overdue = int(measured.overdue * ONE_VISIT)
