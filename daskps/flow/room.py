"""How a node's budgets are dealt out: memory over tables, rows over batches; and whether a batch fits.

In: a job, its tables, which node owns which keys. Out: bytes and rows; a `Fit` of every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from distributed.system import MEMORY_LIMIT

from daskps.cluster.node import Flight, NodeTable
from daskps.cluster.partition import KeyPartition
from daskps.config import Job
from daskps.errors import CapacityError
from daskps.flow.fitting import SLACK, Fit
from daskps.hbm.table import TableSpec
from daskps.ssd.format import KEY_BYTES, default_file_rows

BUFFERS = 10  # of the memory, one part for files that are filled or written
FILES_IN_MEMORY = 3  # of a partition: one is filled, two are written
INDEX_BYTES = 12  # a key takes in the disk tier's index
SORT_BYTES = 48  # an occurrence takes while those of a step, and of the next, are grouped by row
DEDUP_BYTES = 16  # an occurrence takes while distinct keys are found; one batch at a time
SEARCH_BYTES = 32  # a row takes in a hash table that is at most half full; one batch at a time is searched
STEP_BYTES = 64  # an example takes beside its activations: loss, weight, probability, what metrics make of them
LENT = 1.25  # times what is asked for: memory comes in whole pages, and is used again for arrays that are smaller


def check_memory(job: Job, *, on_cpu: bool, nodes_here: int = 1, limit_bytes: int | None = None) -> None:
    """CapacityError if budgets are above what this machine (or control group) has, or above the Dask worker's limit.

    Stand-ins for devices live in the same memory. The system would grant it and kill the node when it is used.
    """
    budget = job.budget
    one = budget.memory_bytes + (budget.hbm_bytes if on_cpu else 0)
    for nodes, allowed in ((1, limit_bytes or MEMORY_LIMIT), (nodes_here, MEMORY_LIMIT)):
        if nodes * one > allowed:
            hbm = f" and budget.hbm_bytes ({budget.hbm_bytes:,}, in memory where there is no GPU)" if on_cpu else ""
            raise CapacityError(
                f"{nodes} node{'s' if nodes > 1 else ''} with budget.memory_bytes ({budget.memory_bytes:,}){hbm} "
                f"may use {nodes * one:,} bytes, but here {allowed:,} are allowed: lower the budgets"
            )


def _row_bytes(spec: TableSpec) -> int:
    """A row of a batch's table: its fields and its key."""
    return spec.layout.row_bytes + KEY_BYTES


