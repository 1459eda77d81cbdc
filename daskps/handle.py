"""A trained model to be asked: rows by key, predictions, metrics, snapshots, figures.

In: a model directory, optionally the name of a snapshot. Out: `Model`, which only reads; a run may go on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.backend.device import devices
from daskps.backend.pool import ComputePool
from daskps.cluster.commit import ModelDirectory, Snapshot
from daskps.config import Job, make_job
from daskps.data.order import Steps
from daskps.errors import ArgumentError, ConfigError, SnapshotError
from daskps.explain import nearest
from daskps.flow import inputs
from daskps.flow.frames import frame_batch
from daskps.flow.parts import build_network, row_filler, table_specs
from daskps.flow.predict import Predictor
from daskps.model import engine
from daskps.model.group_metrics import GroupMetrics, GroupValues
from daskps.model.metrics import Metrics
from daskps.ssd import Partitions
from daskps.types import Batch, Bools, Floats, Keys, RowLayout

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
PREDICT_EXAMPLES = 1 << 15  # at once: the rows of so many examples are in memory


class Model:
    """A model at one snapshot. Close it, or use it in a `with`; `open_model` makes it.

    `bad_rows` is what lenient reading has skipped of the data read last: by reason, how many rows and the first place.
    """

    def __init__(self, path: str | os.PathLike[str], snapshot: str | None = None, cores: int | None = None) -> None:
        self.directory = ModelDirectory(os.fspath(path))
        found = self.directory.snapshot(snapshot)
        if found is None:
            raise SnapshotError(f"{self.directory.path} holds no model: nothing was ever published there")
        self.snapshot: Snapshot = found
        self.job: Job = make_job(found.draft.settings["job"], f"the settings in snapshot {found.id}")
        self._pool = ComputePool(cores or len(os.sched_getaffinity(0)))
        self._device = devices("cpu", 1, pool=self._pool)[0]
        self._hashing = inputs.hashing(self.job)
        self._features = inputs.features(self.job)
        self._specs = table_specs(self.job, self._features)
        self._fillers = [row_filler(self.job, spec, self._device) for spec in self._specs]
        self._network = build_network(self.job, self._specs, self._features, engine.cpu(self._pool))
        self._network.load(self.dense(state=True))
        self.bad_rows: dict[str, tuple[int, str]] = {}
        self._rows: list[Partitions] = []
        try:
            for spec in self._specs:
                self._rows.append(self._open(spec.name))
        except BaseException:
            self.close()
            raise
        self._predictor = Predictor(self._device, self._specs, self._network, self._lookup)

    def _open(self, table: str) -> Partitions:
        path = f"{self.directory.path}/tables/{table}"
        return Partitions.open(path, pool=self._pool, snapshot=self.snapshot.id, read_only=True)

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
        """One field of the rows of `keys`, (n, values); a key that was never trained answers as it would begin.

        `field` is ``embedding``, a field of the optimizer's state (`fields` lists them), or ``row`` for all of it.
        """
        number = self._number(table)
        rows = self._lookup(number, _keys(keys))
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
        """Which keys were ever trained."""
        return self._rows[self._number(table)].load(_keys(keys))[1]

    def fields(self, table: str | None = None) -> dict[str, int]:
        """The fields of a row, with the number of values of each."""
        return {field.name: field.count for field in self._specs[self._number(table)].layout.fields}

    def layout(self, table: str | None = None) -> RowLayout:
        """Where each field is in a row."""
        return self._specs[self._number(table)].layout

    def rows(self, table: str | None = None) -> int:
        """How many keys a table holds."""
        return len(self._rows[self._number(table)])

    def scan(self, table: str | None = None) -> Iterator[tuple[Keys, Floats]]:
        """All keys with their whole rows, piece by piece, in no order of keys."""
        return self._rows[self._number(table)].scan()

    def dense(self, state: bool = False) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the dense network; with its optimizer's state if asked for."""
        arrays = self.directory.load(self.snapshot)
        every = {name.removeprefix("dense/"): value for name, value in arrays.items() if name.startswith("dense/")}
        return every if state else {name: every[name] for name in self._network.parameters}

    def _number(self, table: str | None) -> int:
        if table is None and len(self._specs) == 1:
            return 0
        if table not in self.tables:
            raise ArgumentError(f"the model has no table {table!r}; {nearest(str(table), self.tables)}")
        return self.tables.index(table)

    def _lookup(self, number: int, keys: Keys) -> Floats:
        rows = np.empty((len(keys), self._specs[number].layout.width), np.float32)
        self._fillers[number](keys, rows)
        return self._rows[number].load(keys, rows)[0]

    # -- predictions -----------------------------------------------------------------------------------------------

    def predict(self, data: Any) -> Floats:
        """Probability of a click of every example of a `Batch`, or of every row of a data frame.

        The frame (pandas, Arrow, polars, cuDF, or a dictionary of columns) has the columns that the job names; a label
        is not needed. A batch has the keys that the model has, as those of `read` and `validation`.
        """
        if isinstance(data, Batch):
            batch = data
        else:
            batch = self._hashed(frame_batch(data, inputs.job_schema(self.job), self.job.data.hash_seed))
        pieces = [probabilities for _, probabilities in self.predict_batches([batch])]
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32)

    def predict_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Floats]]:
        """Probabilities of a stream of batches, each with the batch (or the part of it) that they belong to."""
        for part in self._parts(batches):
            yield part, self._network.probabilities(self._predictor.logits(part))

    def _parts(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The examples of batches, as many at once as are to be in memory."""
        slots = self._features.slots
        for batch in batches:
            if not isinstance(batch, Batch):
                raise ArgumentError(f"got a {type(batch).__name__} where batches are wanted; frames are for `predict`")
            if batch.slots != len(slots):  # others would be taken for them by their numbers
                raise ArgumentError(f"a batch of {batch.slots} slots came, but the model has {len(slots)}: {slots}")
            for start in range(0, batch.examples, PREDICT_EXAMPLES):
                yield batch.slice(start, min(start + PREDICT_EXAMPLES, batch.examples))

    def read(self, paths: Paths, format: str | None = None, *, labelled: bool = True) -> Iterator[Batch]:
        """The examples of files, with the job's schema; `format` is the job's own unless said otherwise.

        With labelled=False neither labels nor example weights are looked at, nor need they be there: enough to predict.
        """
        named = [paths] if isinstance(paths, str | os.PathLike) else paths
        with inputs.open_data(self.job, [os.fspath(path) for path in named], self._pool, format, labelled) as reader:
            for batch in reader.batches(PREDICT_EXAMPLES):
                self.bad_rows = inputs.skipped_rows(reader)
                yield self._hashed(batch)

    def _hashed(self, batch: Batch) -> Batch:
        return batch if self._hashing is None else self._hashing.apply(batch, self._pool)

    def validation(self) -> Iterator[Batch]:
        """The validation examples of the job."""
        reader = inputs.open_validation(self.job, self._pool, 0, 1)
        if reader is None:
            raise ConfigError(
                f"the job of {self.directory.path} names no validation data (data.validation_paths or, where it is "
                "synthetic, data.validation_rows): say which data to evaluate on"
            )
        steps = Steps(self.job.train.minibatch_examples).count(reader.rows)
        for step in range(steps):
            batch = reader.read_steps(step, step + 1)[0]
            self.bad_rows = inputs.skipped_rows(reader)
            yield batch
        reader.close()

    def evaluate(self, data: Paths | Iterable[Batch] | None = None, format: str | None = None) -> dict[str, float]:
        """Metrics on files, on batches, or by default on the job's validation data."""
        metrics = Metrics()
        for part, logits in self._scored(data, format):
            metrics.update(part.labels, logits, part.example_weights)
        return metrics.summary()

    def evaluate_by(
        self, slot: str, data: Paths | Iterable[Batch] | None = None, format: str | None = None
    ) -> GroupValues:
        """Metrics for each value of a slot, and the AUC within values (GAUC); of a fair sample where there are many."""
        if slot not in self._features.slots:
            raise ArgumentError(f"the model has no slot {slot!r}; {nearest(slot, self._features.slots)}")
        metrics = GroupMetrics(self._features.slots.index(slot))
        for part, logits in self._scored(data, format):
            metrics.update(part, logits)
        return metrics.values()

    def _scored(self, data: Paths | Iterable[Batch] | None, format: str | None) -> Iterator[tuple[Batch, Floats]]:
        """Examples and their logits, piece by piece."""
        if data is None:
            batches: Iterable[Batch] = self.validation()
        else:
            batches = self.read(data, format) if _paths(data) else data  # type: ignore[arg-type, assignment]
        for part in self._parts(batches):
            yield part, self._predictor.logits(part)

    # -- figures ---------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """All snapshots that can be opened, oldest first."""
        return self.directory.snapshots()

    def statistics(self) -> dict[str, Any]:
        """How large the model is: rows, files and bytes of each table, and the dense network."""
        tables = {}
        for spec, rows in zip(self._specs, self._rows, strict=True):
            found = asdict(rows.stats())
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
        """Check every byte of the model; the number checked. The first damage raises CorruptionError and is named."""
        checked = 0
        for snapshot in self.directory.snapshots():
            self.directory.load(snapshot)
            checked += sum(entry.bytes for entry in snapshot.files.values())
        return checked + sum(rows.verify() for rows in self._rows)

    def close(self) -> None:
        """Let go of files and threads."""
        for rows in self._rows:
            rows.close()
        self._pool.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _keys(keys: npt.ArrayLike) -> Keys:
    if isinstance(keys, list | tuple) and all(isinstance(key, int) and 0 <= key < 2**64 for key in keys):
        return np.array(keys, np.uint64)  # NumPy's own choice for small and large numbers together is float64
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ArgumentError(
            f"keys are a run of 64-bit integers from 0 to 2**64 - 1, got shape {array.shape} of {array.dtype}"
        )
    return np.ascontiguousarray(array.astype(np.uint64, copy=False))


def _paths(data: Any) -> bool:
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
    """Metrics of a trained model on files, by default on its job's validation data.

    >>> metrics = evaluate(demo_model)
    >>> 0.5 < metrics["auc"] <= 1
    True
    """
    with open_model(model, snapshot=snapshot) as opened:
        return opened.evaluate(data, format)
