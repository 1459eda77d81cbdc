"""An open model: rows by key, predictions, metrics, statistics; and maintenance of its snapshots.

Input: a model directory, optionally the id of a snapshot. Output: `Model`, which only reads; a run may train the same
model meanwhile. A lease keeps the snapshot from being dropped while it is open; `Model.refresh` moves to a newer one.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps import build
from daskps.build import build_network, row_filler, table_specs
from daskps.config import Job, recorded_job
from daskps.data.frame import frame_batch
from daskps.data.order import Steps
from daskps.device.device import devices
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError, CorruptionError, SnapshotError, StoreError
from daskps.nn.group_metrics import GroupMetrics, GroupValues
from daskps.nn.metrics import Metrics
from daskps.predict import Predictor, countable
from daskps.settings import local_path, nearest
from daskps.ssd import TableStore
from daskps.storage.model_directory import Lease, ModelDirectory, Snapshot, apply_live
from daskps.types import Batch, Bools, Floats, Keys, RowLayout, WorkingSet

STALE_WORTH_MOVING = 0.02  # compact a partition only if its stale rows are more than 2% of its live rows


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of a compaction."""

    snapshot: str
    moved_rows: int
    bytes_before: int
    bytes_after: int


def drop_snapshots(path: str, names: Iterable[str]) -> None:
    """Drop snapshots and delete the files that only they need; raise LockedError if one is being read.

    The last snapshot cannot be dropped.
    """
    directory = ModelDirectory(path)
    last = _last(directory)
    with _tables(directory, last) as tables:  # takes the locks, so no run writes meanwhile
        directory.drop(tuple(names))
        _apply_log(directory, tables)


def roll_back(path: str, name: str) -> None:
    """Make an older snapshot the last one. Newer ones stay until they are dropped."""
    directory = ModelDirectory(path)
    with _tables(directory, _last(directory)):
        directory.roll_back(name)


def compact(path: str) -> Compaction:
    """Rewrite partitions that have stale rows, publish the result as a new snapshot, and drop all other snapshots.

    Snapshots that are being read stay, with their files.
    """
    directory = ModelDirectory(path)
    last = _last(directory)
    arrays = directory.load(last)
    with _tables(directory, last) as tables:
        stores = [store for table in tables.values() for store in table.stores.values()]
        before = sum(store.disk_bytes for store in stores)
        incarnation = directory.begin_incarnation("compact")
        _apply_log(directory, tables)
        moved = 0
        for store in stores:
            figures = store.stats()
            if figures.stale_rows > STALE_WORTH_MOVING * max(figures.live_rows, 1):
                for keys, rows in store.scan():
                    store.append(keys, rows)
                    moved += len(keys)

        def prepare(name: str) -> dict[str, Any]:
            for rows in tables.values():
                rows.prepare(name)
            return {table: rows.digests(name) for table, rows in tables.items()}

        def confirm(name: str) -> None:
            for rows in tables.values():
                rows.confirm(name)

        snapshot = incarnation.commit(last.draft, arrays, prepare, confirm)
        incarnation.keep(1)
        _apply_log(directory, tables)
        after = sum(store.disk_bytes for store in stores)
    return Compaction(snapshot.id, moved, before, after)


def _last(directory: ModelDirectory) -> Snapshot:
    """Return the last snapshot; raise SnapshotError if there is none."""
    snapshot = directory.snapshot()
    if snapshot is None:
        raise SnapshotError(f"{directory.path} holds no model: nothing was ever published there")
    return snapshot


@contextmanager
def _tables(directory: ModelDirectory, snapshot: Snapshot) -> Iterator[dict[str, TableStore]]:
    """Open all tables for writing and yield them by name; raise LockedError if a run has them."""
    job = recorded_job(snapshot.draft.settings, f"the settings in snapshot {snapshot.id}")
    model = directory.state().model
    with ComputePool(1) as pool, ExitStack() as stack:
        yield {
            name: stack.enter_context(
                TableStore.open(
                    f"{directory.path}/tables/{name}",
                    pool=pool,
                    snapshot=snapshot.id,
                    model=model,
                    digests=snapshot.digests(name),
                )
            )
            for name in job.tables
        }


