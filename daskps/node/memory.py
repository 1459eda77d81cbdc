"""The memory of a node: division of the budgets over tables, batches in flight and input data, and checks of what fits.

Input: a job's budgets and the distinct keys of a batch. Output: how many steps of it fit, how many batches may be read
ahead, and all terms of a node (`projected_terms`). The formulas are in `daskps.budget`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from daskps import budget
from daskps.budget import (
    INDEX_BYTES,
    KEY_BYTES,
    SEGMENTS_IN_MEMORY,
    BudgetName,
    TableLoad,
    Term,
    capacity_error,
    total_bytes,
)
from daskps.build import FILE_BLOCKS_FRACTION, Features, build_network, features, job_schema, table_specs
from daskps.config import Job
from daskps.data.formats import FORMATS
from daskps.data.order import Steps
from daskps.device.device import CpuDevice, chosen_backend
from daskps.device.pool import ComputePool
from daskps.errors import CapacityError
from daskps.hbm.table import TableSpec
from daskps.mem.memps import MemPS
from daskps.node.batches import NodeBatch, NodeTable
from daskps.node.dask import MACHINE_BYTES
from daskps.reports import Forecast, Growth
from daskps.ssd.format import default_file_rows
from daskps.types import Batch

USED_FRACTION = 0.9  # of the computed steps: a shorter batch has more distinct keys per step


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
                fitting = min(fitting, max(1, int(steps * capacity * USED_FRACTION / wanted)))
    return fitting


INPUT_FRACTION = 1 / 4  # of a budget: examples of batches, unless a single step needs more
MAX_INPUT_FRACTION = 1 / 2  # of a budget: all that reading may take; the rest is for rows
UNKNOWN_ROWS = 1 << 62  # examples of files that have not been opened


def raw_bytes(batch: Batch) -> int:
    """Return the size of a batch's arrays in bytes."""
    arrays = (batch.labels, batch.keys, batch.offsets, batch.weights, batch.dense, batch.example_weights)
    return sum(array.nbytes for array in arrays if array is not None)


