"""The Node: everything that one Dask worker keeps between tasks.

In: a job, and the node's place in the run. Out: devices, readers, one `NodeTable` per table (cache over partitions on
disk), the dense network, metrics, and the batches in flight. Stages are functions over a Node; the Node itself decides
nothing about their order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskps.backend.device import Device
from daskps.backend.ops.initial import Initialiser, initialise_rows
from daskps.backend.ops.optimizer import state_initialisers
from daskps.errors import StaleError
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.delivery import Delivery
from daskps.mem.memps import MemPS
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
class Arrival:
    """What has come of one table's pull of one batch."""

    rows: Floats
    first: Delivery | None = None
    late: int = 0  # rows that the owner still has to send


@dataclass(slots=True)
class Flight:
    """A batch in flight on this node, from reading to the end of its push."""

    token: Token
    batch: Batch  # without keys once it has its number
    step_starts: Int64s  # (steps + 1,) this node's examples of each step
    sets: list[WorkingSet] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    tables: list[HbmTable] = field(default_factory=list)
    times: list[tuple[str, float, float, float]] = field(default_factory=list)  # stage, start, end, seconds waited

    @property
    def examples(self) -> int:
        """This node's examples."""
        return int(self.step_starts[-1])


class NodeTable:
    """One table's partition on this node. Calls of the cache are serialised by `lock`."""

    def __init__(self, spec: TableSpec, mem: MemPS, store: Any) -> None:
        self.spec, self.mem, self.store = spec, mem, store
        self.lock = threading.Lock()


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
    """The batches in flight, by first step, with word of what has arrived for them."""

    def __init__(self, run: str, epoch: int) -> None:
        self.run, self.epoch = run, epoch
        self._reads: list[Read] = []
        self._flights: dict[int, Flight] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None

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
        self._check(token)
        read = next(read for read in self._reads if read.token.first_step <= token.first_step < read.token.stop_step)
        first = token.first_step - read.token.first_step
        starts = read.step_starts[first : first + token.stop_step - token.first_step + 1]
        batch = read.batch.slice(int(starts[0]), int(starts[-1]))
        self._flights[token.first_step] = flight = Flight(token, batch, starts - starts[0])
        flight.times.append(read.time)
        return flight

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

    def numbered(self, batch: int) -> Flight | None:
        """The flight with this batch number, if it is still here."""
        return next((flight for flight in self._flights.values() if flight.token.batch == batch), None)

    def loaded(self) -> list[Flight]:
        """The flights whose rows are on the devices."""
        return [flight for flight in list(self._flights.values()) if flight.tables]

    def remove(self, token: Token) -> Flight | None:
        """Forget a flight."""
        return self._flights.pop(token.first_step, None)

    def arrive(self, table: int, deliveries: Sequence[Delivery]) -> None:
        """Note deliveries of MEM-PS for whoever waits."""
        with self._changed:
            for delivery in deliveries:
                flight = self.numbered(delivery.batch)
                assert flight is not None, f"rows for batch {delivery.batch}, which is not in flight"
                arrival = flight.arrivals[table]
                if delivery.first:
                    arrival.first, arrival.late = delivery, len(delivery.late)
                else:
                    assert delivery.positions is not None
                    arrival.late -= len(delivery.positions)
            self._changed.notify_all()

    def wait_first(self, flight: Flight, seconds: float) -> float:
        """Wait until every table's pull is answered; seconds waited."""
        return self._wait(lambda: all(arrival.first is not None for arrival in flight.arrivals), flight, seconds)

    def wait_late(self, flight: Flight, seconds: float) -> float:
        """Wait until no late row is missing; seconds waited."""
        return self._wait(lambda: all(not arrival.late for arrival in flight.arrivals), flight, seconds)

    def fail(self, error: BaseException) -> None:
        """Wake everybody who waits, with an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, ready: Any, flight: Flight, seconds: float) -> float:
        start = time.perf_counter()
        with self._changed:
            if not self._changed.wait_for(lambda: self._error is not None or ready(), seconds):
                raise StaleError(f"{flight.token}: no rows came within {seconds} s; another stage has stopped")
            if self._error is not None:
                raise StaleError(f"{flight.token} is given up: {self._error}")
        return time.perf_counter() - start


def empty_rows(keys: int, width: int) -> Floats:
    """Room for rows that a pull writes."""
    return np.empty((keys, width), np.float32)
