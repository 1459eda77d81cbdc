"""From a job's settings to open readers: which slots there are, which table each is in, where rows come from.

In: a `Job`. Out: `Inputs`, the schema that all nodes share, and readers of this node's slices of every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from daskps.backend.pool import ComputePool
from daskps.config import Job
from daskps.data import delimited
from daskps.data.bad import BadRowPolicy, BadRows
from daskps.data.format import Format
from daskps.data.frame import frame_source
from daskps.data.generated import GeneratedReader
from daskps.data.order import Order, Steps
from daskps.data.osrp import Osrp
from daskps.data.parquet import Parquet
from daskps.data.reader import Reader
from daskps.data.schema import Dense, Schema, Slot, SlotKind, criteo_schema
from daskps.data.source import Source
from daskps.data.synthetic import Synthetic
from daskps.data.text import BLOCK_BYTES
from daskps.data.tokens import Tokens
from daskps.errors import ConfigError, DataError
from daskps.explain import nearest
from daskps.types import Batch, Int64s

BLOCKS = 8  # of the memory, one part for blocks of files
LEAST_BLOCKS = 8  # of text, as large as it takes to have so many
LEAST_BLOCK_BYTES = 1 << 16


class StepReader(Protocol):
    """What the read stage needs: a node's slices of steps. `rows` counts all epochs."""

    rows: int

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Features:
    """The slots of a batch in order, each with its table, and the number of dense features."""

    slots: tuple[str, ...]
    tables: tuple[str, ...]  # of each slot
    dense: int

    def slots_of(self, table: str) -> tuple[int, ...]:
        """Numbers of the slots in `table`."""
        return tuple(number for number, name in enumerate(self.tables) if name == table)


def features(job: Job) -> Features:
    """The features that the job's data has, checked against its tables."""
    synthetic = job.data.synthetic
    default = next(iter(job.tables))
    if job.slots:
        sparse = [slot for slot in job.slots if slot.kind != "dense"]
        found = Features(
            tuple(slot.name for slot in sparse),
            tuple(slot.table for slot in sparse),
            len(job.slots) - len(sparse),
        )
    elif synthetic is not None:
        names = tuple(f"slot{number}" for number in range(synthetic.slots))
        found = Features(names, (default,) * len(names), synthetic.dense_features)
    elif job.data.format == "criteo":
        schema = criteo_schema()
        found = Features(tuple(slot.name for slot in schema.slots), (default,) * len(schema.slots), 0)
    else:
        raise ConfigError(f"format {job.data.format!r} needs slots: name the columns to learn from, one [[slots]] each")
    if synthetic is not None and (len(found.slots), found.dense) != (synthetic.slots, synthetic.dense_features):
        raise ConfigError(
            f"the job names {len(found.slots)} slots and {found.dense} dense features, but the synthetic data has "
            f"{synthetic.slots} and {synthetic.dense_features}"
        )
    if job.data.osrp is not None and not job.data.osrp.per_slot:
        found = Features(("hashed",), (default,), found.dense)
    if unused := sorted(set(job.tables) - set(found.tables)):
        raise ConfigError(f"no slot is in table {', '.join(unused)}: give it slots, or leave it out")
    return found


def open_training(job: Job, pool: ComputePool, rank: int, nodes: int, frame: Any = None) -> StepReader:
    """This node's reader of the training data, all epochs; `frame` is the Dask DataFrame of a job of that format."""
    data = job.data
    steps = _steps(job, rank, nodes)
    if data.synthetic is not None:
        rows = data.synthetic.examples
        generated = GeneratedReader(synthetic(job), pool, steps, first_row=0, stop_row=rows, epochs=job.train.epochs)
        return _hashed(job, generated, pool)
    order = Order(job.train.epochs, data.shuffle_window_rows, job.seed)
    source = _frame_source(job, frame) if data.format == "frame" else _source(job, data.paths)
    reader = source.open(source.index(pool.cores), pool, order, steps, _blocks_bytes(job))
    return _hashed(job, _with_rows(reader, data.paths or data.format), pool)


