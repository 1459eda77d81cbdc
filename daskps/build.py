"""Factories that make the parts of a job: readers, tables with their layouts, optimizers, the network, initial rows.

Input: a `Job`. Output: the same parts for a node that trains and for a model that is only read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from daskps.config import Job
from daskps.data.bad import BadExamplePolicy, BadExamples
from daskps.data.formats import FILE_FORMATS, FORMATS, FormatOptions, SyntheticSettings
from daskps.data.frame import frame_source
from daskps.data.order import Order, Steps
from daskps.data.osrp import Osrp
from daskps.data.reader import Reader, Source
from daskps.data.schema import Schema, Slot, SlotKind
from daskps.data.synthetic import GeneratedReader, Synthetic
from daskps.data.text import BLOCK_BYTES
from daskps.device.device import Device
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from daskps.hbm.optimizer import (
    Initialiser,
    Optimizer,
    OptimizerSettings,
    initialise_rows,
    optimizer_fields,
    state_initialisers,
)
from daskps.hbm.table import TableSpec
from daskps.nn.dense_model import DenseModel
from daskps.nn.network import build
from daskps.nn.optimizer import DenseOptimizer
from daskps.settings import nearest
from daskps.types import Batch, Floats, Int64s, Keys, RowLayout


def table_specs(job: Job, features: Features) -> list[TableSpec]:
    """Return the job's tables with their slots and row layouts, in the order of the job."""
    specs = []
    for number, (name, table) in enumerate(job.tables.items()):
        optimizer = row_optimizer(table.optimizer)
        layout = RowLayout(optimizer_fields(optimizer.kind, table.dimension))
        slots = features.slots_of(name)
        names = tuple(features.slots[slot] for slot in slots)
        specs.append(TableSpec(name, number, slots, table.dimension, table.pooling, optimizer, layout, names))
    return specs


def row_optimizer(settings: OptimizerSettings) -> Optimizer:
    """Return the row optimizer for these settings."""
    return Optimizer(**settings.model_dump())


def dense_optimizer(settings: OptimizerSettings) -> DenseOptimizer:
    """Return the optimizer of the dense network for these settings."""
    names = {"kind", "learning_rate", "l2", "epsilon", "initial_accumulator", "beta1", "beta2"}
    return DenseOptimizer(**settings.model_dump(include=names), clip_norm=settings.clip_norm or None)


def build_network(job: Job, specs: list[TableSpec], features: Features, device: Device) -> DenseModel:
    """Return the dense network with its optimizer and its initial parameters."""
    return build(
        job.model.kind,
        tables=[(len(spec.slots), spec.dim) for spec in specs],
        dense_features=features.dense,
        hidden=job.model.layers,
        seed=job.seed,
        device=device,
        optimizer=dense_optimizer(job.model.optimizer),
        block_examples=job.train.block_examples,
        slot_names=[spec.slot_names for spec in specs],
    )


def row_filler(job: Job, spec: TableSpec, device: Device) -> Callable[[Keys, Floats], None]:
    """Return the function that fills in initial rows of unknown keys; they depend only on (seed, table, key)."""
    settings = job.tables[spec.name].initialiser
    scale = settings.scale
    embedding = {
        "constant": Initialiser("constant", scale),
        "uniform": Initialiser("uniform", -scale, scale),
        "normal": Initialiser("normal", 0.0, scale),
    }[settings.kind]
    fill: Callable[[Keys, Floats], None] = initial_rows(spec, embedding, job.seed, device)
    return fill


def initial_rows(spec: TableSpec, embedding: Initialiser, seed: int, device: Device) -> Any:
    """Return the function by which MEM-PS makes rows of unknown keys; they depend only on (seed, table, key)."""
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


FILE_BLOCKS_FRACTION = 1 / 8  # of budget.memory_bytes
LEAST_BLOCKS = 8  # text blocks are made so small that at least 8 fit that memory,
LEAST_BLOCK_BYTES = 1 << 16  # but not smaller than 64 KiB


class StepReader(Protocol):
    """Reader of a node's examples of each step, as the read stage uses it. `examples` counts those of all passes."""

    examples: int

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Features:
    """Slots of a batch in order, each with its table, and the number of dense features."""

    slots: tuple[str, ...]
    tables: tuple[str, ...]  # table of each slot
    dense: int

    def slots_of(self, table: str) -> tuple[int, ...]:
        """Return the numbers of the slots in `table`."""
        return tuple(number for number, name in enumerate(self.tables) if name == table)


def synthetic_slots(data: SyntheticSettings) -> tuple[str, ...]:
    """Return the names of generated slots, which are also their column names."""
    return tuple(f"slot{number}" for number in range(data.slots))


