"""The memory of a node: division of the budgets over tables, batches in flight and input data, and checks of what fits.

Input: a job's budgets and the distinct keys of a batch. Output: how many steps of it fit, and how many batches may be
read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from distributed.system import MEMORY_LIMIT

from daskps import budget
from daskps.build import Features, StepReader, job_schema, of_files
from daskps.config import Job
from daskps.data.order import Steps
from daskps.errors import CapacityError
from daskps.hbm.table import TableSpec
from daskps.mem.memps import MemPS
from daskps.node.batches import Flight, NodeTable
from daskps.reports import Forecast, Growth
from daskps.ssd.format import KEY_BYTES, default_file_rows
from daskps.storage.partition import KeyPartition
from daskps.types import Batch

SLACK = 0.9  # fraction of the computed steps that is used: a shorter batch has more distinct keys per step


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Capacity report of one node for a batch, made when its keys are known. A few numbers per table and node."""

    rank: int
    device_steps: int  # steps, from the batch's first, whose rows fit the devices of this node
    asked: tuple[tuple[int, ...], ...]  # by table: number of distinct keys that it will pull from each rank
    capacity: tuple[int, ...]  # by table: rows of one batch that this node can serve to all nodes together
    shares: int = 1  # input-memory shares used by the batch on this node; there is one share per batch in flight


def steps_that_fit(steps: int, fits: Sequence[CapacityReport]) -> int:
    """Return how many steps, from the batch's first, fit on all nodes; at least 1.

    If not even one step fits, the node has raised CapacityError before. A key that several nodes ask for is counted
    several times: which keys are shared is known only after the pull, when the batch can no longer be split.
    """
    fitting = min(fit.device_steps for fit in fits)
    for owner in fits:
        for table, capacity in enumerate(owner.capacity):
            wanted = sum(fit.asked[table][owner.rank] for fit in fits)
            if wanted > capacity:
                fitting = min(fitting, max(1, int(steps * capacity * SLACK / wanted)))
    return fitting


LINES_OF_TOKENS = ("libsvm", "libffm", "multislot")  # formats in which any slot may have any number of keys
READING = 4  # examples of batches take at most 1/4 of the budget, unless a single step needs more
MOST_READING = 2  # reading takes at most 1/2 of a budget; the rest is for rows


def raw_bytes(batch: Batch) -> int:
    """Return the size of a batch's arrays in bytes."""
    arrays = (batch.labels, batch.keys, batch.offsets, batch.weights, batch.dense, batch.example_weights)
    return sum(array.nbytes for array in arrays if array is not None)


def bounded_keys(job: Job, features: Features) -> tuple[int, bool]:
    """Return the smallest number of keys that an example can have, and True if every example has exactly that many."""
    if job.data.osrp is not None or job.data.format in LINES_OF_TOKENS:
        return 0, False
    if job.data.synthetic is not None:
        return len(features.slots) * job.data.synthetic.keys_per_bag, True
    slots = job_schema(job).slots
    least = sum(slot.kind != "multi" and slot.missing_key for slot in slots)
    return least, least == len(slots)