def _apply_log(directory: ModelDirectory, tables: dict[str, TableStore]) -> None:
    """Confirm the live snapshots in every partition; drop all others and what was only prepared."""
    live = directory.state().live
    for table in tables.values():
        for store in table.stores.values():
            apply_live(store, live, discard_unpublished=True)


Find: TypeAlias = Callable[[int, Keys], tuple[Floats, Bools]]  # (table, keys) -> rows, which keys exist
Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
PREDICT_EXAMPLES = 1 << 15  # examples per forward pass; only their rows are in memory


class _Opened:
    """Open tables of one snapshot, with the lease on it. They are closed when the last call that uses them ends."""

    def __init__(self, lease: Lease, rows: list[TableStore], find: Find, predictor: Predictor) -> None:
        self.lease, self.rows, self.find, self.predictor = lease, rows, find, predictor
        self._lock, self._users, self._closing = threading.Lock(), 0, False

    def enter(self) -> bool:
        """Register a call; return False if these tables are closing, and the caller must take newer ones."""
        with self._lock:
            self._users += not self._closing
            return not self._closing

    def leave(self) -> None:
        """Unregister a call; close the tables if they are closing and this was the last call."""
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> None:
        """Close the tables as soon as no call uses them."""
        with self._lock:
            last = not (self._closing or self._users)
            self._closing = True
        if last:
            self._close()

    def _close(self) -> None:
        for rows in self.rows:
            rows.close()
        self.lease.close()


