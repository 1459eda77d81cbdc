"""A node that is open: the job's parts put together on one worker, and what happens to them outside the stages.

In: a job, the workers of the run, the node's rank. Out: the open tiers, network and readers; snapshots prepared,
published and confirmed; evaluation at rest.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any, Literal

from daskps.backend.device import CpuDevice, Device, devices
from daskps.backend.pool import ComputePool
from daskps.backend.workspace import Workspace
from daskps.cluster.commit import Draft, ModelDirectory, Snapshot, follow, settle
from daskps.cluster.node import Flight, Flights, NodeTable
from daskps.config import Job
from daskps.data.order import Steps
from daskps.errors import CapacityError, ConfigError
from daskps.flow import inputs
from daskps.flow.parts import build_network, dense_optimizer, row_filler, table_specs
from daskps.flow.predict import Predictor
from daskps.flow.trainer import Trainer
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.memps import MemPS
from daskps.model import engine, network
from daskps.model.metrics import Metrics
from daskps.ssd import Options, Partitions
from daskps.ssd.format import KEY_BYTES, default_file_rows
from daskps.types import Floats, Keys

ROOM = 0.75  # of what fits now: the disk tier's index may grow until the batch is pulled


# Between the look at a batch's size and its pull, batches before it may add rows on disk, whose index takes memory from
# the cache: 4% a batch where half of the rows are new.
INDEX_MAY_GROW = 0.8
DISK_LEVELS = ("disk_bytes", "stale_rows", "files", "compactions", "compacted_rows")


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node tells the driver when it is open."""

    epoch: int
    directory: str
    snapshot: str | None  # that it was opened from
    batch: int  # the last one that the snapshot holds; -1 for a new model
    position: int
    rows: int  # of all epochs of the data
    steps: Steps
    validation_rows: int
    row_capacity: int  # distinct keys of one batch that fit this node
    metrics: dict[str, float]


