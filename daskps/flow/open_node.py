"""A node that is open: the job's parts put together on one worker, and what happens to them outside the stages.

In: a job, an epoch that was begun for all nodes, the node's rank. Out: the open tiers, network and readers, a link to
the other nodes; snapshots prepared, published and confirmed; evaluation at rest.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from daskps.backend.device import MEMORY, CpuDevice, Device, devices
from daskps.backend.memory import keep_freed_memory
from daskps.backend.pool import ComputePool
from daskps.backend.workspace import Workspace
from daskps.cluster.commit import Draft, Epoch, ModelDirectory, Snapshot, follow
from daskps.cluster.link import Link, Wire
from daskps.cluster.node import Flights, NodeTable
from daskps.cluster.partition import KeyPartition
from daskps.cluster.rows import open_rows
from daskps.cluster.session import Member
from daskps.config import Job
from daskps.data.order import Steps
from daskps.errors import ConfigError, DaskpsError, StaleError, TrainingError
from daskps.flow import inputs
from daskps.flow.begin import Begun, placement_of
from daskps.flow.opened import Opened
from daskps.flow.parts import build_network, dense_optimizer, row_filler, table_specs
from daskps.flow.place import check_order, order_before
from daskps.flow.predict import Predictor
from daskps.flow.progress import to_record, validations_of
from daskps.flow.reading import Reading
from daskps.flow.room import Room, check_memory
from daskps.flow.trainer import Trainer
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.memps import MemPS
from daskps.model import engine, network
from daskps.model.metrics import Metrics
from daskps.ssd import Options
from daskps.types import Floats, Keys


class OpenNode:
    """The open node of one worker."""

    def __init__(
        self,
        run: str,
        rank: int,
        nodes: int,
        job: Job,
        begun: Begun,
        *,
        frame: Any = None,
        wire: Wire | None = None,
        nodes_here: int = 1,
        limit_bytes: int | None = None,
    ) -> None:
        self.run, self.rank, self.nodes, self.job = run, rank, nodes, job
        self._idle, self._working, self._closed = threading.Condition(), 0, False
        self.directory = ModelDirectory(os.fspath(job.out))
        self.epoch = Epoch(self.directory, run, begun.epoch, begun.index)
        self._check_epoch()
        self.pool = ComputePool(job.cluster.cores or len(os.sched_getaffinity(0)))
        self.partition = KeyPartition(placement_of(job), nodes, self.pool)
        self.link = Link(wire or Wire(), alone=nodes == 1)
        self.tables: list[NodeTable] = []
        self.flights = Flights(run, begun.epoch)
        self.training: inputs.StepReader | None = None
        self.validation: inputs.StepReader | None = None
        try:
            self._open(begun, frame, nodes_here, limit_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, begun: Begun, frame: Any, nodes_here: int, limit_bytes: int | None) -> None:
        job = self.job
        self.devices: list[Device] = devices(job.cluster.backend, job.cluster.devices, pool=self.pool)
        check_memory(job, on_cpu=self.devices[0].kind == "cpu", nodes_here=nodes_here, limit_bytes=limit_bytes)
        self.host = CpuDevice(0, self.pool)  # makes initial rows, which belong to MEM-PS
        self.features = inputs.features(job)
        self.specs = table_specs(job, self.features)
        self.training = inputs.open_training(job, self.pool, self.rank, self.nodes, frame)
        self.validation = inputs.open_validation(job, self.pool, self.rank, self.nodes)
        self.networks = self._networks()
        on_cpu = self.devices[0].kind == "cpu"
        self.reading = Reading(job, self.features, self.steps, self.training, self.validation, on_cpu=on_cpu)
        self.reading.check()
        used = (self.reading.memory_bytes, self.reading.hbm_bytes + self.networks[0].size_bytes(self.pool.cores))
        self.room = Room(job, self.specs, self.partition, *used)
        self.room.check(self.reading.step_examples, self.reading.least_keys)
        keep_freed_memory(job.budget.memory_bytes + job.budget.hbm_bytes)
        self.metrics = Metrics()  # rank 0: of all nodes; others: of what rank 0 has not counted yet
        self.snapshot = self.directory.snapshot(begun.snapshot) if begun.snapshot is not None else None
        if self.snapshot is not None:
            self._take_up(self.directory, self.snapshot)
            if "order" in self.snapshot.draft.settings:
                check_order(job, self.training, self.snapshot.draft.position, self.snapshot.draft.settings["order"])
            if self.rank:
                self.metrics.clear()
        elif begun.base is not None:
            base = ModelDirectory(str(job.start_from))
            found = base.snapshot(begun.base)
            assert found is not None
            self._take_up(base, found)
            self.metrics.clear()  # at the first row of the data
        for spec in self.specs:
            self.tables.append(self._open_table(spec, begun))
        self.trainer = Trainer(
            self.devices,
            self.networks,
            dense_optimizer(job.model.optimizer),
            self.metrics,
            self.steps,
            self.training.rows,
            job.train.sync_every,
        )
        self.dedup_scratch = Workspace(self.devices[0])
        if on_cpu:
            shared = self.nodes > 1  # then MEM-PS has its tables of who holds what there, too
            MEMORY.total_bytes = job.budget.hbm_bytes + shared * job.budget.memory_bytes // 4
        self.previous: list[HbmTable] = []
        # Of snapshots on their way: dense state, and the metrics of their manifest.
        self._captured: dict[str, tuple[dict[str, Any], dict[str, float | None]]] = {}
        self.counted = -1  # the last batch whose statistics were reported

    def _check_epoch(self) -> None:
        """StaleError if a newer epoch has begun."""
        newest, mine, path = self.directory.state().epoch, self.epoch.number, self.directory.path
        if newest < mine:
            raise StaleError(
                f"node {self.rank} sees no epoch {mine} in {os.path.realpath(path)}, where node 0 has begun it: give "
                "`out` as a whole path of a file system that the machines of all workers share"
            )
        if newest > mine:
            raise StaleError(f"{path} is in epoch {newest}; epoch {mine} of run {self.run} is over")

    def join(self, addresses: list[str]) -> None:
        """All nodes are open: connect to them, and begin to serve this node's rows."""
        cluster = self.job.cluster
        self.link.join(
            Member(self.run, self.epoch.number, self.rank, self.nodes, cluster.wait_seconds),
            addresses,
            {table.spec.name: table.mem for table in self.tables},
            self.partition,
            first_batch=self.first_batch,
            check_replicas=cluster.check_replicas,
        )

    # -- opening ---------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        """What this node takes of every step."""
        train, cluster = self.job.train, self.job.cluster
        return Steps(train.minibatch_examples, self.nodes, self.rank, cluster.devices, train.block_examples)

    @property
    def first_batch(self) -> int:
        """The first one of this epoch."""
        return 0 if self.snapshot is None else self.snapshot.draft.batch + 1

    def _networks(self) -> list[network.Network]:
        """One replica per device; stand-ins share one."""
        job = self.job
        if self.devices[0].kind == "cpu":
            return [build_network(job, self.specs, self.features, engine.cpu(self.pool))] * len(self.devices)
        return [build_network(job, self.specs, self.features, engine.on(device)) for device in self.devices]

    def _take_up(self, directory: ModelDirectory, snapshot: Snapshot) -> None:
        """Go on from a snapshot, if it is of the same model."""
        known, asked = snapshot.draft.settings["result"], self.job.result_fields()
        wrong = [name for name in known | asked if known.get(name) != asked.get(name)]
        if not wrong and list(known["tables"]) != list(asked["tables"]):
            wrong = ["the order of tables"]  # their numbers are part of initial rows, and the network's inputs
        if wrong:
            other = ", ".join(wrong)
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

    def _open_table(self, spec: TableSpec, begun: Begun) -> NodeTable:
        """This node's partitions of a table, as the log says they are, and the cache over them."""
        base = ModelDirectory(str(self.job.start_from)) if begun.base is not None else None
        store = open_rows(
            f"{self.directory.path}/tables/{spec.name}",
            spec.layout,
            placement=self.partition.placement,
            owned=self.partition.owned(self.rank),
            snapshot=begun.snapshot or begun.base,
            live=self.directory.state().live,
            pool=self.pool,
            file_rows=self.room.file_rows(spec),
            options=Options(disk_bytes=self.room.disk_bytes(spec)),
            base=None if base is None else f"{base.path}/tables/{spec.name}",
            still_mine=self._check_epoch,
        )
        try:
            mem = MemPS(
                layout=spec.layout,
                store=store,
                initial=row_filler(self.job, spec, self.host),
                memory_bytes=self.room.memory_bytes(spec),
                pool=self.pool,
                nodes=self.nodes,
                run=self.run,
                epoch=self.epoch.number,
                first_batch=self.first_batch,
                lru_share=self.job.cluster.lru_share,
            )
        except BaseException:
            store.close()
            raise
        return NodeTable(spec, mem, store)

    def opened(self) -> Opened:
        """What the driver needs to know."""
        draft = self.snapshot.draft if self.snapshot is not None else None
        assert self.training is not None
        return Opened(
            epoch=self.epoch.number,
            address=self.link.address,
            directory=self.directory.path,
            snapshot=self.snapshot.id if self.snapshot is not None else None,
            batch=draft.batch if draft else -1,
            position=draft.position if draft else 0,
            rows=self.training.rows,
            steps=Steps(self.job.train.minibatch_examples),
            validation_rows=self.validation.rows if self.validation is not None else 0,
            read_steps=self.reading.steps(),
            metrics=self.metrics_summary(),
            validations=validations_of(draft.progress) if draft else (),
        )

    # -- snapshots -------------------------------------------------------------------------------------------------

    def end_batch(self, batch: int, snapshot: str) -> dict[str, float]:
        """Between two batches: count what all nodes predicted; keep what `snapshot`, if it is named, has to hold.

        Gives the metrics as they are now: when the batch has been pushed, later ones are counted already.
        """
        self._gather("metrics", batch, self.metrics)
        if self.rank:
            self.metrics.clear()
        elif snapshot:
            self._capture(snapshot)
        return self.metrics_summary()

    def _capture(self, name: str) -> None:
        arrays = {f"dense/{key}": value for key, value in self.networks[0].export().items()}
        arrays |= {f"metrics/{key}": value for key, value in self.metrics.state().items()}
        self._captured[name] = (arrays, to_record(self.metrics_summary()))

    def _gather(self, kind: str, batch: int, metrics: Metrics) -> None:
        """Count on rank 0 what the other nodes have counted. At most 24 bytes an example of the batch are sent."""
        if self.nodes == 1:
            return
        names, mine = tuple(Metrics(1).state()), tuple(metrics.state().values()) if self.rank else ()
        for arrays in self.link.gather(kind, batch, mine):
            metrics.add(dict(zip(names, arrays, strict=True)))

    def prepare(self, name: str, batch: int) -> dict[str, Any]:
        """At rest after `batch`: have every partition of this node hold all pushes; what each table says of it."""
        if self.rank == 0:
            self._capture(name)

        def flush() -> None:
            for table in self.tables:
                table.mem.flush(batch, name)

        self.link.work(flush)
        return self._receipts(name)

    def prepared(self, name: str, batch: int) -> dict[str, Any]:
        """The same, in flight: the pushes of `batch` have named the snapshot."""
        self.link.prepared(name, batch)
        return self._receipts(name)

    def _receipts(self, name: str) -> dict[str, Any]:
        return {table.spec.name: {"prepared": name} for table in self.tables}

    def publish(
        self, name: str, batch: int, position: int, receipts: dict[str, Any], progress: dict[str, Any]
    ) -> tuple[str, ...]:
        """Make the prepared snapshot the last one; the names of those to keep."""
        assert self.training is not None
        settings = {"result": self.job.result_fields(), "job": self.job.model_dump(mode="json")}
        settings["order"] = order_before(self.job, self.training, position)
        arrays, metrics = self._captured.pop(name)
        draft = Draft(batch, position, self.partition.placement.partitions, settings, progress, metrics)
        self.epoch.publish(draft, arrays, receipts)
        self.epoch.keep(self.job.train.keep_snapshots)
        return self.directory.state().live

    def confirm(self, live: tuple[str, ...]) -> None:
        """Follow what the log says."""

        def follow_all() -> None:
            for table in self.tables:
                for partition in table.store.stores.values():
                    follow(partition, live)

        self.link.work(follow_all)

    # -- at rest ---------------------------------------------------------------------------------------------------

    def evaluate(self, batch: int) -> dict[str, float]:
        """Metrics of the validation data as the model is after `batch`, on rank 0; nothing is inserted."""
        assert self.validation is not None
        metrics, numbers = Metrics(), itertools.count()
        predictor = Predictor(
            self.devices[0],
            self.specs,
            self.networks[0],
            lambda table, keys: self.lookup(table, keys, batch, next(numbers)),
        )
        for step in range(self.steps.count(self.validation.rows)):
            part, _ = self.validation.read_steps(step, step + 1)
            if part.examples:
                metrics.update(part.labels, predictor.logits(part), part.example_weights)
        self._gather("validation", batch + 1, metrics)  # the batch itself is over
        return metrics.summary() if self.rank == 0 else {}

    def lookup(self, table: int, keys: Keys, batch: int, number: int) -> Floats:
        """Rows as they are after `batch`, or as they would begin; `number` tells lookups of one batch apart."""
        spec = self.specs[table]
        rows = np.empty((len(keys), spec.layout.width), np.float32)
        self.link.lookup(batch, number, {spec.name: (keys, rows)})
        return rows

    def metrics_summary(self) -> dict[str, float]:
        """Progressive metrics so far, on rank 0."""
        return self.metrics.summary() if self.rank == 0 else {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Held by a stage while it works, so that nothing is closed under it."""
        with self._idle:
            if self._closed:
                raise StaleError(f"run {self.run} epoch {self.epoch.number} has ended on this node")
            self._working += 1
        try:
            yield
        finally:
            with self._idle:
                self._working -= 1
                self._idle.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop this node's part in the run, and the other nodes with it."""
        self.link.fail(error if isinstance(error, DaskpsError) else TrainingError(repr(error)))

    def close(self) -> None:
        """Let stages that wait give up and those that work finish, then let go of everything."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self.link.fail(StaleError("the run has ended on this node"), tell=False)
            self._idle.wait_for(lambda: not self._working)
        self.link.close()
        for table in self.tables:
            table.mem.close()
            table.store.close()
        for reader in (self.training, self.validation):
            if reader is not None:
                reader.close()
        self.pool.close()
        self.flights = Flights(self.flights.run, self.flights.epoch)
        MEMORY.total_bytes = None
        MEMORY.forget()  # in a notebook the process lives on
