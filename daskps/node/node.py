"""The node of one incarnation: all parts of a job, put together on one worker, and the requests that a driver makes.

Input: a job, a rank, the incarnation that has begun. Output: `NodeInfo` for the driver. Then the stages use its parts.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps import build
from daskps.budget import Term
from daskps.build import build_network, row_filler, table_specs
from daskps.config import Job, recorded_job
from daskps.data.order import Steps
from daskps.device.device import CpuDevice, Device, Workspace, devices
from daskps.device.memory import keep_freed_memory
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, CorruptionError, DaskpsError, DataError, StaleError, TrainingError
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.memps import MemPS
from daskps.nn.blas import blas_build
from daskps.nn.dense_model import DenseModel
from daskps.nn.metrics import Metrics
from daskps.node.batches import BatchesInFlight, NodeTable
from daskps.node.begin import IncarnationStart, changed_settings, check_begun, check_order, order_before, placement_of
from daskps.node.memory import InputBudget, NodeBudget, check_memory
from daskps.node.tables import Base, open_rows
from daskps.node.trainer import Trainer
from daskps.predict import Predictor, countable
from daskps.reports import Summary, Validation, to_record, validations_of, without_stages
from daskps.ssd import Options
from daskps.storage.model_directory import Incarnation, ModelDirectory, Snapshot, SnapshotMeta, apply_live
from daskps.storage.partition import KeyPartition
from daskps.storage.record import RecordWriter, read_record
from daskps.trace import OFF, Trace
from daskps.types import Floats, Keys
from daskps.version import NUMERICS, __version__
from daskps.wire.link import Link
from daskps.wire.message import MessageKind
from daskps.wire.session import Member
from daskps.wire.transport import ListenOptions


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Reply of a node to `open`: its address, the position in the data and its limits."""

    incarnation: int  # its number
    address: str  # of its link, for the other nodes
    directory: str
    snapshot: str | None  # id of the snapshot that was opened
    batch: int  # the last batch that the snapshot holds; -1 for a new model
    position: int  # global example number at which training goes on
    rows: int  # training examples, over all passes
    steps: Steps
    validation_rows: int  # validation examples
    read_steps: int  # largest number of steps in one read
    metrics: dict[str, float]
    validations: tuple[Validation, ...] = ()  # validations before the snapshot
    history: tuple[dict[str, Any], ...] = ()  # some lines of the record up to the snapshot, evenly chosen; only rank 0
    best: str | None = None  # snapshot with the best validation, if best ones are kept


@dataclass(frozen=True, slots=True)
class Publication:
    """Snapshot that every node has prepared, for node 0 to publish."""

    name: str  # its id
    batch: int  # the last batch that it holds
    position: int  # global example number at which training goes on from it
    digests: dict[str, Any]  # by table: digests of all partitions' files
    progress: dict[str, Any]  # validations so far, and the best snapshot
    lines: list[str]  # of the record, up to `last_batch`: they are durable with the snapshot
    last_batch: int


logger = logging.getLogger("daskps.driver")

# Methods of MEM-PS and of the row store that a trace shows as spans.
OWNER_CALLS = ("pull", "push", "lookup", "flush_begin", "next_piece", "piece_written")
STORE_CALLS = ("append", "start_load", "prepare")

HISTORY_POINTS = 200  # about this many batches before this run are shown on the live pages

ACCEPTED_KEPT = 100  # longest list of accepted changes of the data in a snapshot


