"""State that a node keeps between the tasks of its stages: its part of each table, and the batches in flight.

Input: the result of a stage, stored under the first step of its token. Output: the same to the next stage. The order
of the stages is not decided here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np

from daskps.errors import StaleError
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.memps import MemPS
from daskps.ssd import TableStore
from daskps.storage.partition import KeysByOwner
from daskps.types import Batch, BatchId, Floats, Int64s, Keys, WorkingSet
from daskps.wire.client import PullResult
from daskps.wire.collective import Handle

NO_KEYS: Keys = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Read:
    """Result of the read stage: the examples of all steps of a token."""

    token: BatchId
    batch: Batch
    step_starts: Int64s  # (steps + 1,)
    time: tuple[str, float, float, float]  # stage, start, end, seconds waited


@dataclass(slots=True)
class NodeBatch:
    """Batch in flight on this node, from its dedup to the end of its push."""

    token: BatchId
    batch: Batch  # its keys are dropped as soon as the batch has its number
    step_starts: Int64s  # (steps + 1,) this node's examples of each step
    sets: list[WorkingSet] = field(default_factory=list)
    owners: dict[str, KeysByOwner] = field(
        default_factory=dict
    )  # by table: keys grouped by owner; only with several nodes
    rows: dict[str, Floats] = field(default_factory=dict)  # by table: (U, width), filled by the pull
    pulled: dict[str, PullResult] = field(default_factory=dict)
    weights: Handle[list[Floats]] | None = None  # by rank: the largest example weight of each step; on several nodes
    tables: list[HbmTable] = field(default_factory=list)
    loaded: threading.Event = field(default_factory=threading.Event)  # `tables` are complete, with their rows
    times: list[tuple[str, float, float, float]] = field(default_factory=list)  # stage, start, end, seconds waited
    metrics: dict[str, float] = field(default_factory=dict)  # progressive metrics up to and including this batch

    @property
    def examples(self) -> int:
        """Number of this node's examples, including the skipped ones."""
        return int(self.step_starts[-1])

    @property
    def skipped(self) -> int:
        """Number of examples that could not be parsed: they keep their positions, but are not trained on."""
        return 0 if self.batch.bad is None else int(self.batch.bad.sum())


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One table's partitions on this node. `mem` and `store` are used only in the link's owner thread."""

    spec: TableSpec
    mem: MemPS
    store: TableStore


class BatchesInFlight:
    """Batches in flight on this node, by first step."""

    def __init__(self, run: str, incarnation: int) -> None:
        self.run, self.incarnation = run, incarnation
        self._reads: list[Read] = []
        self._flights: dict[int, NodeBatch] = {}

    def add(self, read: Read) -> None:
        """Keep the examples that were read until the last batch made of them has its number."""
        self._check(read.token)
        self._reads.append(read)

    def get(self, token: BatchId) -> NodeBatch:
        """Return the batch in flight with this token; raise StaleError for a token of another run or incarnation."""
        self._check(token)
        try:
            return self._flights[token.first_step]
        except KeyError:
            raise StaleError(f"{token} is not in flight on this node") from None

    def begin(self, token: BatchId) -> NodeBatch:
        """Start a batch with the steps of `token`, cut out of the read that contains them.

        A read whose batch was split starts several.
        """
        read = self.read_of(token)
        first = token.first_step - read.token.first_step
        starts = read.step_starts[first : first + token.stop_step - token.first_step + 1]
        batch = read.batch.slice(int(starts[0]), int(starts[-1]))
        self._flights[token.first_step] = flight = NodeBatch(token, batch, starts - starts[0])
        flight.times.append(read.time)
        return flight

    def read_of(self, token: BatchId) -> Read:
        """Return the read that contains the steps of `token`."""
        self._check(token)
        return next(read for read in self._reads if read.token.first_step <= token.first_step < read.token.stop_step)

    def number(self, token: BatchId) -> NodeBatch:
        """Give the batch its numbered token and return it.

        A numbered batch will not be split any more, so the examples read for it and its keys are dropped.
        """
        flight = self.get(token)
        flight.token = token
        self._reads = [read for read in self._reads if read.token.stop_step > token.stop_step]
        flight.batch = replace(flight.batch, keys=NO_KEYS)
        return flight

    def _check(self, token: BatchId) -> None:
        """Raise StaleError if the token is of another run or incarnation."""
        if (token.run, token.incarnation) != (self.run, self.incarnation):
            raise StaleError(f"{token} is stale: this node is in run {self.run}, incarnation {self.incarnation}")

    def loaded(self) -> list[NodeBatch]:
        """Return the batches whose rows are on the devices."""
        return [flight for flight in list(self._flights.values()) if flight.tables]

    def remove(self, token: BatchId) -> NodeBatch | None:
        """Remove a batch and return it; None if it is not in flight."""
        return self._flights.pop(token.first_step, None)
