"""What a node keeps between the tasks of its stages: its part of each table, and the batches in flight.

In: what the stages bring, under the token's first step. Out: the same to the stage after. Nothing here decides about
the order of the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskps.backend.device import Device
from daskps.backend.ops.initial import Initialiser, initialise_rows
from daskps.backend.ops.optimizer import state_initialisers
from daskps.cluster.partition import Grouped
from daskps.cluster.requester import Pulled
from daskps.errors import StaleError
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.memps import MemPS
from daskps.ssd import Partitions
from daskps.types import Batch, Floats, Int64s, Keys, Token, WorkingSet

NO_KEYS: Keys = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Read:
    """What the read stage brought: examples of all steps of a token."""

    token: Token
    batch: Batch
    step_starts: Int64s  # (steps + 1,)
    time: tuple[str, float, float, float]


@dataclass(slots=True)
class Flight:
    """A batch in flight on this node, from reading to the end of its push."""

    token: Token
    batch: Batch  # without keys once it has its number
    step_starts: Int64s  # (steps + 1,) this node's examples of each step
    sets: list[WorkingSet] = field(default_factory=list)
    owners: dict[str, Grouped] = field(default_factory=dict)  # of each table's keys, with several nodes
    rows: dict[str, Floats] = field(default_factory=dict)  # of each table: (U, width), where pulls put them
    pulled: dict[str, Pulled] = field(default_factory=dict)
    tables: list[HbmTable] = field(default_factory=list)
    times: list[tuple[str, float, float, float]] = field(default_factory=list)  # stage, start, end, seconds waited
    metrics: dict[str, float] = field(default_factory=dict)  # progressive, with this batch and none after it

    @property
    def examples(self) -> int:
        """This node's examples."""
        return int(self.step_starts[-1])


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One table's partitions on this node; cache and store are used in the link's thread."""

    spec: TableSpec
    mem: MemPS
    store: Partitions


def initial_rows(spec: TableSpec, embedding: Initialiser, seed: int, device: Device) -> Any:
    """What MEM-PS calls to make rows of unknown keys: a function of (seed, table, key) alone."""
    initialisers = {"embedding": embedding, **state_initialisers(spec.optimizer)}

    def fill(keys: Keys, rows: Floats) -> None:
        initialise_rows(
            device,
            keys=keys,
            rows=rows,
            layout=spec.layout,
            initialisers=initialisers,
            seed=seed,
            table=spec.number,
        )

    return fill


class Flights:
    """The batches in flight, by first step."""

    def __init__(self, run: str, epoch: int) -> None:
        self.run, self.epoch = run, epoch
        self._reads: list[Read] = []
        self._flights: dict[int, Flight] = {}

    def add(self, read: Read) -> None:
        """Keep what was read until its last batch has its number."""
        self._check(read.token)
        self._reads.append(read)

    def get(self, token: Token) -> Flight:
        """The flight that a token names; a token of another run or epoch is stale."""
        self._check(token)
        try:
            return self._flights[token.first_step]
        except KeyError:
            raise StaleError(f"{token} is not in flight on this node") from None

    def begin(self, token: Token) -> Flight:
        """A flight for the steps of `token`, out of the read that holds them; a cut batch begins several."""
        read = self.read_of(token)
        first = token.first_step - read.token.first_step
        starts = read.step_starts[first : first + token.stop_step - token.first_step + 1]
        batch = read.batch.slice(int(starts[0]), int(starts[-1]))
        self._flights[token.first_step] = flight = Flight(token, batch, starts - starts[0])
        flight.times.append(read.time)
        return flight

    def read_of(self, token: Token) -> Read:
        """What was read with the steps of `token` in it."""
        self._check(token)
        return next(read for read in self._reads if read.token.first_step <= token.first_step < read.token.stop_step)

    def number(self, token: Token) -> Flight:
        """The flight has its number, so it will not be cut any more: what was read for it can go."""
        flight = self.get(token)
        flight.token = token
        self._reads = [read for read in self._reads if read.token.stop_step > token.stop_step]
        flight.batch = replace(flight.batch, keys=NO_KEYS)
        return flight

    def _check(self, token: Token) -> None:
        if (token.run, token.epoch) != (self.run, self.epoch):
            raise StaleError(f"{token} is stale: this node is in run {self.run} epoch {self.epoch}")

    def loaded(self) -> list[Flight]:
        """The flights whose rows are on the devices."""
        return [flight for flight in list(self._flights.values()) if flight.tables]

    def remove(self, token: Token) -> Flight | None:
        """Forget a flight."""
        return self._flights.pop(token.first_step, None)