class OpenNode:
    """Open node of one worker, for one incarnation of a run."""

    def __init__(
        self,
        run: str,
        rank: int,
        nodes: int,
        job: Job,
        begun: IncarnationStart,
        *,
        frame: Any = None,
        wire: ListenOptions | None = None,
        nodes_here: int = 1,
        limit_bytes: int | None = None,
    ) -> None:
        self.run, self.rank, self.nodes, self.job = run, rank, nodes, job
        self._idle, self._working, self._closed = threading.Condition(), 0, False
        self._error: BaseException | None = None  # the first error that a stage raised
        self.directory = ModelDirectory(os.fspath(job.out))
        self.incarnation = Incarnation(self.directory, run, begun.incarnation, begun.index, begun.model)
        check_begun(self.directory, begun, run, rank)
        name = f"{begun.incarnation:06d}-{rank:03d}"  # of this node's file in the folder of traces
        self.trace = Trace(os.path.join(begun.trace, name), rank) if begun.trace else OFF
        self.pool = ComputePool(job.cluster.cores or len(os.sched_getaffinity(0)), self.trace)
        self.partition = KeyPartition(placement_of(job), nodes, self.pool)
        self.link = Link(wire or ListenOptions(), alone=nodes == 1, pool=self.pool)
        self.tables: list[NodeTable] = []
        self.flights = BatchesInFlight(run, begun.incarnation)
        self.training: build.StepReader | None = None
        self.validation: build.StepReader | None = None
        self._writer: RecordWriter | None = None
        try:
            self._open(begun, frame, nodes_here, limit_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, begun: IncarnationStart, frame: Any, nodes_here: int, limit_bytes: int | None) -> None:
        """Open data, network, tables and record, and divide the budgets over them."""
        job = self.job
        self.devices: list[Device] = devices(job.cluster.backend, job.cluster.devices, pool=self.pool)
        check_memory(job, on_cpu=self.devices[0].kind == "cpu", nodes_here=nodes_here, limit_bytes=limit_bytes)
        self.host = CpuDevice(0, self.pool)  # makes initial rows: they go to MEM-PS, not to a GPU
        self.features = build.features(job)
        self.specs = table_specs(job, self.features)
        self.snapshot = self.directory.snapshot(begun.snapshot) if begun.snapshot is not None else None
        self._accepted = self._accepted_settings(begun)
        self.training = build.open_training(job, self.pool, self.rank, self.nodes, frame)
        self.validation = build.open_validation(job, self.pool, self.rank, self.nodes)
        self.networks = self._networks()
        on_cpu = self.devices[0].kind == "cpu"
        readers = [reader for reader in map(build.of_files, (self.training, self.validation)) if reader is not None]
        file_bytes = sum(reader.held_bytes for reader in readers)
        self.input_budget = InputBudget(
            *(job, self.features, self.steps), rows=self.training.examples, file_bytes=file_bytes, on_cpu=on_cpu
        )
        for reader in readers:
            reader.bound(self.input_budget.batches_bytes)
        self.input_budget.check()
        network = Term("network", self.networks[0].size_bytes(self.pool.cores), "hbm_bytes")
        self.budget = NodeBudget(job, self.specs, self.nodes, [*self.input_budget.terms(), network])
        self.budget.check(self.input_budget.step_examples, self.input_budget.least_keys)
        keep_freed_memory(job.budget.memory_bytes + job.budget.hbm_bytes)
        self.metrics = Metrics()  # of the current pass. Rank 0: all nodes; other ranks: what rank 0 has not got yet
        if self.snapshot is not None:
            self._take_up(self.directory, self.snapshot)
            self._compare_blas(self.snapshot)
            position, settings = self.snapshot.draft.position, self.snapshot.draft.settings
            if "order" in settings:
                self._accepted += check_order(
                    job, self.training, position, settings["order"], begun.accept_changed_data
                )
            if self.rank:
                self.metrics.clear()
        self._pass = self._pass_of(max(0, self.snapshot.draft.position - 1) if self.snapshot is not None else 0)
        with ExitStack() as stack:
            base = None
            if begun.base is not None:
                elsewhere = ModelDirectory(str(job.start_from))
                lease = elsewhere.read(begun.base)  # a run of that model may go on and delete snapshots meanwhile
                assert lease is not None
                base = stack.enter_context(lease).snapshot
                self._take_up(elsewhere, base)
                self.metrics.clear()  # this model begins at the first example of the data
            for spec in self.specs:
                self.tables.append(self._open_table(spec, begun, base))
        self.trainer = Trainer(
            self.devices,
            self.networks,
            self.metrics,
            self.steps,
            self.training.examples,
            job.train.sync_every,
            self.trace,
        )
        self.dedup_scratch = Workspace(self.devices[0])
        if on_cpu:
            shared = self.nodes > 1  # then MEM-PS also takes its tables of holders from this buffer pool
            self.pool.buffers.total_bytes = job.budget.hbm_bytes + shared * job.budget.memory_bytes // 4
        self.previous: list[HbmTable] = []
        # By id of a snapshot that is being prepared: its dense state, and the metrics for its manifest.
        self._captured: dict[str, tuple[dict[str, Any], dict[str, float | None]]] = {}
        self.counted = -1  # the last batch whose counters were reported
        self._writer = RecordWriter(
            self.directory.path,
            incarnation=self.incarnation.number,
            first_batch=self.first_batch,
            header={"run": self.run, "version": __version__, "settings": job.model_dump(mode="json")},
        )

    def join(self, addresses: list[str]) -> None:
        """Connect to all nodes, which are open now, and begin to serve this node's rows."""
        cluster = self.job.cluster
        self.link.join(
            Member(self.run, self.incarnation.number, self.rank, self.nodes, cluster.wait_seconds),
            addresses,
            {table.spec.name: self.trace.methods(table.mem, "owner", *OWNER_CALLS) for table in self.tables},
            self.partition,
            first_batch=self.first_batch,
            check_replicas=cluster.check_replicas,
        )

    # -- opening ---------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        """Division of steps into examples: this node's share of every step."""
        train, cluster = self.job.train, self.job.cluster
        return Steps(train.minibatch_examples, self.nodes, self.rank, cluster.devices, train.block_examples)

    @property
    def first_batch(self) -> int:
        """Number of the first batch of this incarnation."""
        return 0 if self.snapshot is None else self.snapshot.draft.batch + 1

    def _accepted_settings(self, begun: IncarnationStart) -> list[str]:
        """Return the data settings that differ from the snapshot's; raise DataError unless changes are accepted."""
        if self.snapshot is None:
            return []
        then = recorded_job(self.snapshot.draft.settings, f"the settings in snapshot {self.snapshot.id}")
        return changed_settings(then.data, self.job.data, begun.accept_changed_data)

    def _accepted_changes(self) -> list[dict[str, Any]]:
        """Return the latest accepted changes of the data (position, what changed), for snapshots."""
        if self.snapshot is None:
            return []
        known = self.snapshot.draft.settings.get("accepted_changes", [])
        new = [{"position": self.snapshot.draft.position, "changed": self._accepted}] if self._accepted else []
        return [*known, *new][-ACCEPTED_KEPT:]

    def _networks(self) -> list[DenseModel]:
        """Return one replica of the network per device; CPU stand-ins share one."""
        job = self.job
        if self.devices[0].kind == "cpu":
            return [build_network(job, self.specs, self.features, self.host)] * len(self.devices)
        return [build_network(job, self.specs, self.features, device) for device in self.devices]

    @property
    def _blas(self) -> str:
        """Name of the library of the network's matrix products, on which their bits depend."""
        return blas_build() if self.devices[0].kind == "cpu" else "cublas"

    def _compare_blas(self, snapshot: Snapshot) -> None:
        """Log a warning if another BLAS made the snapshot that this run goes on from."""
        made_by = snapshot.draft.settings.get("blas", self._blas)  # older snapshots do not name it
        if self.rank == 0 and made_by != self._blas:
            logger.warning(
                "snapshot %s was made with the BLAS %s; this run goes on with %s, so its network may differ in the "
                "last bits from that of an uninterrupted run",
                *(snapshot.id, made_by, self._blas),
            )

    def _take_up(self, directory: ModelDirectory, snapshot: Snapshot) -> None:
        """Load network and metrics from a snapshot; raise ConfigError if its model has other settings."""
        recorded = recorded_job(snapshot.draft.settings, f"the settings in snapshot {snapshot.id}")
        known, asked = recorded.identity_fields(), self.job.identity_fields()
        wrong = [name for name in known | asked if known.get(name) != asked.get(name)]
        if not wrong and list(known["tables"]) != list(asked["tables"]):
            wrong = ["the order of tables"]  # the order decides initial rows and the network's inputs
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

    def _open_table(self, spec: TableSpec, begun: IncarnationStart, base: Snapshot | None) -> NodeTable:
        """Open this node's partitions of a table in the state of the log, or as copies of `base`, with their cache."""
        copied = None
        if base is not None:
            elsewhere = ModelDirectory(str(self.job.start_from))
            path = f"{elsewhere.path}/tables/{spec.name}"
            copied = Base(path, elsewhere.state().model, base.digests(spec.name))
        store = open_rows(
            f"{self.directory.path}/tables/{spec.name}",
            spec.layout,
            placement=self.partition.placement,
            owned=self.partition.owned(self.rank),
            snapshot=begun.snapshot or begun.base,
            live=self.directory.state().live,
            pool=self.pool,
            file_rows=self.budget.file_rows(spec),
            options=Options(disk_bytes=self.budget.disk_bytes(spec)),
            model=begun.model,
            digests=self.snapshot.digests(spec.name) if self.snapshot is not None else None,
            base=copied,
            still_mine=lambda: check_begun(self.directory, begun, self.run, self.rank),
        )
        try:
            mem = MemPS(
                layout=spec.layout,
                store=self.trace.methods(store, "owner", *STORE_CALLS),
                initial=row_filler(self.job, spec, self.host),
                memory_bytes=self.budget.memory_bytes(spec),
                pool=self.pool,
                nodes=self.nodes,
                run=self.run,
                incarnation=self.incarnation.number,
                first_batch=self.first_batch,
                eviction=self.job.cluster.eviction,
                remedy=lambda mem, rows: self.budget.remedy(spec, mem, rows),
            )
        except BaseException:
            store.close()
            raise
        return NodeTable(spec, mem, store)

    def info(self) -> NodeInfo:
        """Return the reply to the driver's `open`."""
        draft = self.snapshot.draft if self.snapshot is not None else None
        assert self.training is not None
        return NodeInfo(
            incarnation=self.incarnation.number,
            address=self.link.address,
            directory=self.directory.path,
            snapshot=self.snapshot.id if self.snapshot is not None else None,
            batch=draft.batch if draft else -1,
            position=draft.position if draft else 0,
            rows=self.training.examples,
            steps=Steps(self.job.train.minibatch_examples),
            validation_rows=self.validation.examples if self.validation is not None else 0,
            read_steps=self.input_budget.steps(),
            metrics=self.metrics_summary(),
            validations=validations_of(draft.progress) if draft else (),
            history=self._history(draft.batch) if draft and self.rank == 0 else (),
            best=draft.progress.get("best") if draft else None,
        )

    # -- the record, on rank 0 -------------------------------------------------------------------------------------

    def _history(self, batch: int) -> tuple[dict[str, Any], ...]:
        """Return about HISTORY_POINTS lines of the record up to `batch`. A run goes on without them."""
        every = max(1, batch // HISTORY_POINTS)
        try:
            lines = read_record(self.directory.path, "batch", every=every)
            return tuple(without_stages(line) for line in lines if line["batch"] <= batch)
        except DataError:  # trained before there were records
            return ()
        except (CorruptionError, OSError) as error:
            logger.warning("live pages begin with this run: %s", error)
            return ()

    def record(self, lines: list[str], last_batch: int) -> None:
        """Write lines of batches up to `last_batch` to the record."""
        assert self._writer is not None
        self._writer.write(lines, last_batch)

    def summary(self) -> Summary:
        """Return the totals of this run over all its incarnations, from the record."""
        summary = Summary()
        for line in read_record(self.directory.path, "batch", run=self.run):
            summary.add(line)
        return summary

    # -- snapshots -------------------------------------------------------------------------------------------------

    def end_batch(self, batch: int, snapshot: str) -> dict[str, float]:
        """Add up the metrics of all nodes after a batch; if `snapshot` is named, keep the dense state for it.

        Return the metrics now: at the batch's push they would include later batches.
        """
        self._gather(MessageKind.METRICS, batch, self.metrics)
        if self.rank:
            self.metrics.clear()
        elif snapshot:
            self._capture(snapshot)
        return self.metrics_summary()

    def _capture(self, name: str) -> None:
        """Copy network and metrics for the snapshot `name`, before the next batch changes them."""
        arrays = {f"dense/{key}": value for key, value in self.networks[0].export().items()}
        arrays |= {f"metrics/{key}": value for key, value in self.metrics.state().items()}
        self._captured[name] = (arrays, to_record(self.metrics_summary()))

    def _gather(self, kind: MessageKind, batch: int, metrics: Metrics) -> None:
        """Add the other nodes' metrics on rank 0. At most 24 bytes per example of the batch are sent."""
        if self.nodes == 1:
            return
        names, mine = tuple(Metrics(1).state()), tuple(metrics.state().values()) if self.rank else ()
        for arrays in self.link.gather(kind, batch, mine):
            metrics.add(dict(zip(names, arrays, strict=True)))

    def prepare(self, name: str, batch: int) -> dict[str, Any]:
        """Prepare snapshot `name` in every partition of this node while no batch is in flight; return the digests."""
        if self.rank == 0:
            self._capture(name)

        def flush() -> None:
            for table in self.tables:
                table.mem.flush(batch, name)

        self.link.run_in_owner_thread(flush)
        return self._digests(name)

    def prepared(self, name: str, batch: int) -> dict[str, Any]:
        """Wait for the snapshot that the pushes of `batch` have named, while training goes on; return the digests."""
        self.link.prepared(name, batch)
        return self._digests(name)

    def _digests(self, name: str) -> dict[str, Any]:
        """Return the digests of the snapshot's files, by table."""
        return {table.spec.name: table.store.digests(name) for table in self.tables}

    def publish(self, snapshot: Publication) -> tuple[str, ...]:
        """Write the record's lines, then publish the prepared snapshot; return the ids of snapshots to keep."""
        assert self.training is not None
        assert self._writer is not None
        self._writer.write(snapshot.lines, snapshot.last_batch)
        self._writer.end_file()
        settings = {"numerics": NUMERICS, "result": self.job.result_fields(), "job": self.job.model_dump(mode="json")}
        settings["blas"] = self._blas
        settings["order"] = order_before(self.job, self.training, snapshot.position)
        if accepted := self._accepted_changes():
            settings["accepted_changes"] = accepted
        arrays, metrics = self._captured.pop(snapshot.name)
        partitions, progress = self.partition.placement.partitions, snapshot.progress
        draft = SnapshotMeta(snapshot.batch, snapshot.position, partitions, settings, progress, metrics)
        self.incarnation.publish(draft, arrays, snapshot.digests)
        self.incarnation.keep(self.job.train.keep_snapshots, progress.get("best"))
        return self.directory.state().live

    def end_with(self, best: str) -> str | None:
        """Make the run's best snapshot the last one, if it still exists; return the id of the last snapshot."""
        self.incarnation.end_with(best)
        return self.directory.state().last

    def confirm(self, live: tuple[str, ...]) -> None:
        """Confirm the live snapshots of the log in every partition, and drop those that are no longer live."""

        def apply_to_all() -> None:
            for table in self.tables:
                for partition in table.store.stores.values():
                    apply_live(partition, live)

        self.link.run_in_owner_thread(apply_to_all)

    # -- at rest ---------------------------------------------------------------------------------------------------

    def evaluate(self, batch: int) -> dict[str, float]:
        """Return the metrics of the validation data with the model after `batch`, on rank 0; insert nothing."""
        assert self.validation is not None
        metrics, numbers = Metrics(), itertools.count()
        predictor = Predictor(
            self.devices[0],
            self.specs,
            self.networks[0],
            lambda table, working_set: self.lookup(table, working_set.keys, batch, next(numbers)),
        )
        for step in range(self.steps.count(self.validation.examples)):
            part, _ = self.validation.read_steps(step, step + 1)
            if part.examples:
                metrics.update(*countable(part, predictor.logits(part)))
        self._gather(MessageKind.VALIDATION, batch + 1, metrics)  # not `batch`: the session has closed it
        return metrics.summary() if self.rank == 0 else {}

    def lookup(self, table: int, keys: Keys, batch: int, number: int) -> Floats:
        """Return rows as after `batch`, initial rows for unknown keys; `number` distinguishes lookups of one batch."""
        spec = self.specs[table]
        rows = np.empty((len(keys), spec.layout.width), np.float32)
        self.link.lookup(batch, number, {spec.name: (keys, rows)})
        return rows

    def begin_batch(self, step: int) -> None:
        """Clear the metrics at the start of a pass: from the second pass on, the examples were trained on before."""
        assert self.training is not None
        if (number := self._pass_of(self.steps.examples(step, self.training.examples)[0])) != self._pass:
            self.metrics.clear()
            self._pass = number

    def _pass_of(self, row: int) -> int:
        """Return the pass over the data that contains the example number `row`, counted from 1."""
        assert self.training is not None
        return row // max(1, self.training.examples // self.job.train.epochs) + 1

    def metrics_summary(self) -> dict[str, float]:
        """Return the metrics of the pass so far, on rank 0. In the first pass all examples are new to the model."""
        return {"pass": float(self._pass), **self.metrics.summary()} if self.rank == 0 else {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep the node open while a stage works; `close` waits until no stage does."""
        with self._idle:
            self._check_open()
            self._working += 1
        try:
            yield
        finally:
            with self._idle:
                self._working -= 1
                self._idle.notify_all()

    def _check_open(self) -> None:
        """Raise StaleError if the node is closed."""
        if self._closed:
            raise StaleError(f"run {self.run}, incarnation {self.incarnation.number}, has ended on this node")

    def check(self) -> None:
        """Raise the error that has stopped this node, if any; for stages that wait for another stage."""
        if self._error is not None:
            raise self._error
        self._check_open()
        self.link.peers.session.check()

    def fail(self, error: BaseException) -> None:
        """Stop this node's part in the run, and all other nodes."""
        self._error = self._error or error
        self.link.fail(error if isinstance(error, DaskpsError) else TrainingError(repr(error)))

    def close(self) -> None:
        """Make waiting stages fail, wait for working ones to finish, then close everything."""
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
        for reader in (self.training, self.validation, self._writer):
            if reader is not None:
                reader.close()
        self.pool.close()
        self.trace.close()
        self.flights = BatchesInFlight(self.flights.run, self.flights.incarnation)
