"""Synthetic data as a job reads it: the same calls as `Reader`, without files.

In: a `Synthetic`, the number of epochs, the steps. Out: this node's slices of steps, as batches.
"""

from __future__ import annotations

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.data.batches import concatenate
from daskps.data.order import Steps
from daskps.data.synthetic import Synthetic
from daskps.errors import DataError
from daskps.types import Batch, Int64s


class GeneratedReader:
    """Rows [first_row, stop_row) of a generator, `epochs` times over. `rows` counts the rows of all epochs."""

    def __init__(
        self, data: Synthetic, pool: ComputePool, steps: Steps, *, first_row: int, stop_row: int, epochs: int = 1
    ) -> None:
        self._data, self._pool, self.steps = data, pool, steps
        self._first_row, self._epoch_rows = first_row, stop_row - first_row
        self.rows = self._epoch_rows * epochs

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """This node's slices of steps [first, last) as one batch, and where each begins in it."""
        ranges = [self.steps.slice(step, self.rows) for step in range(first_step, last_step)]
        if ranges and ranges[-1][1] > self.rows:
            raise DataError(f"steps [{first_step}, {last_step}) end behind the last of {self.rows} rows")
        starts = np.cumsum([0, *(stop - start for start, stop in ranges)]).astype(np.int64)
        pieces = [self._read(start, stop) for start, stop in self._joined(ranges)]
        return concatenate(pieces, ranges[0][0] if ranges else 0), starts

    def close(self) -> None:
        """Nothing is open."""

    def _joined(self, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Neighbouring ranges as one, cut where an epoch ends."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            while start < stop:
                end = min(stop, (start // self._epoch_rows + 1) * self._epoch_rows)
                if joined and joined[-1][1] == start and start % self._epoch_rows:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((start, end))
                start = end
        return joined or [(0, 0)]

    def _read(self, start: int, stop: int) -> Batch:
        epoch = start // self._epoch_rows * self._epoch_rows
        first = self._first_row + start - epoch
        return self._data.read(first, first + stop - start, self._pool)