def features(job: Job) -> Features:
    """Return the features of the job's data; raise ConfigError if they do not match its tables."""
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
        names = synthetic_slots(synthetic)
        found = Features(names, (default,) * len(names), synthetic.dense_features)
    else:
        schema = job_schema(job)
        names = tuple(slot.name for slot in schema.slots)
        found = Features(names, (default,) * len(names), len(schema.dense))
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
    """Open this node's reader of the training data, over all passes.

    `frame` is the Dask DataFrame of a job whose data format is frame.
    """
    data = job.data
    check_leaks(job)
    steps = _steps(job, rank, nodes)
    if data.synthetic is not None:
        generated = GeneratedReader(
            synthetic(job), pool, steps, start=0, stop=data.synthetic.examples, passes=job.train.epochs
        )
        return _hashed(job, generated, pool)
    order = Order(job.train.epochs, data.shuffle_window_rows, job.seed)
    source = _frame_source(job, frame) if FORMATS[data.format].source == "frame" else _source(job, data.paths)
    reader = source.open(source.index(pool.cores), pool, order, steps, _blocks_bytes(job))
    return _hashed(job, _with_examples(reader, data.paths or data.format), pool)


def check_leaks(job: Job) -> None:
    """Raise ConfigError if a slot reads the column of the label or of the weights: the model would be useless."""
    if not FORMATS[job.data.format].named_columns:
        return
    schema = job_schema(job)
    features = [*((slot.name, slot.source) for slot in schema.slots), *((d.name, d.source) for d in schema.dense)]
    for name, source in features:
        for setting, column in (("data.label", job.data.label), ("data.weight", job.data.weight)):
            if source == column:
                raise ConfigError(
                    f"slot {name!r} reads the column {column!r}, which is {setting}: the model would learn to "
                    "look the answer up. Leave the slot out, or give it another column"
                    + ("" if job.slots else f" (the job names no slots, so all columns of {job.data.format} are read)")
                )