class OpenNode:
    """The open node of one worker."""

    def __init__(self, run: str, rank: int, workers: list[str], job: Job, frame: Any = None) -> None:
        self.run, self.rank, self.nodes, self.job = run, rank, len(workers), job
        self.pool = ComputePool(job.cluster.cores or len(os.sched_getaffinity(0)))
        self.devices: list[Device] = devices(job.cluster.backend, job.cluster.devices, pool=self.pool)
        self.host = CpuDevice(0, self.pool)  # makes initial rows, which belong to MEM-PS
        self.features = inputs.features(job)
        self.specs = table_specs(job, self.features)
        self.directory = ModelDirectory(os.fspath(job.out))
        self.epoch = self.directory.begin_epoch(run)
        self.flights = Flights(run, self.epoch.number)
        self.training = inputs.open_training(job, self.pool, rank, self.nodes, frame)
        self.validation = inputs.open_validation(job, self.pool, rank, self.nodes)
        self.networks = self._networks()
        self.metrics = Metrics()
        self.snapshot = self.directory.snapshot()
        self.base: Snapshot | None = None  # of another model, that this new one starts from
        if self.snapshot is not None:
            self._take_up(self.directory, self.snapshot)
        elif job.start_from is not None:
            self._start_from(ModelDirectory(job.start_from))
        self.tables = [self._open_table(spec) for spec in self.specs]
        self.trainer = Trainer(
            self.devices,
            self.networks,
            dense_optimizer(job.model.optimizer),
            self.metrics,
            job.train.block_examples,
        )
        self.dedup_scratch = Workspace(self.devices[0])
        self.previous: list[HbmTable] = []
        self._captured: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}  # dense state of snapshots on their way

    # -- opening ---------------------------------------------------------------------------------------------------

    def _networks(self) -> list[network.Network]:
        """One replica per device; stand-ins share one."""
        job = self.job
        if self.devices[0].kind == "cpu":
            return [build_network(job, self.specs, self.features, engine.cpu(self.pool))] * len(self.devices)
        return [build_network(job, self.specs, self.features, engine.on(device)) for device in self.devices]

    def _take_up(self, directory: ModelDirectory, snapshot: Snapshot) -> None:
        """Go on from a snapshot, if it is of the same model."""
        known, asked = snapshot.draft.settings["result"], self.job.result_fields()
        if known != asked:
            other = ", ".join(name for name in asked if known.get(name) != asked[name])
            raise ConfigError(
                f"{directory.path} holds a model of other settings ({other}; snapshot {snapshot.id}): choose another "
                "`out`, or give the settings it was made with"
            )
        arrays = directory.load(snapshot)
        for replica in dict.fromkeys(self.networks):
            replica.load(
                {name.removeprefix("dense/"): value for name, value in arrays.items() if name.startswith("dense/")}
            )
        self.metrics.load(
            {name.removeprefix("metrics/"): value for name, value in arrays.items() if name.startswith("metrics/")}
        )

    def _start_from(self, base: ModelDirectory) -> None:
        """Begin with the rows and the network of another model, at the first row of the data, with fresh metrics."""
        self.base = base.snapshot()
        if self.base is None:
            raise ConfigError(f"start_from: {base.path} holds no model; check the path")
        self._take_up(base, self.base)
        self.metrics = Metrics()
        for spec in self.specs:
            target = f"{self.directory.path}/tables/{spec.name}"
            shutil.rmtree(target, ignore_errors=True)
            # Parameter files are never changed, so links will do where the file system has them.
            shutil.copytree(f"{base.path}/tables/{spec.name}", target, copy_function=_link_or_copy)

    def _open_table(self, spec: TableSpec) -> NodeTable:
        store = self._open_store(spec)
        mem = MemPS(
            layout=spec.layout,
            store=store,
            initial=row_filler(self.job, spec, self.host),
            memory_bytes=self._memory_bytes(spec),
            pool=self.pool,
            nodes=self.nodes,
            run=self.run,
            epoch=self.epoch.number,
            first_batch=0 if self.snapshot is None else self.snapshot.draft.batch + 1,
            lru_share=self.job.cluster.lru_share,
        )
        return NodeTable(spec, mem, store)

    def _open_store(self, spec: TableSpec) -> Partitions:
        """This node's partitions of a table, as the log says they are."""
        path, job = f"{self.directory.path}/tables/{spec.name}", self.job
        options = Options(disk_bytes=job.budget.disk_bytes)
        start = self.snapshot or self.base
        if start is None:
            # What a run left behind that never published is nobody's.
            self.directory.files.remove_folder(path)
            hash_kind: Literal["mixed", "modulo"] = "mixed" if job.cluster.partition_by == "hash" else "modulo"
            return Partitions.create(
                path,
                spec.layout,
                pool=self.pool,
                partitions=job.cluster.partitions,
                hash=hash_kind,
                file_rows=self._file_rows(spec),
                options=options,
            )
        store = Partitions.open(path, pool=self.pool, snapshot=start.id, options=options)
        for partition in store.stores.values():
            settle(partition, {start.id, *self.directory.state().live})
        return store

    def _file_rows(self, spec: TableSpec) -> int:
        """Rows of a parameter file: a partition fills one in memory and writes two, in a tenth of the budget."""
        in_memory = 3 * self.job.cluster.partitions
        wanted = self._memory_bytes(spec) // 10 // in_memory // (spec.layout.row_bytes + KEY_BYTES)
        return int(min(max(wanted // 64 * 64, 64), default_file_rows(spec.layout)))

    def _memory_bytes(self, spec: TableSpec) -> int:
        """A table's share of the memory: by the bytes that an example has in it."""
        weights = {other.name: len(other.slots) * other.layout.row_bytes for other in self.specs}
        return self.job.budget.memory_bytes * weights[spec.name] // sum(weights.values())

    def opened(self) -> Opened:
        """What the driver needs to know."""
        draft = self.snapshot.draft if self.snapshot is not None else None
        return Opened(
            epoch=self.epoch.number,
            directory=self.directory.path,
            snapshot=self.snapshot.id if self.snapshot is not None else None,
            batch=draft.batch if draft else -1,
            position=draft.position if draft else 0,
            rows=self.training.rows,
            steps=Steps(self.job.train.minibatch_examples),
            validation_rows=self.validation.rows if self.validation is not None else 0,
            row_capacity=self.row_capacity,
            metrics=self.metrics_summary(),
        )

    # -- budgets ---------------------------------------------------------------------------------------------------

    @property
    def row_capacity(self) -> int:
        """Distinct keys of one batch that fit the devices and the cache."""
        per_row = max(spec.layout.row_bytes for spec in self.specs) + 36  # key, slots of the hash table
        in_hbm = self.job.budget.hbm_bytes // (self.job.train.depth + 1) // per_row
        in_memory = min(table.mem.batch_rows for table in self.tables)
        return int(min(in_hbm, INDEX_MAY_GROW * in_memory))

    def fitting_steps(self, flight: Flight) -> int:
        """How many of the batch's steps, from its first, fit the budgets."""
        steps = len(flight.step_starts) - 1
        sizes = [len(working_set.keys) for working_set in flight.sets]
        if max(sizes) <= self.row_capacity * (1 if steps == 1 else ROOM):
            return steps
        if steps == 1:
            raise CapacityError(
                f"step {flight.token.first_step} alone needs {max(sizes):,} distinct rows, but this node fits "
                f"{self.row_capacity:,}: raise budget.hbm_bytes ({self.job.budget.hbm_bytes:,}) or budget.memory_bytes "
                f"({self.job.budget.memory_bytes:,}), lower train.depth ({self.job.train.depth}), or use smaller steps"
            )
        return max(1, int(steps * self.row_capacity * ROOM / max(sizes)))

    # -- snapshots -------------------------------------------------------------------------------------------------

    def capture(self, name: str) -> None:
        """Keep the dense network and the metrics as they are now, between two batches, for snapshot `name`."""
        arrays = {f"dense/{key}": value for key, value in self.networks[0].export().items()}
        arrays |= {f"metrics/{key}": value for key, value in self.metrics.state().items()}
        self._captured[name] = (arrays, self.metrics_summary())

    def prepare(self, name: str, batch: int) -> dict[str, Any]:
        """Have every partition of this node hold all pushes up to `batch`; what each says of it."""
        if name not in self._captured:
            self.capture(name)
        receipts = {}
        for table in self.tables:
            with table.lock:
                table.mem.flush(batch, name)
            receipts[table.spec.name] = {"prepared": name}
        return receipts

    def publish(self, name: str, batch: int, position: int, receipts: dict[str, Any]) -> tuple[str, ...]:
        """Make the prepared snapshot the last one; the names of those to keep."""
        settings = {"result": self.job.result_fields(), "job": self.job.model_dump(mode="json")}
        arrays, metrics = self._captured.pop(name)
        draft = Draft(batch, position, self.job.cluster.partitions, settings, {}, metrics)
        self.epoch.publish(draft, arrays, receipts)
        self.epoch.keep(self.job.train.keep_snapshots)
        return self.directory.state().live

    def confirm(self, live: tuple[str, ...]) -> None:
        """Follow what the log says."""
        for table in self.tables:
            with table.lock:
                for partition in table.store.stores.values():
                    follow(partition, live)

    # -- at rest ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Metrics of the validation data as the model is now; nothing is inserted."""
        assert self.validation is not None
        metrics = Metrics()
        predictor = Predictor(self.devices[0], self.specs, self.networks[0], self.lookup)
        steps = Steps(self.job.train.minibatch_examples)
        for step in range(steps.count(self.validation.rows)):
            batch, _ = self.validation.read_steps(step, step + 1)
            metrics.update(batch.labels, predictor.logits(batch), batch.example_weights)
        return metrics.summary()

    def lookup(self, table: int, keys: Keys) -> Floats:
        """Rows as they are, or as they would begin; nothing is inserted."""
        with self.tables[table].lock:
            return self.tables[table].mem.lookup(keys)

    def metrics_summary(self) -> dict[str, float]:
        """Progressive metrics so far."""
        return self.metrics.summary()

    def counts(self, flight: Flight) -> dict[str, float]:
        """What the batch did to the tiers, summed over tables."""
        totals: dict[str, float] = {
            "keys": sum(len(working_set.row_of) for working_set in flight.sets),
            "distinct_keys": sum(len(working_set.keys) for working_set in flight.sets),
        }
        for table in self.tables:
            for statistics in table.mem.statistics:
                if statistics.batch == flight.token.batch:
                    for name in type(statistics).__dataclass_fields__:
                        if name != "batch":
                            totals[name] = totals.get(name, 0) + float(getattr(statistics, name))
        return totals

    def levels(self, flight: Flight) -> dict[str, float]:
        """How full the tiers of this node are, with the batch that was pushed just now."""
        row_bytes = [spec.layout.row_bytes for spec in self.specs]
        loaded = [flight, *self.flights.loaded()]
        hbm_rows = [sum(len(other.sets[number].keys) for other in loaded) for number in range(len(row_bytes))]
        mem_rows = [table.mem.cached_rows for table in self.tables]
        return {
            "hbm_rows": sum(hbm_rows),
            "hbm_bytes": sum(rows * size for rows, size in zip(hbm_rows, row_bytes, strict=True)),
            "memory_rows": sum(mem_rows),
            "memory_bytes": sum(rows * size for rows, size in zip(mem_rows, row_bytes, strict=True)),
            **self._disk_levels(),
        }

    def _disk_levels(self) -> dict[str, float]:
        names = {"live_rows": "disk_rows"} | {name: name for name in DISK_LEVELS}
        figures = [table.store.stats() for table in self.tables]
        return {shown: sum(getattr(one, name) for one in figures) for name, shown in names.items()}

    def close(self) -> None:
        """Let go of everything."""
        self.flights.fail(RuntimeError("the node is closing"))
        for table in self.tables:
            table.mem.close()
            table.store.close()
        self.training.close()
        if self.validation is not None:
            self.validation.close()
        self.pool.close()


def _link_or_copy(source: str, target: str) -> None:
    """Chunks never change and may be shared; manifests and the lock file may not."""
    try:
        if os.path.basename(source).startswith("c."):
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)