class Room:
    """The budgets of one node."""

    def __init__(
        self,
        job: Job,
        specs: Sequence[TableSpec],
        partition: KeyPartition,
        memory_used: int,  # by others than rows
        hbm_used: int,
    ) -> None:
        self._job, self._specs, self._partition = job, specs, partition
        self._nodes = partition.nodes
        self._memory_used, self._hbm_used = memory_used, hbm_used

    def memory_bytes(self, spec: TableSpec) -> int:
        """A table's share of the memory that is left to rows."""
        return self._share(self._job.budget.memory_bytes - self._memory_used, spec)

    def disk_bytes(self, spec: TableSpec) -> int | None:
        """A table's share of the disk, if that has a budget."""
        budget = self._job.budget.disk_bytes
        return None if budget is None else self._share(budget, spec)

    def _share(self, count: int, spec: TableSpec) -> int:
        """Of bytes for all tables: by those that an example has in each."""
        weights = {other.name: len(other.slots) * other.layout.row_bytes for other in self._specs}
        return count * weights[spec.name] // sum(weights.values())

    @property
    def _device_bytes(self) -> float:
        """What batches and steps may ask for on the devices."""
        return self._job.budget.hbm_bytes / LENT - self._hbm_used

    def file_rows(self, spec: TableSpec) -> int:
        """Rows of a parameter file: a partition fills one in memory and writes two, in its part of the budget."""
        in_memory = FILES_IN_MEMORY * -(-self._job.cluster.partitions // self._nodes)
        wanted = self.memory_bytes(spec) // BUFFERS // in_memory // (spec.layout.row_bytes + KEY_BYTES)
        return int(min(max(wanted // 64 * 64, 64), default_file_rows(spec.layout)))

    def rows(self, flight: Flight, tables: Sequence[NodeTable]) -> int:
        """Distinct keys of one batch that fit devices and cache, if tables have their parts of them as in `flight`."""
        keys = [len(working_set.keys) for working_set in flight.sets]
        served = (self._served_rows(table) / max(here, 1) for here, table in zip(keys, tables, strict=True))
        return int(max(sum(keys), 1) * max(0.0, min(self._fitting(flight), *served)))

    def check(self, examples: int, keys: int) -> None:
        """CapacityError if a step of so many examples with at least so many keys each cannot fit, whatever its rows."""
        depth, hbm_bytes = self._job.train.depth, self._job.budget.hbm_bytes
        bags = sum(len(spec.slots) for spec in self._specs)
        pooled = sum(len(spec.slots) * spec.dim for spec in self._specs)
        batch = examples * (4 * keys + 8 * bags)
        step = examples * (4 * sum(self._job.model.layers) + STEP_BYTES + SORT_BYTES * keys + 4 * pooled)
        needed = int(LENT * (self._hbm_used + (depth + 1) * batch + DEDUP_BYTES * examples * keys + step))
        if needed > hbm_bytes:
            raise CapacityError(
                f"one step needs at least {needed:,} bytes on this node's devices, without a single row: {step:,} to "
                f"compute with, {batch:,} of each of {depth + 1} batches ({examples:,} examples with at least {keys} "
                f"keys), {self._hbm_used:,} for the network and for batches as they are read; budget.hbm_bytes is "
                f"{hbm_bytes:,}: raise it, lower train.depth, or use smaller steps"
            )

    def _fitting(self, flight: Flight) -> float:
        """What part of the batch fits the devices, beside those in flight and what one step needs; over 1 if all."""
        steps = len(flight.step_starts) - 1
        batch, search, dedup = 0, 0, 0
        step = flight.examples * (4 * sum(self._job.model.layers) + STEP_BYTES)
        for spec, working_set in zip(self._specs, flight.sets, strict=True):
            rows, occurrences = len(working_set.keys), len(working_set.row_of)
            batch += rows * (_row_bytes(spec) + 4 * (self._nodes - 1))  # and its numbers at the peers
            batch += 4 * occurrences + working_set.offsets.nbytes
            search += rows * SEARCH_BYTES
            dedup = max(dedup, DEDUP_BYTES * occurrences)
            step += occurrences * SORT_BYTES + 4 * flight.examples * len(spec.slots) * spec.dim
            step += 8 * rows * spec.dim if self._nodes > 1 else 0  # sums to exchange
        return (self._device_bytes - step / steps) / max((self._job.train.depth + 1) * batch + search + dedup, 1)

    def _served_rows(self, table: NodeTable) -> int:
        """Rows of one batch that fit the cache, also after the disk tier has grown.

        Until a batch whose keys are known is pulled, all that is cached now may be evicted, and all rows of the batches
        before it: the index takes memory for each of them from the cache, and buffers for files are made.
        """
        mem, memory_bytes = table.mem, self.memory_bytes(table.spec)
        row_bytes = mem.freed_row_bytes
        buffers = FILES_IN_MEMORY * table.store.file_bytes - table.store.buffer_bytes
        growth = INDEX_BYTES * mem.cached_rows + buffers - (memory_bytes - mem.used_bytes)
        left = mem.cache_rows - max(0, growth) / row_bytes
        return max(1, min(int(left / (1 + INDEX_BYTES * self._job.train.depth / row_bytes)), mem.batch_rows))

    def fit(self, rank: int, flight: Flight, tables: Sequence[NodeTable], shares: int = 1) -> Fit:
        """Whether the batch fits the devices here, and what it asks of whom; CapacityError if one step is too much."""
        steps = len(flight.step_starts) - 1
        asked: tuple[tuple[int, ...], ...]
        if self._nodes > 1:
            asked = tuple(tuple(np.diff(flight.owners[spec.name].starts).tolist()) for spec in self._specs)
        else:
            asked = tuple((len(working_set.keys),) for working_set in flight.sets)
        fitting = self._fitting(flight)
        if steps == 1:
            wanted = [max(rows) for rows in asked]  # of one owner, by table
            served = [int(table.mem.batch_rows) for table in tables]
            tightest = max(range(len(tables)), key=lambda number: (wanted[number] > served[number], wanted[number]))
            if fitting < 1 or wanted[tightest] > served[tightest]:
                self._refuse(flight, tightest, fitting, served[tightest])
        on_devices = steps if fitting >= 1 else max(1, int(steps * fitting * SLACK))
        return Fit(rank, on_devices, asked, tuple(map(self._served_rows, tables)), shares)

    def _refuse(self, flight: Flight, table: int, fitting: float, served: int) -> NoReturn:
        budget, depth, here = self._job.budget, self._job.train.depth, len(flight.sets[table].keys)
        raise CapacityError(
            f"step {flight.token.first_step} alone needs {here:,} distinct rows of table {self._specs[table].name!r}, "
            f"but this node fits {min(max(int(fitting * here), 0), served):,}: raise budget.hbm_bytes "
            f"({budget.hbm_bytes:,}) or budget.memory_bytes ({budget.memory_bytes:,}), lower train.depth ({depth}), or "
            "use smaller steps"
        )