def open_validation(job: Job, pool: ComputePool, rank: int, nodes: int) -> StepReader | None:
    """This node's reader of the validation data, or None."""
    data = job.data
    steps = _steps(job, rank, nodes)
    if data.synthetic is not None:
        first = data.synthetic.examples
        if not data.validation_rows:
            return None
        last = first + data.validation_rows
        return _hashed(job, GeneratedReader(synthetic(job), pool, steps, first_row=first, stop_row=last), pool)
    if not data.validation_paths:
        return None
    source = _source(job, data.validation_paths, _file_format(data.format))
    reader = source.open(source.index(pool.cores), pool, Order(), steps, _blocks_bytes(job) // 4)
    return _hashed(job, _with_rows(reader, data.validation_paths), pool)


def _with_rows(reader: Reader, where: Any) -> Reader:
    """The reader; DataError if there is nothing to read, which a run would take for the end of the data."""
    if not reader.rows:
        reader.close()
        raise DataError(f"the data at {where} has no rows: check what was written there")
    return reader


class HashedReader:
    """Another reader's batches, with their keys hashed by OP+OSRP."""

    def __init__(self, reader: StepReader, hashing: Osrp, pool: ComputePool) -> None:
        self._reader, self._hashing, self._pool = reader, hashing, pool
        self.rows = reader.rows

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """This node's slices of steps [first, last) as one batch, and where each begins in it."""
        batch, starts = self._reader.read_steps(first_step, last_step)
        return self._hashing.apply(batch, self._pool), starts

    @property
    def behind(self) -> StepReader:
        """The reader whose batches these are."""
        return self._reader

    def close(self) -> None:
        """Close the reader behind."""
        self._reader.close()


def of_files(reader: StepReader | None) -> Reader | None:
    """The reader of files behind this one, if there is one."""
    behind = reader.behind if isinstance(reader, HashedReader) else reader
    return behind if isinstance(behind, Reader) else None


def skipped_rows(reader: StepReader | None) -> dict[str, tuple[int, str]]:
    """Bad rows that lenient reading has skipped so far, by reason, each with its first place."""
    files = of_files(reader)
    return files.bad_rows.skipped() if files is not None else {}


def rows_read(reader: StepReader | None) -> int:
    """Rows of files that this node has taken so far."""
    files = of_files(reader)
    return files.bad_rows.rows if files is not None else 0


def judge_bad_rows(job: Job, total_rows: int, read: int, skipped: Mapping[str, tuple[int, str]]) -> None:
    """DataError if all nodes together have skipped more than the job allows: each judges only what it has read."""
    counts, places = Counter({reason: n for reason, (n, _) in skipped.items()}), skipped.items()
    BadRows(_policy(job), total_rows, read, counts, {reason: [place] for reason, (_, place) in places}).judge()


def _policy(job: Job) -> BadRowPolicy:
    return BadRowPolicy(job.data.bad_lines, job.data.bad_share)


def _blocks_bytes(job: Job) -> int:
    """The part of the memory that blocks of files may take, if two of them do not take more."""
    return job.budget.memory_bytes // BLOCKS


def hashing(job: Job) -> Osrp | None:
    """The hashing that gives features the keys that the model has, where the job asks for one."""
    settings = job.data.osrp
    return None if settings is None else Osrp(settings.bins, seed=settings.seed, per_slot=settings.per_slot)


def _hashed(job: Job, reader: StepReader, pool: ComputePool) -> StepReader:
    hashed = hashing(job)
    return reader if hashed is None else HashedReader(reader, hashed, pool)


def synthetic(job: Job) -> Synthetic:
    """The generator of a job with synthetic data, with the validation rows behind the training rows."""
    data = job.data.synthetic
    if data is None:
        raise ConfigError(f"the job's data is {job.data.format!r}, not synthetic")
    scales = {
        name: value for name in ("weight_scale", "interaction_scale") if (value := getattr(data, name)) is not None
    }
    return Synthetic(
        examples=data.examples + job.data.validation_rows,
        slots=data.slots,
        keys_per_slot=data.keys_per_bag,
        key_space=data.keys_per_slot,
        zipf_exponent=data.zipf_exponent,
        dense=data.dense_features,
        drift_rows=data.drift_rows,
        seed=data.seed,
        **scales,
    )


def _steps(job: Job, rank: int, nodes: int) -> Steps:
    train = job.train
    return Steps(train.minibatch_examples, nodes, rank, job.cluster.devices, train.block_examples)


def open_data(
    job: Job, paths: Sequence[str], pool: ComputePool, format: str | None = None, labelled: bool = True
) -> Reader:
    """A reader of other data with the job's schema, in order; `format` is the job's unless said otherwise.

    Its keys are those of the data: `hashing` is still to be applied. Where it is not `labelled`, labels are 0.
    """
    source = _source(job, tuple(paths), _file_format(format or job.data.format), labelled)
    return source.open(source.index(pool.cores), pool)


def _file_format(format: str) -> str:
    """What files of a job's data are: Parquet is what `daskps synth` writes, and what keeps a frame's columns."""
    return "parquet" if format in ("synthetic", "frame") else format


def _source(job: Job, paths: tuple[str, ...], format: str | None = None, labelled: bool = True) -> Source:
    data, schema = job.data, job_schema(job) if labelled else job_schema(job).unlabelled()
    block_bytes = min(max(_blocks_bytes(job) // LEAST_BLOCKS, LEAST_BLOCK_BYTES), BLOCK_BYTES)
    return Source(paths, _format(format or data.format, block_bytes, labelled), schema, data.hash_seed, _policy(job))


def job_schema(job: Job) -> Schema:
    """The columns that the job learns from."""
    synthetic = job.data.synthetic
    if synthetic is not None:  # the columns that `Synthetic.write_parquet` gives its slots
        kind: SlotKind = "categorical" if synthetic.keys_per_bag == 1 else "multi"
        names = [slot.name for slot in job.slots if slot.kind != "dense"] or features(job).slots
        slots = tuple(Slot(name, f"slot{number}", kind, raw=True) for number, name in enumerate(names))
        return Schema(slots, tuple(Dense(f"dense{number}") for number in range(synthetic.dense_features)))
    if not job.slots:
        return replace(criteo_schema(), label=job.data.label, example_weight=job.data.weight or "")
    slots = tuple(
        Slot(slot.name, slot.column or "", slot.kind, slot.raw, table=slot.table)
        for slot in job.slots
        if slot.kind != "dense"
    )
    dense = tuple(Dense(slot.name, slot.column or "") for slot in job.slots if slot.kind == "dense")
    return Schema(slots, dense, job.data.label, job.data.weight or "")


def _frame_source(job: Job, frame: Any) -> Source:
    if frame is None:
        raise ConfigError("the job's data is a frame: hand the Dask DataFrame to train(job, frame=...)")
    return frame_source(frame, job_schema(job), job.data.hash_seed, _policy(job))


def _format(name: str, block_bytes: int, labelled: bool) -> Format:
    if name == "criteo":
        return delimited.criteo(block_bytes, labelled)
    if name == "csv":
        return delimited.Delimited(",", block_bytes=block_bytes)
    if name == "parquet":
        return Parquet()
    styles: dict[str, Literal["libsvm", "libffm", "slots"]] = {
        "libsvm": "libsvm",
        "libffm": "libffm",
        "multislot": "slots",
    }
    if name not in styles:
        known = ("criteo", "csv", "parquet", *styles)
        raise ConfigError(f"there are no files of format {name!r}; {nearest(name, known)}")
    return Tokens(styles[name], block_bytes=block_bytes)