class Model:
    """Model at one snapshot, open for reading; made by `open_model`. Close it, or use it in a `with` statement.

    No run drops the snapshot while it is open here. On a file system without locks this cannot be prevented; then calls
    raise `SnapshotError` when the files are gone.

    `bad_rows` describes the examples that lenient reading has skipped in the data read last: by reason, their number
    and the first place. `key_counts` describes the data that was predicted or evaluated last: for each slot, the number
    of key occurrences, and how many of these keys the model has never seen. `unseen_keys` is their fraction over all
    slots.
    """

    def __init__(self, path: str | os.PathLike[str], snapshot: str | None = None, cores: int | None = None) -> None:
        try:
            self.directory = ModelDirectory(str(local_path(os.fspath(path))))
        except ValueError as error:
            raise ArgumentError(f"cannot open {os.fspath(path)!r}: {error}") from None
        self._pool = ComputePool(cores or len(os.sched_getaffinity(0)))
        self._device = devices("cpu", 1, pool=self._pool)[0]
        self._closed, self._refreshing = False, threading.Lock()
        self.bad_rows: dict[str, tuple[int, str]] = {}
        self.key_counts: dict[str, tuple[int, int]] = {}
        try:
            self._open(snapshot)
        except BaseException:
            self._pool.close()
            raise

    def _open(self, name: str | None) -> None:
        """Open the named snapshot, or the last one; try again if the last one is dropped while it is being opened.

        That can happen only where the snapshot cannot be locked.
        """
        while True:
            lease = self.directory.read(name)
            if lease is None:
                raise SnapshotError(f"{self.directory.path} holds no model: nothing was ever published there")
            try:
                with self.directory.unless_dropped(lease.snapshot.id):
                    self._open_at(lease)
            except SnapshotError:
                lease.close()
                if name is not None or lease.snapshot.id in self.directory.state().live:
                    raise
            except BaseException:
                lease.close()
                raise
            else:
                return

    def _open_at(self, lease: Lease) -> None:
        """Open a snapshot and switch to it; if it cannot be opened, nothing changes."""
        snapshot = lease.snapshot
        job = recorded_job(snapshot.draft.settings, f"the settings in snapshot {snapshot.id}")
        features = build.features(job)
        specs = table_specs(job, features)
        fillers = [row_filler(job, spec, self._device) for spec in specs]
        network = build_network(job, specs, features, self._device)
        network.load(_dense(self.directory.load(snapshot)))
        model = self.directory.state().model
        with ExitStack() as stack:
            rows = []
            for spec in specs:
                table = TableStore.open(
                    f"{self.directory.path}/tables/{spec.name}",
                    pool=self._pool,
                    snapshot=snapshot.id,
                    model=model,
                    digests=snapshot.digests(spec.name),
                    read_only=True,
                )
                rows.append(stack.enter_context(table))
            stack.pop_all()

        def find(number: int, keys: Keys) -> tuple[Floats, Bools]:
            out = np.empty((len(keys), specs[number].layout.width), np.float32)
            fillers[number](keys, out)
            return rows[number].load(keys, out)

        def counted(number: int, found: WorkingSet) -> Floats:
            values, known = find(number, found.keys)
            self._count_keys([features.slots[slot] for slot in specs[number].slots], found, known)
            return values

        self.snapshot: Snapshot = snapshot
        self.job: Job = job
        self._hashing, self._features, self._specs, self._network = build.hashing(job), features, specs, network
        self._opened = _Opened(lease, rows, find, Predictor(self._device, specs, network, counted))

    @contextmanager
    def _using(self) -> Iterator[_Opened]:
        """Yield the open tables for one call; `refresh` in another thread does not close them before it ends."""
        while not (opened := self._opened).enter():
            self._check_open()
        try:
            with self.directory.unless_dropped(opened.lease.snapshot.id):
                yield opened
        finally:
            opened.leave()

    def refresh(self) -> Snapshot:
        """Move to the model's last snapshot and return it; do nothing if it is open already.

        Calls in other threads finish with the snapshot that they began with. Until then both snapshots are open and
        take memory, and the older one stays on disk.
        """
        with self._refreshing:
            self._check_open()
            before = self._opened
            if self.directory.state().last != self.snapshot.id:
                self._open(None)
                before.close()
            return self.snapshot

    # -- rows ------------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(spec.name for spec in self._specs)

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the slots in each table."""
        return {spec.name: tuple(self._features.slots[number] for number in spec.slots) for spec in self._specs}

    def pull(self, keys: npt.ArrayLike, table: str | None = None, field: str = "embedding") -> npt.NDArray[Any]:
        """Return one field of the rows of `keys`, (n, values); a key that was never trained has its initial row.

        `field` is ``embedding``, a field of the optimizer's state (`fields` lists them), or ``row`` for the whole row.
        """
        number = self._number(table)
        with self._using() as opened:
            rows = opened.find(number, _keys(keys))[0]
        if field == "row":
            return rows
        layout = self._specs[number].layout
        names = {item.name: item for item in layout.fields}
        if field not in names:
            raise ArgumentError(
                f"a row of table {self.tables[number]!r} has no field {field!r}; {nearest(field, names)}"
            )
        values = np.ascontiguousarray(rows[:, layout.place(field)])
        return values.view(np.uint32) if names[field].dtype == "uint32" else values

    def contains(self, keys: npt.ArrayLike, table: str | None = None) -> Bools:
        """Return for each key True if it was ever trained."""
        with self._using() as opened:
            return opened.rows[self._number(table)].load(_keys(keys))[1]

    def fields(self, table: str | None = None) -> dict[str, int]:
        """Return the fields of a row, with the number of values of each."""
        return {field.name: field.width for field in self._specs[self._number(table)].layout.fields}

    def layout(self, table: str | None = None) -> RowLayout:
        """Return the layout of a row."""
        return self._specs[self._number(table)].layout

    def rows(self, table: str | None = None) -> int:
        """Return the number of keys in a table."""
        with self._using() as opened:
            return len(opened.rows[self._number(table)])

    def scan(self, table: str | None = None) -> Iterator[tuple[Keys, Floats]]:
        """Yield all keys with their whole rows, piece by piece, in no particular order."""
        self._check_open()
        number = self._number(table)

        def pieces() -> Iterator[tuple[Keys, Floats]]:
            with self._using() as opened:
                yield from opened.rows[number].scan()

        return pieces()

    def dense(self, state: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the dense network; with `state` also those of its optimizer."""
        with self._using() as opened:
            every = _dense(self.directory.load(opened.lease.snapshot))
        return every if state else {name: every[name] for name in self._network.parameters}

    def _number(self, table: str | None) -> int:
        """Return the number of a table; None names the only one."""
        if table is None and len(self._specs) == 1:
            return 0
        if table not in self.tables:
            raise ArgumentError(f"the model has no table {table!r}; {nearest(str(table), self.tables)}")
        return self.tables.index(table)

    def _check_open(self) -> None:
        """Raise StoreError if the model was closed: its files and threads are gone."""
        if self._closed:
            raise StoreError(f"the model {self.directory.path} was closed; open it again with daskps.open_model")

    def _logits(self, part: Batch) -> Floats:
        with self._using() as opened:
            return opened.predictor.logits(part)

    def _count_keys(self, slots: Sequence[str], found: WorkingSet, known: Bools) -> None:
        """Count the keys of a working set, occurrence by occurrence, and those that the model does not know."""
        unseen = np.concatenate([[0], np.cumsum(~known[found.row_of])])
        counts = np.diff(found.offsets).reshape(-1, len(slots)).sum(axis=0)
        new = np.diff(unseen[found.offsets]).reshape(-1, len(slots)).sum(axis=0)
        for at, slot in enumerate(slots):
            before = self.key_counts.get(slot, (0, 0))
            self.key_counts[slot] = (before[0] + int(counts[at]), before[1] + int(new[at]))

    @property
    def unseen_keys(self) -> float:
        """Fraction of keys that the model has never seen, in the data predicted or evaluated last; NaN without keys.

        It is nearly 1 if a slot reads another column, or if values are written differently than in training.
        """
        keys, unseen = (sum(counts[at] for counts in self.key_counts.values()) for at in (0, 1))
        return unseen / keys if keys else math.nan

    # -- predictions -----------------------------------------------------------------------------------------------

    def predict(self, data: Any) -> Floats:
        """Return the probability of a click for every example of a `Batch` or of a data frame.

        The frame (pandas, Arrow, polars, cuDF, or a dictionary of columns) has the columns that the job names; a label
        is not needed. A batch must have the model's keys, like the batches of `read` and `validation`.
        """
        self._check_open()
        if isinstance(data, Batch):
            batch = data
        else:
            batch = self._hashed(frame_batch(data, build.job_schema(self.job), self.job.data.hash_seed))
        pieces = [probabilities for _, probabilities in self.predict_batches([batch])]
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32)

    def predict_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Floats]]:
        """Yield each batch of a stream, or a part of it, with the probabilities of its examples."""
        self.key_counts = {}
        for part in self._parts(batches):
            yield part, self._network.probabilities(self._logits(part))

    def _parts(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches in parts of at most PREDICT_EXAMPLES examples."""
        slots = self._features.slots
        for batch in batches:
            if not isinstance(batch, Batch):
                raise ArgumentError(f"got a {type(batch).__name__} where batches are wanted; frames are for `predict`")
            if batch.slots != len(slots):  # slots are matched by number, so others would be taken for them
                raise ArgumentError(f"a batch of {batch.slots} slots came, but the model has {len(slots)}: {slots}")
            for start in range(0, batch.examples, PREDICT_EXAMPLES):
                yield batch.slice(start, min(start + PREDICT_EXAMPLES, batch.examples))

    def read(
        self, paths: Paths, format: str | None = None, *, labelled: bool = True, label_needed: bool = True
    ) -> Iterator[Batch]:
        """Yield the examples of files as batches, read with the job's schema; `format` is by default the job's.

        With labelled=False labels and example weights are ignored and may be missing: enough for predictions. With
        label_needed=False, lenient reading gives NaN for a label that it cannot parse and reads the rest of the
        example; example weights are ignored. `Batch.bad` marks examples that could not be parsed at all.
        """
        self._check_open()
        named = [paths] if isinstance(paths, str | os.PathLike) else paths
        files = [os.fspath(path) for path in named]
        with build.open_data(self.job, files, self._pool, format, labelled, label_needed) as reader:
            for batch in reader.batches(PREDICT_EXAMPLES):
                self.bad_rows = build.skipped_examples(reader)
                yield self._hashed(batch)

    def _hashed(self, batch: Batch) -> Batch:
        return batch if self._hashing is None else self._hashing.apply(batch, self._pool)

    def validation(self) -> Iterator[Batch]:
        """Yield the validation examples of the job as batches."""
        self._check_open()
        reader = build.open_validation(self.job, self._pool, 0, 1)
        if reader is None:
            raise ConfigError(
                f"the job of {self.directory.path} names no validation data (data.validation_paths or, where it is "
                "synthetic, data.validation_rows): say which data to evaluate on"
            )
        steps = Steps(self.job.train.minibatch_examples).count(reader.examples)
        for step in range(steps):
            batch = reader.read_steps(step, step + 1)[0]
            self.bad_rows = build.skipped_examples(reader)
            yield batch
        reader.close()

    def evaluate(self, data: Paths | Iterable[Batch] | None = None, format: str | None = None) -> dict[str, float]:
        """Return metrics on files, on batches, or by default on the job's validation data.

        Examples that lenient reading has skipped (`bad_rows`) do not count. ``unseen_keys`` is the fraction of keys
        that the model has never seen; `key_counts` has the numbers by slot.
        """
        metrics = Metrics()
        for part, logits in self._scored(data, format):
            metrics.update(*countable(part, logits))
        return {**metrics.summary(), "unseen_keys": self.unseen_keys}

    def evaluate_by(
        self, slot: str, data: Paths | Iterable[Batch] | None = None, format: str | None = None
    ) -> GroupValues:
        """Return metrics for each value of a slot, and the AUC within values (GAUC).

        If there are many values, they are those of a fair sample.
        """
        if slot not in self._features.slots:
            raise ArgumentError(f"the model has no slot {slot!r}; {nearest(slot, self._features.slots)}")
        metrics = GroupMetrics(self._features.slots.index(slot))
        for part, logits in self._scored(data, format):
            metrics.update(part, logits)
        return metrics.values()

    def _scored(self, data: Paths | Iterable[Batch] | None, format: str | None) -> Iterator[tuple[Batch, Floats]]:
        """Yield the examples with their logits, part by part."""
        if data is None:
            batches: Iterable[Batch] = self.validation()
        else:
            batches = self.read(data, format) if _paths(data) else data  # type: ignore[arg-type, assignment]
        self.key_counts = {}
        for part in self._parts(batches):
            yield part, self._logits(part)

    # -- figures ---------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that can be opened, oldest first."""
        return self.directory.snapshots()

    def statistics(self) -> dict[str, Any]:
        """Return the size of the model: rows, files and bytes of each table, and parameters of the dense network."""
        self._check_open()
        tables = {}
        with self._using() as opened:
            statistics = [rows.stats() for rows in opened.rows]
        for spec, figures in zip(self._specs, statistics, strict=True):
            found = asdict(figures)
            tables[spec.name] = {
                "rows": found["live_rows"],
                "row_bytes": spec.layout.row_bytes,
                "fields": self.fields(spec.name),
                "slots": len(spec.slots),
                "partitions": self.snapshot.draft.partitions,
                **{name: found[name] for name in ("files", "stale_rows", "disk_bytes", "memory_bytes")},
            }
        parameters = sum(item.size for item in self._network.parameters.values())
        return {"tables": tables, "dense_parameters": int(parameters)}

    def verify(self) -> int:
        """Check every byte of the model and return their number; raise CorruptionError that names the first damage."""
        self._check_open()
        return self.verify_snapshots()[0]

    def verify_snapshots(self) -> tuple[int, tuple[str, ...]]:
        """Check every byte of every published snapshot; return the number of bytes, and the snapshots.

        Leases protect the snapshots, so a run may go on; snapshots that it publishes later are not checked. A snapshot
        that cannot be locked and is dropped meanwhile is left out, too.
        """
        with ExitStack() as stack:
            held: dict[str, Snapshot] = {}
            for name in self.directory.state().live:
                with suppress(SnapshotError):  # dropped before it could be locked
                    if (lease := self.directory.read(name)) is not None:
                        held[name] = stack.enter_context(lease).snapshot
            while held:
                try:
                    return self._verify(list(held.values())), tuple(held)
                except (CorruptionError, SnapshotError):
                    gone = held.keys() - set(self.directory.state().live)
                    if not gone:
                        raise
                    held = {name: snapshot for name, snapshot in held.items() if name not in gone}
        raise SnapshotError(
            f"{self.directory.path}: all snapshots were dropped while they were checked, as they cannot be locked from "
            "here; verify again, or from where they can"
        )

    def _verify(self, published: Sequence[Snapshot]) -> int:
        """Check every byte of these snapshots and return the number of bytes."""
        checked = 0
        for snapshot in published:
            self.directory.load(snapshot)
            checked += sum(entry.bytes for entry in snapshot.files.values())
        with self._using() as opened:
            for spec, rows in zip(self._specs, opened.rows, strict=True):
                checked += rows.verify({snapshot.id: snapshot.digests(spec.name) for snapshot in published})
        return checked

    def close(self) -> None:
        """Close files and threads, and release the snapshot."""
        with self._refreshing:
            self._closed = True
            self._opened.close()
            self._pool.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _dense(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the dense network from those of a snapshot."""
    return {name.removeprefix("dense/"): value for name, value in arrays.items() if name.startswith("dense/")}


def _keys(keys: npt.ArrayLike) -> Keys:
    """Return keys as a uint64 array; raise ArgumentError for anything but integers from 0 to 2**64 - 1."""
    if isinstance(keys, list | tuple) and all(isinstance(key, int) and 0 <= key < 2**64 for key in keys):
        return np.array(keys, np.uint64)  # for small and large numbers together NumPy would choose float64
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ArgumentError(
            f"keys are a run of 64-bit integers from 0 to 2**64 - 1, got shape {array.shape} of {array.dtype}"
        )
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise ArgumentError(
            f"keys are integers from 0 to 2**64 - 1, got {array.min()} (of a raw value below 0: value + 2**64)"
        )
    return np.ascontiguousarray(array.astype(np.uint64, copy=False))


def _paths(data: Any) -> bool:
    """Return True if `data` is a path or a sequence of paths, not batches."""
    listed = data if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    return all(isinstance(item, str | os.PathLike) for item in listed)


def open_model(path: str | os.PathLike[str], *, snapshot: str | None = None, cores: int | None = None) -> Model:
    """Open a trained model for reading, at its last snapshot or a named one.

    >>> with open_model(demo_model) as model:
    ...     embeddings = model.pull([1, 2, 2**64 - 1])
    ...     model.tables, embeddings.shape, model.contains([2**64 - 1]).tolist()
    (('main',), (3, 8), [False])
    """
    return Model(path, snapshot, cores)


def evaluate(
    model: str | os.PathLike[str],
    data: Paths | None = None,
    *,
    format: str | None = None,
    snapshot: str | None = None,
) -> dict[str, float]:
    """Return the metrics of a trained model on files, by default on its job's validation data.

    >>> metrics = evaluate(demo_model)
    >>> 0.5 < metrics["auc"] <= 1
    True
    """
    with open_model(model, snapshot=snapshot) as opened:
        return opened.evaluate(data, format)