class InputBudget:
    """Budget of input data: `depth` batches in flight, one batch that is being read, and the blocks of files."""

    def __init__(
        self,
        job: Job,
        features: Features,
        steps: Steps,
        training: StepReader,
        validation: StepReader | None = None,
        *,
        on_cpu: bool,
    ) -> None:
        self._job, self._depth, self._on_cpu = job, job.train.depth, on_cpu
        first, last = steps.slice(0, training.rows)
        self.least_keys, known = bounded_keys(job, features)
        self._known = known or first == last  # a node without examples cannot learn their size
        label_and_status = 8
        bags = label_and_status + 8 * len(features.slots) + 4 * features.dense + (4 if job.data.weight else 0)
        # A lower bound at first; after a read, the largest bytes per example of any batch so far.
        self._example_bytes: float = bags + 8 * self.least_keys
        files = [reader for reader in map(of_files, (training, validation)) if reader is not None]
        rows = training.rows // job.train.epochs
        window = min(job.data.shuffle_window_rows, rows) * (self._example_bytes + 8)  # 8: its place in the order
        self._blocks_bytes = int(window) + sum(reader.held_bytes for reader in files)
        self.step_examples = max(1, last - first)
        self._all_steps = steps.count(rows)
        if job.train.batch_examples is not None:
            self._all_steps = min(self._all_steps, max(1, job.train.batch_examples // job.train.minibatch_examples))
        batch = self._all_steps * self.step_examples
        wanted = self._example_bytes * batch if self._known else job.budget.hbm_bytes + job.budget.memory_bytes
        self._whole = job.merges_batches  # then a batch must be read in one piece
        allowed = wanted if self._whole and self._known else self._budget[1] // READING // (self._depth + 1)
        self.share_bytes = int(max(min(wanted, allowed), self._step_bytes))
        for reader in files:
            reader.bound(self.batches_bytes)

    @property
    def _budget(self) -> tuple[str, int]:
        """Name and size of the budget that examples of batches count against.

        Without a GPU it is hbm_bytes, because the rows made of them for the CPU stand-ins are in the same memory.
        """
        budget = self._job.budget
        return ("hbm_bytes", budget.hbm_bytes) if self._on_cpu else ("memory_bytes", budget.memory_bytes)

    @property
    def _step_bytes(self) -> float:
        """Bytes of the examples of one step."""
        return self.step_examples * self._example_bytes

    @property
    def batches_bytes(self) -> int:
        """Bytes for examples of batches: `depth` that are ready and one that is being read."""
        return (self._depth + 1) * self.share_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes that reading takes of budget.memory_bytes."""
        return self._blocks_bytes + (0 if self._on_cpu else self.batches_bytes)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that reading takes of budget.hbm_bytes: only with CPU stand-ins, whose memory is the node's."""
        return self.batches_bytes if self._on_cpu else 0

    def check(self) -> None:
        """Raise CapacityError, before anything is read, if reading leaves too little memory for rows."""
        name, budget_bytes = self._budget
        if self.batches_bytes > budget_bytes // MOST_READING:
            raise CapacityError(
                f"{self._depth} batches in flight of one step each, and one that is read, take {self.batches_bytes:,} "
                f"bytes as they are read ({self.step_examples:,} examples of {self._example_bytes:.0f} bytes here), "
                f"more than half of budget.{name} ({budget_bytes:,}); the rest is for their rows: raise it, lower "
                f"train.depth, or use smaller steps"
            )
        memory_bytes = self._job.budget.memory_bytes
        if self.memory_bytes > memory_bytes // MOST_READING:
            raise CapacityError(
                f"reading takes {self._blocks_bytes:,} bytes for blocks of files (row groups of Parquet, windows that "
                f"are shuffled), more than half of budget.memory_bytes ({memory_bytes:,}); the rest is for rows: raise "
                f"it, lower data.shuffle_window_rows, or write files with smaller row groups"
            )

    def steps(self) -> int:
        """Return the largest number of steps of one read, by the size of examples so far; 1 until that is known."""
        if self._whole:
            return self._all_steps
        return max(1, int(self.share_bytes / self._step_bytes)) if self._known else 1

    def shares(self, batch: Batch) -> int:
        """Return the input-memory shares used by this batch; above 1 if its examples are larger than any before."""
        taken = raw_bytes(batch)
        if batch.examples:
            self._example_bytes, self._known = max(self._example_bytes, taken / batch.examples), True
        return max(1, -(-taken // self.share_bytes))


BUFFERS = 10  # write buffers of segments take 1/10 of a table's memory
FILES_IN_MEMORY = 3  # segments of a partition in memory: one is filled, two are written
INDEX_BYTES = 12  # per key in the disk tier's index
SORT_BYTES = 48  # per key occurrence, while the occurrences of a step and of the next one are grouped by row
DEDUP_BYTES = 16  # per key occurrence, while distinct keys are found; one batch at a time
SEARCH_BYTES = 32  # per row, for a hash table that is at most half full; one batch at a time is searched
STEP_BYTES = 64  # per example, beside its activations: loss, weight, probability, inputs of the metrics
MORE = 1.1  # factor on the recommended memory_bytes, because a forecast is not exact
FAR = 4  # no forecast beyond 4 times the current position: at first nearly all keys are new
LENT = 1.25  # overhead of the buffer pool: memory comes in whole pages, and a buffer is reused for smaller arrays


def check_memory(job: Job, *, on_cpu: bool, nodes_here: int = 1, limit_bytes: int | None = None) -> None:
    """Raise CapacityError if the budgets exceed the memory of this machine (or cgroup), or the Dask worker's limit.

    CPU stand-ins for devices use the same memory. The operating system would grant the memory, and kill the node when
    it is used.
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
    """Return the bytes of one row in a batch's table: its fields and its key."""
    return spec.layout.row_bytes + KEY_BYTES


class NodeBudget:
    """Division of one node's budgets, and the checks of what fits."""

    def __init__(
        self,
        job: Job,
        specs: Sequence[TableSpec],
        partition: KeyPartition,
        memory_used: int,  # bytes of memory_bytes that are not for rows
        hbm_used: int,  # bytes of hbm_bytes that are not for rows
    ) -> None:
        self._job, self._specs, self._partition = job, specs, partition
        self._nodes = partition.nodes
        self._memory_used, self._hbm_used = memory_used, hbm_used
        self._growth: dict[str, tuple[int, Growth]] = {}  # by table: rows when it was opened, and their growth since
        self._index_bytes: dict[str, int] = {}  # by table: forecast for the end of the data

    # -- the index of the disk tier --------------------------------------------------------------------------------

    def foresee(
        self, rank: int, position: int, stop_position: int, flight: Flight, tables: Sequence[NodeTable]
    ) -> Forecast | None:
        """Return the forecast for the table whose disk index will first take too much memory; None if none will.

        Called for every pushed batch; `position` is its end. New rows come until `stop_position`, the end of a pass.
        """
        found = []
        steps = len(flight.step_starts) - 1
        for table, working_set in zip(tables, flight.sets, strict=True):
            name, mem = table.spec.name, table.mem
            begun, growth = self._growth.setdefault(name, (len(table.store), Growth(position, len(table.store))))
            rows_now = begun + mem.made_rows
            growth.add(position, rows_now)
            rows = growth.rows_at(stop_position) if position < stop_position else rows_now
            if rows is None:
                continue
            known = table.store.memory_bytes - table.store.buffer_bytes  # includes the fixed part of each partition
            fixed = FILES_IN_MEMORY * table.store.file_bytes + known - INDEX_BYTES * len(table.store)
            self._index_bytes[name] = fixed + INDEX_BYTES * rows
            step_rows = min(-(-len(working_set.row_of) // steps), len(working_set.keys), mem.budget.cache_rows)
            left = mem.budget.memory_bytes - self._beside_index(mem, step_rows)
            if self._index_bytes[name] > left:
                ends = growth.position_at((left - fixed) // INDEX_BYTES)
                if ends <= FAR * position:
                    memory_bytes = self._enough(table.spec, mem, step_rows)
                    found.append(Forecast(rank, name, rows, self._index_bytes[name], ends, memory_bytes))
        return min(found, key=lambda one: one.position, default=None)

    @staticmethod
    def _beside_index(mem: MemPS, rows: int) -> int:
        """Return the bytes that MEM-PS takes beside the disk index when its cache has shrunk to `rows` rows."""
        return mem.budget.shrunk(rows).used_bytes - mem.budget.store_bytes

    def _enough(self, spec: TableSpec, mem: MemPS, rows: int) -> int:
        """Return a budget.memory_bytes with which `rows` rows fit beside the disk index up to the end of the data."""
        now = mem.used_bytes - mem.budget.used_bytes + mem.budget.store_bytes  # lower bound: the cache may have shrunk
        index = max(self._index_bytes.get(spec.name, 0), now)
        memory_bytes = mem.budget.memory_bytes
        while True:
            memory_bytes = int(memory_bytes * 1.03) + 1
            whole = budget.split(
                memory_bytes,
                store_bytes=min(max(now, 0), memory_bytes // 2),
                row_bytes=spec.layout.row_bytes,
                nodes=self._nodes,
                lru_share=self._job.cluster.lru_share,
            )
            holds = rows < min(whole.cache_rows, whole.flight_rows)
            if holds and whole.shrunk(rows).used_bytes - whole.store_bytes + index <= memory_bytes:
                break
        weights = {other.name: len(other.slots) * other.layout.row_bytes for other in self._specs}
        total = self._memory_used + memory_bytes * sum(weights.values()) / weights[spec.name]
        return -(-int(MORE * total) // 1_000_000) * 1_000_000

    def remedy(self, spec: TableSpec, mem: MemPS, rows: int) -> str:
        """Return advice on the budget with which `rows` rows of one batch fit beside the disk index."""
        budget_bytes, enough = self._job.budget.memory_bytes, self._enough(spec, mem, rows)
        return f"raise budget.memory_bytes ({budget_bytes:,}) to at least {enough:,}" + (
            ", which the whole run is expected to need" if spec.name in self._index_bytes else ""
        )

    def memory_bytes(self, spec: TableSpec) -> int:
        """Return a table's share of the memory for rows."""
        return self._share(self._job.budget.memory_bytes - self._memory_used, spec)

    def disk_bytes(self, spec: TableSpec) -> int | None:
        """Return a table's share of budget.disk_bytes; None if there is no such budget."""
        budget = self._job.budget.disk_bytes
        return None if budget is None else self._share(budget, spec)

    def _share(self, count: int, spec: TableSpec) -> int:
        """Return a table's share of `count` bytes, in proportion to the row bytes of one example in each table."""
        weights = {other.name: len(other.slots) * other.layout.row_bytes for other in self._specs}
        return count * weights[spec.name] // sum(weights.values())

    @property
    def _device_bytes(self) -> float:
        """Bytes that batches and steps may allocate on the devices."""
        return self._job.budget.hbm_bytes / LENT - self._hbm_used

    def file_rows(self, spec: TableSpec) -> int:
        """Return the rows of a segment, such that FILES_IN_MEMORY segments per partition fit the write buffers."""
        in_memory = FILES_IN_MEMORY * -(-self._job.cluster.partitions // self._nodes)
        wanted = self.memory_bytes(spec) // BUFFERS // in_memory // (spec.layout.row_bytes + KEY_BYTES)
        return int(min(max(wanted // 64 * 64, 64), default_file_rows(spec.layout)))

    def rows(self, flight: Flight, tables: Sequence[NodeTable]) -> int:
        """Return how many distinct keys of one batch fit devices and cache, divided over tables as in `flight`."""
        keys = [len(working_set.keys) for working_set in flight.sets]
        served = (self._served_rows(table) / max(here, 1) for here, table in zip(keys, tables, strict=True))
        return int(max(sum(keys), 1) * max(0.0, min(self._fitting(flight), *served)))

    def check(self, examples: int, keys: int) -> None:
        """Raise CapacityError if a step of `examples` with `keys` keys each cannot fit, even without its rows."""
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
        """Return the fraction of the batch that fits the devices; at least 1 if all of it does.

        Counted beside it: the batches in flight and the memory of one step.
        """
        steps = len(flight.step_starts) - 1
        batch, search, dedup = 0, 0, 0
        step = flight.examples * (4 * sum(self._job.model.layers) + STEP_BYTES)
        for spec, working_set in zip(self._specs, flight.sets, strict=True):
            rows, occurrences = len(working_set.keys), len(working_set.row_of)
            batch += rows * (_row_bytes(spec) + 4 * (self._nodes - 1))  # 4: its position at each peer
            batch += 4 * occurrences + working_set.offsets.nbytes
            search += rows * SEARCH_BYTES
            dedup = max(dedup, DEDUP_BYTES * occurrences)
            step += occurrences * SORT_BYTES + 4 * flight.examples * len(spec.slots) * spec.dim
            step += 8 * rows * spec.dim if self._nodes > 1 else 0  # gradient sums to exchange
        return (self._device_bytes - step / steps) / max((self._job.train.depth + 1) * batch + search + dedup, 1)

    def _served_rows(self, table: NodeTable) -> int:
        """Return the rows of one batch that fit the cache, even after the disk index has grown.

        Worst case until this batch is pulled: every cached row and every row of earlier batches is evicted, each
        costing INDEX_BYTES, and all write buffers exist.
        """
        mem, memory_bytes = table.mem, self.memory_bytes(table.spec)
        row_bytes = mem.freed_row_bytes
        buffers = FILES_IN_MEMORY * table.store.file_bytes - table.store.buffer_bytes
        growth = INDEX_BYTES * mem.cached_rows + buffers - (memory_bytes - mem.used_bytes)
        left = mem.cache_rows - max(0, growth) / row_bytes
        return max(1, min(int(left / (1 + INDEX_BYTES * self._job.train.depth / row_bytes)), mem.batch_rows))

    def fit(self, rank: int, flight: Flight, tables: Sequence[NodeTable], shares: int = 1) -> CapacityReport:
        """Return this node's capacity report for a batch; raise CapacityError if it is one step and does not fit."""
        steps = len(flight.step_starts) - 1
        asked: tuple[tuple[int, ...], ...]
        if self._nodes > 1:
            asked = tuple(tuple(np.diff(flight.owners[spec.name].starts).tolist()) for spec in self._specs)
        else:
            asked = tuple((len(working_set.keys),) for working_set in flight.sets)
        fitting = self._fitting(flight)
        if steps == 1:
            wanted = [max(rows) for rows in asked]  # by table: the most rows asked of one owner
            served = [int(table.mem.batch_rows) for table in tables]
            tightest = max(range(len(tables)), key=lambda number: (wanted[number] > served[number], wanted[number]))
            if fitting < 1 or wanted[tightest] > served[tightest]:
                remedy = self.remedy(self._specs[tightest], tables[tightest].mem, wanted[tightest])
                self._refuse(flight, tightest, fitting, served[tightest], remedy if fitting >= 1 else "")
        on_devices = steps if fitting >= 1 else max(1, int(steps * fitting * SLACK))
        return CapacityReport(rank, on_devices, asked, tuple(map(self._served_rows, tables)), shares)

    def _refuse(self, flight: Flight, table: int, fitting: float, served: int, remedy: str) -> NoReturn:
        """Raise CapacityError for a single step that does not fit, with figures and a remedy."""
        budget, depth, here = self._job.budget, self._job.train.depth, len(flight.sets[table].keys)
        on_devices = (
            f"raise budget.hbm_bytes ({budget.hbm_bytes:,}) or budget.memory_bytes ({budget.memory_bytes:,}), lower "
            f"train.depth ({depth}), or use smaller steps"
        )
        raise CapacityError(
            f"step {flight.token.first_step} alone needs {here:,} distinct rows of table {self._specs[table].name!r}, "
            f"but this node fits {min(max(int(fitting * here), 0), served):,}: {remedy or on_devices}"
        )