def open_validation(job: Job, pool: ComputePool, rank: int, nodes: int) -> StepReader | None:
    """Open this node's reader of the validation data; None if the job has none."""
    data = job.data
    steps = _steps(job, rank, nodes)
    if data.synthetic is not None:
        first = data.synthetic.examples
        if not data.validation_rows:
            return None
        last = first + data.validation_rows
        return _hashed(job, GeneratedReader(synthetic(job), pool, steps, start=first, stop=last), pool)
    if not data.validation_paths:
        return None
    source = _source(job, data.validation_paths)
    reader = source.open(source.index(pool.cores), pool, Order(), steps, _blocks_bytes(job) // 4)
    return _hashed(job, _with_examples(reader, data.validation_paths), pool)


def _with_examples(reader: Reader, where: Any) -> Reader:
    """Return the reader; raise DataError if it has no examples, which would look like the end of training."""
    if not reader.examples:
        reader.close()
        raise DataError(f"the data at {where} has no examples: check what was written there")
    return reader


class HashedReader:
    """Reader that hashes the keys of another reader's batches by OP+OSRP."""

    def __init__(self, reader: StepReader, hashing: Osrp, pool: ComputePool) -> None:
        self._reader, self._hashing, self._pool = reader, hashing, pool
        self.examples = reader.examples

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """Return this node's examples of steps [first, last) as one batch, and the start of each step in it."""
        batch, starts = self._reader.read_steps(first_step, last_step)
        return self._hashing.apply(batch, self._pool), starts

    @property
    def behind(self) -> StepReader:
        """Reader whose batches are hashed."""
        return self._reader

    def close(self) -> None:
        """Close the reader whose batches are hashed."""
        self._reader.close()


def of_files(reader: StepReader | None) -> Reader | None:
    """Return the reader of files below this reader; None if the data is generated."""
    behind = reader.behind if isinstance(reader, HashedReader) else reader
    return behind if isinstance(behind, Reader) else None


def skipped_examples(reader: StepReader | None) -> dict[str, tuple[int, str]]:
    """Return the bad examples that lenient reading has skipped so far: by reason, their number and the first place."""
    files = of_files(reader)
    return files.bad_examples.skipped() if files is not None else {}


def examples_read(reader: StepReader | None) -> int:
    """Return the number of examples that this node has read from files so far."""
    files = of_files(reader)
    return files.bad_examples.examples if files is not None else 0


def judge_bad_examples(job: Job, total_examples: int, read: int, skipped: Mapping[str, tuple[int, str]]) -> None:
    """Raise DataError if all nodes together have skipped more than the job allows.

    Each node checks only the examples that it has read itself.
    """
    counts, places = Counter({reason: n for reason, (n, _) in skipped.items()}), skipped.items()
    BadExamples(_policy(job), total_examples, read, counts, {reason: [place] for reason, (_, place) in places}).judge()


def _policy(job: Job) -> BadExamplePolicy:
    return BadExamplePolicy(job.data.bad_lines, job.data.bad_share)


def _blocks_bytes(job: Job) -> int:
    """Return the memory for blocks of files in bytes. Two blocks are always allowed, even if they take more."""
    return int(job.budget.memory_bytes * FILE_BLOCKS_FRACTION)


def hashing(job: Job) -> Osrp | None:
    """Return the OP+OSRP hashing that maps the data's keys to the model's; None if the job has none."""
    settings = job.data.osrp
    return None if settings is None else Osrp(settings.bins, seed=settings.seed, per_slot=settings.per_slot)


def _hashed(job: Job, reader: StepReader, pool: ComputePool) -> StepReader:
    hashed = hashing(job)
    return reader if hashed is None else HashedReader(reader, hashed, pool)


def synthetic(job: Job) -> Synthetic:
    """Return the generator of a job with synthetic data; validation examples come after the training examples."""
    data = job.data.synthetic
    if data is None:
        raise ConfigError(f"the job's data is {job.data.format!r}, not synthetic")
    scales = {
        name: value for name in ("weight_scale", "interaction_scale") if (value := getattr(data, name)) is not None
    }
    return Synthetic(
        examples=data.examples + job.data.validation_rows,
        slots=data.slots,
        keys_per_bag=data.keys_per_bag,
        keys_per_slot=data.keys_per_slot,
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
    job: Job,
    paths: Sequence[str],
    pool: ComputePool,
    format: str | None = None,
    labelled: bool = True,
    label_needed: bool = True,
) -> Reader:
    """Open a reader of other data with the job's schema, in file order; `format` is by default the job's.

    The keys are those of the data; the caller must apply `hashing`. With labelled=False all labels are 0. With
    label_needed=False a label that cannot be parsed is NaN, and example weights are ignored.
    """
    source = _source(job, tuple(paths), format, labelled)
    if labelled and not label_needed:
        source = replace(source, schema=source.schema.for_prediction())
    return source.open(source.index(pool.cores), pool)


def _source(job: Job, paths: tuple[str, ...], format: str | None = None, labelled: bool = True) -> Source:
    data, schema = job.data, job_schema(job) if labelled else job_schema(job).unlabelled()
    name = format or data.format
    if name not in FORMATS:
        raise ConfigError(f"there are no files of format {name!r}; {nearest(name, FILE_FORMATS)}")
    options = FormatOptions(
        block_bytes=min(max(_blocks_bytes(job) // LEAST_BLOCKS, LEAST_BLOCK_BYTES), BLOCK_BYTES),
        labelled=labelled,
        token_weights=data.token_weights,
        ignore_unknown_slots=data.unknown_slots == "ignore",
    )
    return Source(paths, FORMATS[name].make(options), schema, data.hash_seed, _policy(job))


def job_schema(job: Job) -> Schema:
    """Return the columns that the job learns from."""
    synthetic = job.data.synthetic
    if synthetic is not None:  # the columns that `Synthetic.write_parquet` gives its slots
        kind: SlotKind = "categorical" if synthetic.keys_per_bag == 1 else "multi"
        # Not the names of `features`: there is only one if OP+OSRP hashes all slots together.
        names = [slot.name for slot in job.slots if slot.kind != "dense"] or synthetic_slots(synthetic)
        slots = tuple(Slot(name=name, column=f"slot{number}", kind=kind, raw=True) for number, name in enumerate(names))
        dense = tuple(Slot(name=f"dense{number}", kind="dense") for number in range(synthetic.dense_features))
        return Schema(slots, dense, key_rule=job.data.key_rule)
    data, own = job.data, FORMATS[job.data.format].schema
    if job.slots:
        slots = tuple(slot for slot in job.slots if slot.kind != "dense")
        schema = Schema(slots, tuple(slot for slot in job.slots if slot.kind == "dense"))
    elif own is not None:
        schema = own(data.dense_integers)
    else:
        raise ConfigError(f"format {data.format!r} needs slots: name the columns to learn from, one [[slots]] each")
    return replace(schema, label=data.label, example_weight=data.weight or "", key_rule=data.key_rule)


def _frame_source(job: Job, frame: Any) -> Source:
    if frame is None:
        raise ConfigError("the job's data is a frame: hand the Dask DataFrame to train(job, frame=...)")
    return frame_source(frame, job_schema(job), job.data.hash_seed, _policy(job))