def bounded_keys(job: Job, features: Features) -> tuple[int, bool]:
    """Return the smallest number of keys that an example can have, and True if every example has exactly that many."""
    if job.data.osrp is not None or FORMATS[job.data.format].any_number_of_keys:
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
        *,
        rows: int,  # examples of all passes
        file_bytes: int = 0,  # blocks of files that readers hold at the same time
        on_cpu: bool,
    ) -> None:
        self._job, self._depth, self._on_cpu = job, job.train.depth, on_cpu
        first, last = steps.slice(0, rows)
        self.least_keys, known = bounded_keys(job, features)
        self._known = known or first == last  # a node without examples cannot learn their size
        label_and_status = 8
        bags = label_and_status + 8 * len(features.slots) + 4 * features.dense + (4 if job.data.weight else 0)
        # A lower bound at first; after a read, the largest bytes per example of any batch so far.
        self._example_bytes: float = bags + 8 * self.least_keys
        one_pass = rows // job.train.epochs
        window = min(job.data.shuffle_window_rows, one_pass) * (self._example_bytes + 8)  # 8: its place in the order
        self._file_bytes, self._window_bytes = file_bytes, int(window)
        self.step_examples = max(1, last - first)
        self._all_steps = steps.count(one_pass)
        if job.train.batch_examples is not None:
            self._all_steps = min(self._all_steps, max(1, job.train.batch_examples // job.train.minibatch_examples))
        batch = self._all_steps * self.step_examples
        wanted = self._example_bytes * batch if self._known else job.budget.hbm_bytes + job.budget.memory_bytes
        self._whole = job.merges_batches  # then a batch must be read in one piece
        share = int(self._budget_bytes * INPUT_FRACTION) // (self._depth + 1)
        allowed = wanted if self._whole and self._known else share
        self.share_bytes = int(max(min(wanted, allowed), self._step_bytes))

    @property
    def _budget(self) -> BudgetName:
        """Name of the budget that examples of batches count against.

        Without a GPU it is hbm_bytes, because the rows made of them for the CPU stand-ins are in the same memory.
        """
        return "hbm_bytes" if self._on_cpu else "memory_bytes"

    @property
    def _budget_bytes(self) -> int:
        return int(getattr(self._job.budget, self._budget))

    @property
    def _step_bytes(self) -> float:
        """Bytes of the examples of one step."""
        return self.step_examples * self._example_bytes

    @property
    def batches_bytes(self) -> int:
        """Bytes for examples of batches: `depth` that are ready and one that is being read."""
        return (self._depth + 1) * self.share_bytes

    def terms(self) -> list[Term]:
        """Return the terms of input data."""
        return [
            Term("file blocks", self._file_bytes),
            Term("shuffle window", self._window_bytes),
            Term("input batches", self.batches_bytes, self._budget),
        ]

    def check(self) -> None:
        """Raise CapacityError, before anything is read, if reading leaves too little memory for rows."""
        terms, budgets = self.terms(), self._job.budget
        allowed = {
            "memory_bytes": int(budgets.memory_bytes * MAX_INPUT_FRACTION),
            "hbm_bytes": int(budgets.hbm_bytes * MAX_INPUT_FRACTION),
        }
        if self.batches_bytes > allowed[self._budget]:
            raise capacity_error(
                f"{self._depth} batches in flight of one step each, and one that is read, take {self.batches_bytes:,} "
                f"bytes as they are read ({self.step_examples:,} examples of {self._example_bytes:.0f} bytes here), "
                f"more than half of budget.{self._budget} ({self._budget_bytes:,}); the rest is for their rows",
                terms,
                {self._budget: allowed[self._budget]},
                f"raise budget.{self._budget}, lower train.depth, or use smaller steps",
            )
        if total_bytes(terms, "memory_bytes") > allowed["memory_bytes"]:
            raise capacity_error(
                f"reading takes {self._file_bytes + self._window_bytes:,} bytes for blocks of files (row groups of "
                f"Parquet, windows that are shuffled), more than half of budget.memory_bytes "
                f"({budgets.memory_bytes:,}); the rest is for rows",
                terms,
                {"memory_bytes": allowed["memory_bytes"]},
                "raise budget.memory_bytes, lower data.shuffle_window_rows, or write files with smaller row groups",
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


WRITE_BUFFERS_FRACTION = 1 / 10  # of a table's memory: write buffers of segments
FORECAST_MARGIN = 1.1  # factor on the recommended memory_bytes, because a forecast is not exact
FORECAST_REACH = 4  # no forecast beyond 4 times the current position: at first nearly all keys are new


def check_memory(job: Job, *, on_cpu: bool, nodes_here: int = 1, limit_bytes: int | None = None) -> None:
    """Raise CapacityError if the budgets exceed the memory of this machine (or cgroup), or the Dask worker's limit.

    CPU stand-ins for devices use the same memory. The operating system would grant the memory, and kill the node when
    it is used.
    """
    budgets = job.budget
    one = budgets.memory_bytes + (budgets.hbm_bytes if on_cpu else 0)
    for nodes, allowed in ((1, limit_bytes or MACHINE_BYTES), (nodes_here, MACHINE_BYTES)):
        if nodes * one > allowed:
            hbm = f" and budget.hbm_bytes ({budgets.hbm_bytes:,}, in memory where there is no GPU)" if on_cpu else ""
            raise CapacityError(
                f"{nodes} node{'s' if nodes > 1 else ''} with budget.memory_bytes ({budgets.memory_bytes:,}){hbm} "
                f"may use {nodes * one:,} bytes, but here {allowed:,} are allowed: lower the budgets"
            )


class NodeBudget:
    """Division of one node's budgets, and the checks of what fits. `fixed` are the terms that are not for rows."""

    def __init__(self, job: Job, specs: Sequence[TableSpec], nodes: int, fixed: Sequence[Term]) -> None:
        self._job, self._specs, self._nodes = job, specs, nodes
        self._fixed = {name: [term for term in fixed if term.budget == name] for name in ("memory_bytes", "hbm_bytes")}
        self._growth: dict[str, tuple[int, Growth]] = {}  # by table: rows when it was opened, and their growth since
        self._index_bytes: dict[str, int] = {}  # by table: forecast for the end of the data

    # -- the index of the disk tier --------------------------------------------------------------------------------

    def foresee(
        self, rank: int, position: int, stop_position: int, flight: NodeBatch, tables: Sequence[NodeTable]
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
            fixed = SEGMENTS_IN_MEMORY * table.store.file_bytes + known - INDEX_BYTES * len(table.store)
            self._index_bytes[name] = fixed + INDEX_BYTES * rows
            step_rows = min(-(-len(working_set.row_of) // steps), len(working_set.keys), mem.budget.cache_rows)
            left = mem.budget.memory_bytes - mem.budget.shrunk(step_rows).cache_bytes
            if self._index_bytes[name] > left:
                ends = growth.position_at((left - fixed) // INDEX_BYTES)
                if ends <= FORECAST_REACH * position:
                    memory_bytes = self._enough(table.spec, mem, step_rows)
                    found.append(Forecast(rank, name, rows, self._index_bytes[name], ends, memory_bytes))
        return min(found, key=lambda one: one.position, default=None)

    def _enough(self, spec: TableSpec, mem: MemPS, rows: int) -> int:
        """Return a budget.memory_bytes with which `rows` rows fit beside the disk index up to the end of the data."""
        now = mem.used_bytes - mem.budget.cache_bytes  # lower bound of the index: the cache may have shrunk
        index = max(self._index_bytes.get(spec.name, 0), now)
        memory_bytes = mem.budget.memory_bytes
        while True:
            memory_bytes = int(memory_bytes * 1.03) + 1
            whole = budget.largest_cache(
                memory_bytes,
                store_bytes=min(max(now, 0), memory_bytes // 2),
                row_bytes=spec.layout.row_bytes,
                nodes=self._nodes,
            )
            holds = rows < min(whole.cache_rows, whole.flight_rows)
            if holds and whole.shrunk(rows).cache_bytes + index <= memory_bytes:
                break
        weights = self._weights
        total = self._fixed_bytes("memory_bytes") + memory_bytes * sum(weights.values()) / weights[spec.name]
        return -(-int(FORECAST_MARGIN * total) // 1_000_000) * 1_000_000

    def remedy(self, spec: TableSpec, mem: MemPS, rows: int) -> str:
        """Return advice on the budget with which `rows` rows of one batch fit beside the disk index."""
        budget_bytes, enough = self._job.budget.memory_bytes, self._enough(spec, mem, rows)
        return f"raise budget.memory_bytes ({budget_bytes:,}) to at least {enough:,}" + (
            ", which the whole run is expected to need" if spec.name in self._index_bytes else ""
        )

    # -- shares of the tables --------------------------------------------------------------------------------------

    def memory_bytes(self, spec: TableSpec) -> int:
        """Return a table's share of the memory for rows."""
        return self._share(self._job.budget.memory_bytes - self._fixed_bytes("memory_bytes"), spec)

    def disk_bytes(self, spec: TableSpec) -> int | None:
        """Return a table's share of budget.disk_bytes; None if there is no such budget."""
        budget = self._job.budget.disk_bytes
        return None if budget is None else self._share(budget, spec)

    @property
    def _weights(self) -> dict[str, int]:
        """Row bytes of one example in each table: tables share the budgets in this proportion."""
        return {spec.name: len(spec.slots) * spec.layout.row_bytes for spec in self._specs}

    def _share(self, count: int, spec: TableSpec) -> int:
        return count * self._weights[spec.name] // sum(self._weights.values())

    def _fixed_bytes(self, name: BudgetName) -> int:
        """Bytes of a budget that are not for rows."""
        return total_bytes(self._fixed[name])

    def file_rows(self, spec: TableSpec) -> int:
        """Return the rows of a segment, such that SEGMENTS_IN_MEMORY segments per partition fit the write buffers."""
        in_memory = SEGMENTS_IN_MEMORY * -(-self._job.cluster.partitions // self._nodes)
        buffers = int(self.memory_bytes(spec) * WRITE_BUFFERS_FRACTION)
        wanted = buffers // in_memory // (spec.layout.row_bytes + KEY_BYTES)
        return int(min(max(wanted // 64 * 64, 64), default_file_rows(spec.layout)))

    # -- one batch -------------------------------------------------------------------------------------------------

    def rows(self, flight: NodeBatch, tables: Sequence[NodeTable]) -> int:
        """Return how many distinct keys of one batch fit devices and cache, divided over tables as in `flight`."""
        keys = [len(working_set.keys) for working_set in flight.sets]
        served = (self._served_rows(table) / max(here, 1) for here, table in zip(keys, tables, strict=True))
        return int(max(sum(keys), 1) * max(0.0, min(self._fraction_that_fits(flight), *served)))

    def device_terms(self, loads: Sequence[TableLoad], examples: int, steps: int) -> tuple[list[Term], list[Term]]:
        """Return the terms of one step, and of all batches on the devices, for a batch of this size."""
        layers, batches = self._job.model.layers, self._job.train.depth + 1
        step = budget.step_terms(loads, examples=examples, steps=steps, layers=layers, nodes=self._nodes)
        return step, budget.batch_terms(loads, examples=examples, batches=batches, nodes=self._nodes)

    def hbm_terms(self, loads: Sequence[TableLoad], examples: int, steps: int) -> list[Term]:
        """Return all terms of hbm_bytes with a batch of this size."""
        step, batch = self.device_terms(loads, examples, steps)
        return budget.pooled([*self._fixed["hbm_bytes"], *step, *batch])

    def check(self, examples: int, keys: int) -> None:
        """Raise CapacityError if a step of `examples` with `keys` keys each cannot fit, even without its rows."""
        depth, hbm_bytes = self._job.train.depth, self._job.budget.hbm_bytes
        terms = self.hbm_terms(table_loads(self._specs, examples, examples * keys, 0), examples, 1)
        if total_bytes(terms) > hbm_bytes:
            raise capacity_error(
                f"one step needs at least {total_bytes(terms):,} bytes on this node's devices, without a single row "
                f"({examples:,} examples with at least {keys} keys, {depth + 1} batches of one step each); "
                f"budget.hbm_bytes is {hbm_bytes:,}",
                terms,
                {"hbm_bytes": hbm_bytes},
                "raise budget.hbm_bytes, lower train.depth, or use smaller steps",
            )

    def _loads(self, flight: NodeBatch) -> list[TableLoad]:
        return [
            _load(spec, len(working_set.keys), len(working_set.row_of))
            for spec, working_set in zip(self._specs, flight.sets, strict=True)
        ]

    def _fraction_that_fits(self, flight: NodeBatch) -> float:
        """Return the fraction of the batch that fits the devices; at least 1 if all of it does."""
        terms = self.device_terms(self._loads(flight), flight.examples, len(flight.step_starts) - 1)
        return budget.fraction_that_fits(self._job.budget.hbm_bytes, self._fixed["hbm_bytes"], *terms)

    def _served_rows(self, table: NodeTable) -> int:
        """Return the rows of one batch that fit the cache, even after the disk index has grown.

        Worst case until this batch is pulled: every cached row and every row of earlier batches is evicted, each
        costing INDEX_BYTES, and all write buffers exist.
        """
        mem, memory_bytes = table.mem, self.memory_bytes(table.spec)
        row_bytes = mem.freed_row_bytes
        buffers = SEGMENTS_IN_MEMORY * table.store.file_bytes - table.store.buffer_bytes
        growth = INDEX_BYTES * mem.cached_rows + buffers - (memory_bytes - mem.used_bytes)
        left = mem.cache_rows - max(0, growth) / row_bytes
        return max(1, min(int(left / (1 + INDEX_BYTES * self._job.train.depth / row_bytes)), mem.batch_rows))

    def fit(self, rank: int, flight: NodeBatch, tables: Sequence[NodeTable], shares: int = 1) -> CapacityReport:
        """Return this node's capacity report for a batch; raise CapacityError if it is one step and does not fit."""
        steps = len(flight.step_starts) - 1
        asked: tuple[tuple[int, ...], ...]
        if self._nodes > 1:
            asked = tuple(tuple(np.diff(flight.owners[spec.name].starts).tolist()) for spec in self._specs)
        else:
            asked = tuple((len(working_set.keys),) for working_set in flight.sets)
        fitting = self._fraction_that_fits(flight)
        if steps == 1:
            wanted = [max(rows) for rows in asked]  # by table: the most rows asked of one owner
            served = [int(table.mem.batch_rows) for table in tables]
            tightest = max(range(len(tables)), key=lambda number: (wanted[number] > served[number], wanted[number]))
            if fitting < 1:
                raise self._devices_too_small(flight, tightest, min(max(fitting, 0.0), 1.0), served[tightest])
            if wanted[tightest] > served[tightest]:
                raise self._cache_too_small(flight, tables[tightest], tightest, wanted[tightest])
        on_devices = steps if fitting >= 1 else max(1, int(steps * fitting * USED_FRACTION))
        return CapacityReport(rank, on_devices, asked, tuple(map(self._served_rows, tables)), shares)

    def _devices_too_small(self, flight: NodeBatch, table: int, fitting: float, served: int) -> CapacityError:
        """Return the error for a single step whose rows do not fit the devices."""
        budgets, here = self._job.budget, len(flight.sets[table].keys)
        return capacity_error(
            self._too_many_rows(flight, table, min(int(fitting * here), served)),
            self.hbm_terms(self._loads(flight), flight.examples, 1),
            {"hbm_bytes": budgets.hbm_bytes},
            f"raise budget.hbm_bytes ({budgets.hbm_bytes:,}) or budget.memory_bytes ({budgets.memory_bytes:,}), lower "
            f"train.depth ({self._job.train.depth}), or use smaller steps",
        )

    def _cache_too_small(self, flight: NodeBatch, table: NodeTable, number: int, wanted: int) -> CapacityError:
        """Return the error for a single step that asks one owner for more rows than its cache can hold."""
        mem = table.mem
        return capacity_error(
            self._too_many_rows(flight, number, min(len(flight.sets[number].keys), int(mem.batch_rows))),
            mem.terms_for(wanted, table.spec.name),
            {"memory_bytes": mem.budget.memory_bytes},
            self.remedy(table.spec, mem, wanted),
        )

    def _too_many_rows(self, flight: NodeBatch, table: int, fit: int) -> str:
        return (
            f"step {flight.token.first_step} alone needs {len(flight.sets[table].keys):,} distinct rows of table "
            f"{self._specs[table].name!r}, but this node fits {fit:,}"
        )


def _load(spec: TableSpec, rows: int, occurrences: int) -> TableLoad:
    return TableLoad(spec.name, spec.layout.row_bytes, spec.dim, len(spec.slots), rows, occurrences)


def table_loads(specs: Sequence[TableSpec], examples: int, keys: int, distinct_keys: int) -> list[TableLoad]:
    """Return the load of each table for a batch with so many keys, which are spread evenly over all slots."""
    slots = sum(len(spec.slots) for spec in specs)
    shares = [len(spec.slots) / slots for spec in specs]
    return [
        _load(spec, round(distinct_keys * share), round(keys * share))
        for spec, share in zip(specs, shares, strict=True)
    ]


def projected_terms(
    job: Job,
    *,
    nodes: int,
    rows: Mapping[str, int],
    examples: int,
    keys: int,
    distinct_keys: int,
    cores: int | None = None,
) -> list[Term]:
    """Return all terms of one of `nodes` nodes, without opening data or model.

    `rows` are the live rows of each table of the whole model. The others are the size of a batch on one node. What is
    left of memory_bytes goes to the cache. Of files only upper bounds are known.
    """
    known = features(job)
    specs, train = table_specs(job, known), job.train
    steps = Steps(train.minibatch_examples, nodes, 0, job.cluster.devices, train.block_examples)
    data = job.data.synthetic
    on_cpu = job.cluster.backend != "cuda" and chosen_backend(job.cluster.backend) == "cpu"  # the GPU may be elsewhere
    reading = InputBudget(
        *(job, known, steps),
        rows=UNKNOWN_ROWS if data is None else data.examples * train.epochs,
        file_bytes=int(job.budget.memory_bytes * FILE_BLOCKS_FRACTION) if data is None else 0,
        on_cpu=on_cpu,
    )
    with ComputePool(1) as pool:
        network = build_network(job, specs, known, CpuDevice(0, pool))
        size = network.size_bytes(cores or job.cluster.cores or len(os.sched_getaffinity(0)))
    fixed = [*reading.terms(), Term("network", size, "hbm_bytes")]
    room = NodeBudget(job, specs, nodes, fixed)
    terms = [term for term in fixed if term.budget == "memory_bytes"]
    partitions = -(-job.cluster.partitions // nodes)
    for spec in specs:
        row_bytes, live = spec.layout.row_bytes, -(-rows.get(spec.name, 0) // nodes)
        store = [
            Term("index", INDEX_BYTES * live, table=spec.name),
            Term(
                "write buffers",
                SEGMENTS_IN_MEMORY * partitions * room.file_rows(spec) * (row_bytes + KEY_BYTES),
                table=spec.name,
            ),
        ]
        sizes = (room.memory_bytes(spec), total_bytes(store), row_bytes, nodes)
        try:
            cache = budget.largest_cache(sizes[0], store_bytes=sizes[1], row_bytes=row_bytes, nodes=nodes)
        except CapacityError:
            cache = budget.cache_of(1, *sizes)  # the sum shows that it does not fit
        terms += [*store, *cache.cache_terms(spec.name)]
    count = max(1, round(examples / reading.step_examples))
    terms += room.hbm_terms(table_loads(specs, examples, keys, distinct_keys), examples, count)
    for spec in specs:
        terms += budget.disk_terms(-(-rows.get(spec.name, 0) // nodes), spec.layout.row_bytes, spec.name)
    return terms
